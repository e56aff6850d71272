"""Hooks by the names that jobs and commands know them by."""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

from fedring.compress.dgc import DGC
from fedring.ddp.dgc import dgc_hook
from fedring.ddp.hooks.int8 import Int8State, int8_hook
from fedring.ddp.hooks.powersgd import batched_powerSGD_hook, powerSGD_hook
from fedring.ddp.hooks.powersgd_state import PowerSGDState
from fedring.ddp.hooks.stateless import Hook, bf16_hook
from fedring.ddp.hooks.topk import TopKState, topk_hook
from fedring.ddp.state import DGCState

Group = dist.ProcessGroup | None
Parameters = Iterable[tuple[str, Tensor]]
_START = 2  # the first step that PowerSGD can compress


class Ready(NamedTuple):
    """What `DistributedDataParallel.register_comm_hook` takes."""

    state: Any
    hook: Hook


HOOKS: dict[str, Callable[[Group, Parameters], Ready]] = {
    "noop": lambda group, parameters: Ready(None, noop_hook),
    "none": lambda group, parameters: Ready(group, allreduce_hook),
    "fp16": lambda group, parameters: Ready(group, fp16_compress_hook),
    "bf16": lambda group, parameters: Ready(group, bf16_hook),
    "int8": lambda group, parameters: Ready(Int8State(group, named_parameters=parameters), int8_hook),
    "topk": lambda group, parameters: Ready(TopKState(group, named_parameters=parameters), topk_hook),
    "powersgd": lambda group, parameters: Ready(_powersgd(group, parameters), powerSGD_hook),
    "batched_powersgd": lambda group, parameters: Ready(_powersgd(group, parameters), batched_powerSGD_hook),
    "dgc": lambda group, parameters: Ready(DGCState(group, DGC(), named_parameters=parameters), dgc_hook),
}


def make_hook(name: str, parameters: Parameters, group: Group = None) -> Ready:
    """The hook of that name, with a new state for named `parameters` over `group`."""
    if name not in HOOKS:
        raise ValueError(f"there is no hook {name!r}; there are {', '.join(HOOKS)}")
    return HOOKS[name](group, parameters)


def _powersgd(group: Group, parameters: Parameters) -> PowerSGDState:
    return PowerSGDState(group, start_powerSGD_iter=_START, named_parameters=parameters)
