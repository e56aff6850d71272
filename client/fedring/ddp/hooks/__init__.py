"""Communication hooks of DistributedDataParallel for any backend: torch's, by torch's names, and others.

    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10,
                          named_parameters=model.named_parameters())
    ddp.register_comm_hook(state, powerSGD_hook)

A state that knows the names of its parameters goes into checkpoints with state_dict() and load_state_dict().
"""

from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)

from fedring.ddp.dgc import dgc_hook
from fedring.ddp.hooks.int8 import Int8State, int8_hook
from fedring.ddp.hooks.powersgd import batched_powerSGD_hook, powerSGD_hook
from fedring.ddp.hooks.powersgd_state import PowerSGDState
from fedring.ddp.hooks.stateless import bf16_hook as bf16_compress_hook
from fedring.ddp.hooks.stateless import bf16_wrapper as bf16_compress_wrapper
from fedring.ddp.hooks.topk import TopKState, topk_hook
from fedring.ddp.state import DGCState

__all__ = [
    "DGCState",
    "Int8State",
    "PowerSGDState",
    "TopKState",
    "allreduce_hook",
    "batched_powerSGD_hook",
    "bf16_compress_hook",
    "bf16_compress_wrapper",
    "dgc_hook",
    "fp16_compress_hook",
    "fp16_compress_wrapper",
    "int8_hook",
    "noop_hook",
    "powerSGD_hook",
    "topk_hook",
]
