"""Hooks that a job names as module:attribute.

Such a hook is one without a state, or a function that returns state and hook.
"""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

from torch import Tensor
from torch.futures import Future

from fedring.c10d import GradBucket
from fedring.ddp.hooks.by_name import ReadyHook
from fedring.ddp.hooks.plain import HookFunction, PlainState, metered
from fedring.ddp.state import HookState


class BadHook(ValueError):
    """A user's own hook cannot be used; the text is a sentence."""


@runtime_checkable
class Keepable(Protocol):
    """A state that goes into checkpoints."""

    def state_dict(self) -> dict[str, Any]:
        """Return tensors and plain values, in dicts and lists."""
        ...

    def load_state_dict(self, state: dict[str, Any], /) -> Any:
        """Restore the state from a result of `state_dict`."""
        ...


class OwnState(HookState):
    """The state of a user's own hook.

    The user's state is not a HookState: it is kept in checkpoints, and nothing else.

    Changes by a step that broke off are not undone, and newcomers to a group do not get the state.

    Args:
        own: The state, as the hook takes it.
    """

    kind = "own"

    def __init__(self, own: Keepable) -> None:
        super().__init__(None, ())
        self.own = own

    def end_step(self) -> None:
        """See HookState.end_step: all of the step's gradients have been exchanged."""
        self.meter.end_step()

    def _contents(self) -> dict[str, Any]:
        return {"own": self.own.state_dict()}

    def _load(self, state: dict[str, Any]) -> None:
        self.own.load_state_dict(state["own"])


def own_hook(name: str, function: Callable[..., Any], named_parameters: Sequence[tuple[str, Tensor]]) -> ReadyHook:
    """Make a hook of the user's own.

    Args:
        name: The hook's name, for errors.
        function: A hook, which takes a state and a bucket, and is called with the state None; or a function of one
            argument, the named parameters, which returns a state and a hook. The state is None, a HookState, or has
            state_dict() and load_state_dict().
        named_parameters: As from `model.named_parameters()`.

    Raises:
        BadHook: If the function fails or returns something else.
    """
    if not _makes_a_state(function):
        return ReadyHook(PlainState(), _without_state(name, function))
    try:
        made = function(list(named_parameters))
    except Exception as error:  # the user's code may raise anything
        raise BadHook(f"the hook {name} cannot be made: {type(error).__name__}: {error}") from error
    if not (isinstance(made, tuple) and len(made) == 2 and callable(made[1])):
        raise BadHook(f"{name} returned {made!r:.100}: let it return a state and a hook")
    state, hook = made
    if state is None:
        return ReadyHook(PlainState(), _without_state(name, hook))
    if isinstance(state, HookState):
        if not state.names.bound:
            state.bind(named_parameters)
        return ReadyHook(state, hook)
    if isinstance(state, Keepable):
        return ReadyHook(OwnState(state), _with_own_state(hook))
    raise BadHook(
        f"the state of the hook {name} is a {type(state).__name__}, which cannot be kept in checkpoints: let it be a "
        "fedring.ddp.HookState, or have state_dict() and load_state_dict()"
    )


def _makes_a_state(function: Callable[..., Any]) -> bool:
    """Return whether a function takes one argument, while a hook takes two."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # of a builtin
        return False
    needed = [one for one in parameters if one.default is one.empty and one.kind is not one.KEYWORD_ONLY]
    return len(needed) == 1 and needed[0].kind is not inspect.Parameter.VAR_POSITIONAL


def _without_state(name: str, hook: HookFunction) -> HookFunction:
    """Adapt a hook that is called with None to a PlainState."""

    def plain_hook(state: PlainState, bucket: GradBucket) -> Future[Tensor]:
        try:
            return hook(None, bucket)
        except (AttributeError, TypeError) as error:
            if "NoneType" not in str(error):
                raise
            raise BadHook(
                f"the hook {name} was called with the state None and failed with {type(error).__name__}: {error}; if "
                "it needs a state, name a function that takes the named parameters and returns the state and the hook"
            ) from error

    return metered(plain_hook)


def _with_own_state(hook: HookFunction) -> HookFunction:
    """Adapt a hook that takes the user's state to an OwnState."""
    return metered(lambda state, bucket: hook(state.own, bucket))
