"""The mark of functions and classes that jobs may name.

    @offers("model")
    def net(hidden: int = 32) -> nn.Module: ...

When it starts, a daemon collects the marked functions and classes of the modules that its operator trusts:
`fedring.train.names.offered`. This module imports nothing of fedring and no torch, so that any code can use the mark.
"""

from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any, Literal, TypeVar, get_args
from weakref import ref

Kind = Literal["model", "data", "loss", "optimizer", "trainer", "evaluator", "hook", "cut", "rule", "remote"]
"""The parts of a job that have names, and what other ranks may call (`remote`)."""

KINDS: tuple[Kind, ...] = get_args(Kind)

PARTS: tuple[Kind, ...] = ("model", "data", "loss", "optimizer", "trainer", "evaluator")
"""The kinds that a job names in keys of the same names."""

Marked = TypeVar("Marked", bound=Callable[..., Any])

_MARK = "__fedring_offers__"
_CACHED = type(lru_cache(lambda: None))


def offers(*kinds: Kind) -> Callable[[Marked], Marked]:
    """Mark a function, class or method as something that jobs may name.

    Args:
        kinds: The kinds that it is offered as, such as "model" or "data": at least one of KINDS.

    Returns:
        A decorator, which returns its argument unchanged but for the mark. It goes above all other decorators.

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
        setattr(target, _MARK, (kinds, ref(target)))
        return target

    return mark


def marks_of(value: object) -> tuple[Kind, ...]:
    """Return the kinds that a function or class itself is marked with.

    A subclass does not inherit them, and a function that wraps a marked one, as by `functools.wraps`, is another one.
    """
    if not can_be_offered(value):
        return ()
    kinds, marked = vars(value).get(_MARK, ((), lambda: None))
    inside = vars(value).get("__wrapped__") if type(value) is _CACHED else value
    return kinds if marked() in (value, inside) else ()


def can_be_offered(value: object) -> bool:
    """Return whether a value is a function or a class.

    Other callable objects cannot be offered.
    """
    kind = type(value)  # isinstance() would ask the value, which may say anything
    return issubclass(kind, type) or kind in (FunctionType, _CACHED)


def named(**names: str) -> list[str]:
    """Return the entries of `trusted` for names by their kinds.

    An example is model="my_project:net"; an empty name is left out.
    """
    return [f"{name} as {kind}" for kind, name in names.items() if name]
