"""torch's arguments, checked and converted to one form.

Some callers pass lists of tensors and options, others a tensor and a plain value.

Whatever one rank can check alone is checked before an operation starts. So a wrong argument raises an error on the rank
that passes it, and the group can still be used.
"""

import threading
from collections.abc import Sequence
from datetime import timedelta
from operator import index
from typing import Any

import torch.distributed as dist
from torch import Tensor

from fedring.ring.engine.reduction import OPS
from fedring.ring.errors import NotSupported

_REDUCTIONS: dict[str, Any] = {name.lower(): known for name, known in dist.ReduceOp.RedOpType.__members__.items()}
_MAX_TAG = 2**31 - 1  # torch's other backends take a C int


def as_list(tensors: Any) -> list[Tensor]:
    """Return a list of tensors, given several or one.

    Raises:
        TypeError: One is not a tensor.
        ValueError: There is none.
    """
    given = [tensors] if isinstance(tensors, Tensor) else list(tensors)
    if not given:
        raise ValueError("an empty list was given where at least one tensor is needed")
    for one in given:
        if not isinstance(one, Tensor):
            raise TypeError(f"a value of type {type(one).__name__} was given where a tensor is needed")
    return given


def only(tensors: Any) -> Tensor:
    """Return the one tensor, given it or a list of it.

    Raises:
        TypeError: It is not a tensor.
        ValueError: There are none, or several.
    """
    given = as_list(tensors)
    if len(given) > 1:
        raise ValueError(f"{len(given)} tensors were given where one is needed")
    return given[0]


def only_list(lists: Any) -> list[Tensor]:
    """Return the one list of tensors, given alone or in a list.

    Raises:
        TypeError: An element is not a tensor.
        ValueError: There are several lists, or none, or the list is empty.
    """
    given = list(lists)
    if given and not isinstance(given[0], Tensor):
        if len(given) > 1:
            raise ValueError(f"{len(given)} lists of tensors were given where one is needed")
        given = list(given[0])
    return as_list(given)


def pairs(outputs: Any, inputs: Any) -> list[tuple[Any, Any]]:
    """Return each of several outputs with its input.

    Raises:
        ValueError: There are none, or not as many outputs as inputs.
    """
    given = list(outputs), list(inputs)
    if len(given[0]) != len(given[1]) or not given[0]:
        raise ValueError(
            f"there are {len(given[0])} outputs and {len(given[1])} inputs: give as many, and at least one"
        )
    return list(zip(*given, strict=True))


def check_count(what: str, tensors: Sequence[Any], size: int) -> None:
    """Raise ValueError unless there is one for each of `size` ranks."""
    if len(tensors) != size:
        raise ValueError(f"there are {len(tensors)} {what} for {size} ranks")


def op_name(opts: Any) -> str:
    """Return the name of a reduction; by default "sum".

    Args:
        opts: torch's options, or the reduction.

    Raises:
        TypeError: It is not a reduction.
        NotSupported: The ring does not have this reduction.
    """
    wanted: Any = getattr(opts, "reduceOp", opts)
    if wanted is None:
        return "sum"
    if not isinstance(wanted, dist.ReduceOp):
        raise TypeError(f"a reduction is a torch.distributed.ReduceOp, not a value of type {type(wanted).__name__}")
    name = next(name for name, known in _REDUCTIONS.items() if wanted == known)
    if name not in OPS:
        raise NotSupported(f"the ring does not have the reduction {name}; it has {', '.join(OPS)}")
    return name


def root_of(opts: Any, size: int) -> int:
    """Return the root's rank; by default 0.

    Args:
        opts: torch's options, or the rank.
        size: The number of ranks of the group.

    Raises:
        TypeError: It is not an integer.
        ValueError: The group does not have this rank.
    """
    root = getattr(opts, "rootRank", opts)
    return rank_of("root", 0 if root is None else root, size)


def rank_of(what: str, rank: Any, size: int) -> int:
    """Return a rank of a group of `size` ranks.

    Raises:
        TypeError: It is not an integer.
        ValueError: The group does not have this rank.
    """
    if not 0 <= index(rank) < size:
        raise ValueError(f"the {what} is rank {rank}, and the group has the ranks 0 to {size - 1}")
    return index(rank)


def tag_of(tag: Any) -> int:
    """Return the tag of a message.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is negative or too large.
    """
    if not 0 <= index(tag) <= _MAX_TAG:
        raise ValueError(f"the tag of a message is {tag}, and must be from 0 to {_MAX_TAG}")
    return index(tag)


def seconds_of(opts: Any, timeout: timedelta | None, default: timedelta) -> float:
    """Return how long a collective may take, in seconds.

    Raises:
        TypeError: The timeout is not a timedelta.
    """
    given = timeout or getattr(opts, "timeout", None)
    if given is not None and not isinstance(given, timedelta):
        raise TypeError(f"a timeout is a datetime.timedelta, not a value of type {type(given).__name__}")
    if given is None or given <= timedelta(0):
        given = default
    return min(given.total_seconds(), threading.TIMEOUT_MAX)
