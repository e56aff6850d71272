"""Communication hooks of DistributedDataParallel for any backend.

They are torch's, under torch's names, and others.

Here live the hooks, each with its state, and the list by name (`by_name`). A new hook enters with a state that is a
`fedring.ddp.state.HookState`, and with its name and parameters in `fedring.train.names.hooks`. Mathematics of tensors
does not belong here but into `fedring.compress`, nor does anything of jobs or of one backend. So they are used::

    state = PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=10,
                          named_parameters=model.named_parameters())
    ddp.register_comm_hook(state, powerSGD_hook)

    ddp.register_comm_hook(*hook_by_name("topk(ratio=0.05)", model.named_parameters()))

A state that knows the names of its parameters goes into checkpoints with state_dict() and load_state_dict().
"""

from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)

from fedring.ddp.dgc import DGCState, dgc_hook
from fedring.ddp.hooks.by_name import hook_by_name
from fedring.ddp.hooks.int8 import Int8State, int8_hook
from fedring.ddp.hooks.plain import bf16_hook as bf16_compress_hook
from fedring.ddp.hooks.plain import bf16_wrapper as bf16_compress_wrapper
from fedring.ddp.hooks.powersgd import batched_powerSGD_hook, powerSGD_hook
from fedring.ddp.hooks.powersgd_state import PowerSGDState
from fedring.ddp.hooks.topk import TopKState, topk_hook

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
    "hook_by_name",
    "int8_hook",
    "noop_hook",
    "powerSGD_hook",
    "topk_hook",
]
