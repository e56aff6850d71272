"""Hooks by the names that jobs and commands know them by."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook

from fedring.compress.correction import Feedback
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
_TOPK_RATIO = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What the hooks by name can be told."""

    ratio: float | None = None  # share of the entries that topk sends
    rank: int = 1  # of PowerSGD's factors
    start_iteration: int = 2  # the first step that PowerSGD compresses; 2 is the first that it can
    feedback: Feedback = "ef"  # of int8 and topk; of PowerSGD "ef" or "none"
    dgc: DGC = field(default_factory=DGC)


class Ready(NamedTuple):
    """What `DistributedDataParallel.register_comm_hook` takes."""

    state: Any
    hook: Hook


def make_hook(name: str, parameters: Parameters, group: Group = None, *, options: Options | None = None) -> Ready:
    """The hook of that name, with a new state for named `parameters` over `group`."""
    if name not in HOOKS:
        raise ValueError(f"there is no hook {name!r}; there are {', '.join(HOOKS)}")
    return HOOKS[name](group, parameters, options or Options())


def _int8(group: Group, parameters: Parameters, options: Options) -> Ready:
    return Ready(Int8State(group, feedback=options.feedback, named_parameters=parameters), int8_hook)


def _topk(group: Group, parameters: Parameters, options: Options) -> Ready:
    ratio = _TOPK_RATIO if options.ratio is None else options.ratio
    return Ready(TopKState(group, ratio=ratio, feedback=options.feedback, named_parameters=parameters), topk_hook)


def _powersgd(group: Group, parameters: Parameters, options: Options) -> Ready:
    state = PowerSGDState(
        group,
        matrix_approximation_rank=options.rank,
        start_powerSGD_iter=options.start_iteration,
        use_error_feedback=options.feedback == "ef",
        named_parameters=parameters,
    )
    return Ready(state, powerSGD_hook)


def _batched_powersgd(group: Group, parameters: Parameters, options: Options) -> Ready:
    return _powersgd(group, parameters, options)._replace(hook=batched_powerSGD_hook)


HOOKS: dict[str, Callable[[Group, Parameters, Options], Ready]] = {
    "noop": lambda group, parameters, options: Ready(None, noop_hook),
    "none": lambda group, parameters, options: Ready(group, allreduce_hook),
    "fp16": lambda group, parameters, options: Ready(group, fp16_compress_hook),
    "bf16": lambda group, parameters, options: Ready(group, bf16_hook),
    "int8": _int8,
    "topk": _topk,
    "powersgd": _powersgd,
    "batched_powersgd": _batched_powersgd,
    "dgc": lambda group, parameters, options: Ready(
        DGCState(group, options.dgc, named_parameters=parameters), dgc_hook
    ),
}
