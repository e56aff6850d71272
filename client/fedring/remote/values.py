"""Arguments and results as JSON and a list of tensors. No I/O.

None, booleans, integers of 64 bits, finite floats, strings and lists stand for themselves. Everything else is an object
with one key: {"tensor": place in the list}, {"tuple": [...]}, {"dict": {...}}, {"reference": what the receiver holds},
or {"elsewhere": [another rank, what that one holds]}.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from torch import Tensor

from fedring.remote.errors import BadMessage

MAX_DEPTH = 32
_MAX_INTEGER = 2**63


@dataclass(frozen=True, slots=True, eq=False, weakref_slot=True)
class Handle:
    """A name for a value that an owner holds.

    It is a number that the owner has given, or a served module's name.
    """

    rank: int
    key: int | str


def nowhere(rank: int, key: int | str) -> Any:
    """Refuse a reference to another rank's value."""
    raise BadMessage(f"a reference to what rank {rank} holds, {key!r}, stands where none may be")


def flatten(value: Any, tensors: list[Tensor], *, owner: int, depth: int = 0) -> Any:
    """Return a value as JSON, and append its tensors to `tensors`.

    Args:
        value: Tensors, numbers, strings, None, booleans, handles, and lists, tuples and dicts of them.
        tensors: Where the tensors go.
        owner: The rank to which the value is sent; -1 = a caller, which gets no handles.
        depth: How many lists and dicts the value is inside of.

    Raises:
        BadMessage: The value cannot be sent.
    """
    if depth > MAX_DEPTH:
        raise BadMessage(f"a value is nested more than {MAX_DEPTH} deep: send less deeply nested values")
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        if not -_MAX_INTEGER <= value < _MAX_INTEGER:
            raise BadMessage(f"the integer {value} needs more than 64 bits")
        return value
    if isinstance(value, float):
        if not isfinite(value):
            raise BadMessage(f"the number {value} is not finite: send it in a tensor if it is meant")
        return value
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, list | tuple):
        items = [flatten(item, tensors, owner=owner, depth=depth + 1) for item in value]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise BadMessage(f"the key {key!r} of a dict is a {type(key).__name__}: use strings as keys")
        return {"dict": {key: flatten(item, tensors, owner=owner, depth=depth + 1) for key, item in value.items()}}
    if isinstance(value, Handle):
        if owner < 0:
            raise BadMessage(f"a reference to what rank {value.rank} holds cannot be a result: return the value itself")
        return {"reference": value.key} if value.rank == owner else {"elsewhere": [value.rank, value.key]}
    raise BadMessage(
        f"a {type(value).__name__} cannot be sent: send tensors, numbers, strings, None, and lists, tuples and dicts "
        "of them, or let the value stay at its owner with remote()"
    )


def unflatten(
    tree: Any,
    tensors: Sequence[Tensor],
    held: Callable[[int | str], Any],
    elsewhere: Callable[[int, int | str], Any] = nowhere,
    *,
    depth: int = 0,
) -> Any:
    """Rebuild a value from the JSON and the tensors of `flatten`.

    Args:
        tree: JSON, from a peer.
        tensors: The tensors that came with it.
        held: Returns the value that a handle's key names; raises if there is none.
        elsewhere: Returns a handle to what another rank holds, given that rank and the key; raises if there is none.
        depth: How many lists and dicts the tree is inside of.

    Raises:
        BadMessage: `flatten` cannot have made it.
    """
    if depth > MAX_DEPTH:
        raise BadMessage(f"a value is nested more than {MAX_DEPTH} deep")
    if tree is None or isinstance(tree, bool | str):
        return tree
    if isinstance(tree, float) and isfinite(tree):
        return tree
    if isinstance(tree, int) and -_MAX_INTEGER <= tree < _MAX_INTEGER:
        return tree
    if isinstance(tree, int | float):
        raise BadMessage("a number is not finite, or needs more than 64 bits")
    if isinstance(tree, list):
        return [unflatten(item, tensors, held, elsewhere, depth=depth + 1) for item in tree]
    if not isinstance(tree, dict) or len(tree) != 1:
        raise BadMessage("a value is not in the form in which values are sent")
    ((kind, content),) = tree.items()
    if kind == "tensor" and type(content) is int and 0 <= content < len(tensors):
        return tensors[content]
    if kind == "tuple" and isinstance(content, list):
        return tuple(unflatten(item, tensors, held, elsewhere, depth=depth + 1) for item in content)
    if kind == "dict" and isinstance(content, dict):
        return {key: unflatten(item, tensors, held, elsewhere, depth=depth + 1) for key, item in content.items()}
    if kind == "reference" and (type(content) is int or isinstance(content, str)):
        return held(content)
    if kind == "elsewhere" and isinstance(content, list) and len(content) == 2:
        rank, key = content
        if type(rank) is int and (type(key) is int or isinstance(key, str)):
            return elsewhere(rank, key)
    raise BadMessage(f"a value of the kind {str(kind)[:20]!r} is not in the form in which values are sent")
