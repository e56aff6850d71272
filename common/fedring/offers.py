"""The mark of functions and classes that jobs may name.

    @offers("model")
    def net(hidden: int = 32) -> nn.Module: ...

A daemon collects what is marked in the modules that its operator trusts, once, when it starts: `fedring.train.offered`.
This module imports nothing of fedring and no torch, so that any code can use the mark.
"""

from collections.abc import Callable
from functools import lru_cache
from inspect import isclass, isfunction
from typing import Any, Literal, TypeVar, get_args

Kind = Literal["model", "data", "loss", "optimizer", "trainer", "evaluator", "hook", "cut", "rule", "remote"]
"""The parts of a job that have names, and what other ranks may call (`remote`)."""

KINDS: tuple[Kind, ...] = get_args(Kind)

Marked = TypeVar("Marked", bound=Callable[..., Any])

_MARK = "__fedring_offers__"
_CACHED = type(lru_cache(lambda: None))


def offers(*kinds: Kind) -> Callable[[Marked], Marked]:
    """Mark a function, class or method as something that jobs may name.

    Args:
        kinds: As what it is offered, such as "model" or "data": at least one of KINDS.

    Returns:
        A decorator, which returns its argument unchanged but for the mark.

    Raises:
        ValueError: If there is no such kind.
        TypeError: If something else than a function or a class is marked.
    """
    wrong = [kind for kind in kinds if kind not in KINDS]
    if wrong or not kinds:
        raise ValueError(f"offers({', '.join(map(repr, kinds))}): choose from {', '.join(KINDS)}")

    def mark(target: Marked) -> Marked:
        if not can_be_offered(target):
            raise TypeError(f"a {type(target).__name__} cannot be offered: define a function that calls it")
        setattr(target, _MARK, kinds)
        return target

    return mark


def marks_of(value: object) -> tuple[Kind, ...]:
    """Return the kinds that a function or class itself is marked with; a subclass does not inherit them."""
    return vars(value).get(_MARK, ()) if can_be_offered(value) else ()


def can_be_offered(value: object) -> bool:
    """Return whether a value is a function or a class, and not only something that can be called."""
    return isfunction(value) or isclass(value) or isinstance(value, _CACHED)


def named(**names: str) -> list[str]:
    """Return the entries of `trusted` for names by their kinds, such as model="my_project:net"; "" is left out."""
    return [f"{name} as {kind}" for kind, name in names.items() if name]
