"""The list of all hooks by name.

Jobs, `flctl profile`, benchmarks and scripts use it.

`fedring.train.names.hooks` has the names, the parameters and their defaults; this module makes the hooks.
"""

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    fp16_compress_hook,
    fp16_compress_wrapper,
)

from fedring.compress.dgc import DGC
from fedring.ddp.dgc import DGCState, dgc_hook
from fedring.ddp.hooks.int8 import Int8State, int8_hook
from fedring.ddp.hooks.plain import HookFunction, PlainState, bf16_hook, bf16_wrapper, plain
from fedring.ddp.hooks.powersgd import batched_powerSGD_hook, powerSGD_hook
from fedring.ddp.hooks.powersgd_state import PowerSGDState
from fedring.ddp.hooks.topk import TopKState, topk_hook
from fedring.ddp.state import HookState
from fedring.train.names.hooks import HookChoice, choose_hook

NamedParameters = Iterable[tuple[str, Tensor]]


class ReadyHook(NamedTuple):
    """The arguments of `DistributedDataParallel.register_comm_hook`."""

    state: HookState
    hook: HookFunction


def hook_by_name(
    text: str, named_parameters: NamedParameters, group: dist.ProcessGroup | None = None, **parameters: Any
) -> ReadyHook:
    """Make a hook with a new state.

    Args:
        text: The name of the hook, followed by parameters if need be: `topk` or `topk(ratio=0.05, feedback=ef21)`;
            `fp16` and `bf16` can also wrap another hook: `fp16(powersgd)`.
        named_parameters: As from `model.named_parameters()`.
        group: The group to exchange with; None is the default group.
        parameters: Parameters of the hook that `text` does not name.

    Returns:
        The state and the hook, to be registered as `ddp.register_comm_hook(*hook_by_name(...))`.

    Raises:
        ValueError: If there is no such hook or parameter, or if a value does not fit. The text lists what there is.
    """
    return make_hook(choose_hook(text, parameters), named_parameters, group)


def make_hook(
    choice: HookChoice, named_parameters: NamedParameters, group: dist.ProcessGroup | None = None
) -> ReadyHook:
    """See hook_by_name, for a choice whose parameters have been checked."""
    state, hook = HOOKS[choice.name]
    if choice.wrapper:
        hook = _WRAPPERS[choice.wrapper](hook)
    return ReadyHook(state(group, named_parameters=named_parameters, **choice.parameters), hook)


def _plain(group: dist.ProcessGroup | None, *, named_parameters: NamedParameters) -> PlainState:
    return PlainState(group)


def _dgc(group: dist.ProcessGroup | None, *, named_parameters: NamedParameters, **parameters: Any) -> DGCState:
    return DGCState(group, DGC(**parameters), named_parameters=named_parameters)


HOOKS: dict[str, tuple[Callable[..., HookState], HookFunction]] = {
    "none": (_plain, plain(allreduce_hook)),
    "fp16": (_plain, plain(fp16_compress_hook)),
    "bf16": (_plain, plain(bf16_hook)),
    "int8": (Int8State, int8_hook),
    "topk": (TopKState, topk_hook),
    "powersgd": (PowerSGDState, powerSGD_hook),
    "batched_powersgd": (PowerSGDState, batched_powerSGD_hook),
    "dgc": (_dgc, dgc_hook),
    "noop": (_plain, plain(noop_hook)),
}
"""How the state of each hook is made, and the hook."""

_WRAPPERS: dict[str, Callable[[HookFunction], HookFunction]] = {"fp16": fp16_compress_wrapper, "bf16": bf16_wrapper}
