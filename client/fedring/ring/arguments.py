"""What torch gives to a collective, in one form: some callers pass lists and options, others a tensor and a value."""

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedring.ring.errors import NotSupported

_OPS = {
    "sum": dist.ReduceOp.SUM,
    "avg": dist.ReduceOp.AVG,
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
    "band": dist.ReduceOp.BAND,
    "bor": dist.ReduceOp.BOR,
    "bxor": dist.ReduceOp.BXOR,
}


def listed(tensors: Any) -> list[Tensor]:
    """Tensors, or one."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def only(tensors: Any) -> Tensor:
    """The one tensor of a list of one."""
    (tensor,) = listed(tensors)
    return tensor


def only_list(lists: Any) -> list[Tensor]:
    """The one list of a list of one."""
    if lists and isinstance(lists[0], Tensor):
        return list(lists)
    (tensors,) = lists
    return list(tensors)


def op(opts: Any) -> str:
    """The reduction's name; by default a sum."""
    wanted = getattr(opts, "reduceOp", opts)
    if wanted is None or isinstance(wanted, int):
        return "sum"
    for name, known in _OPS.items():
        if wanted == known:
            return name
    raise NotSupported(f"the ring has no reduction {wanted}")


def root(opts: Any) -> int:
    """The root's rank in the group; by default 0."""
    return int(getattr(opts, "rootRank", opts) or 0)


def seconds(opts: Any, timeout: timedelta | None, default: timedelta) -> float:
    """How long a collective may take."""
    given = timeout or getattr(opts, "timeout", None)
    if given is None or given <= timedelta(0):
        given = default
    return float(given.total_seconds())


def split(flat: Tensor, tensor: Tensor, sizes: Sequence[int], count: int) -> list[Tensor]:
    """`flat` [n], which holds the values of `tensor`, cut in `count` parts along its first dimension."""
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % count:
            raise ValueError(f"{rows} rows cannot be split evenly over {count} ranks")
        sizes = [rows // count] * count
    if len(sizes) != count or sum(sizes) != rows:
        raise ValueError(f"{list(sizes)} does not split {rows} rows over {count} ranks")
    width = flat.numel() // rows if rows else 0
    return list(torch.split(flat, [size * width for size in sizes]))
