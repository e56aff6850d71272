"""Tensors as the bytes that the ring moves, and torch's arguments in one form.

The bytes are a tensor's own memory where that can be used, or else a copy in host memory. Some of torch's callers pass
lists of tensors and options, others a tensor and a plain value.
"""

from collections.abc import Callable, Sequence
from datetime import timedelta
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedring.ring.errors import BadFrame, NotSupported

_INDEX = 8  # bytes of a coordinate of a sparse tensor
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


def as_list(tensors: Any) -> list[Tensor]:
    """Return a list of tensors, given several or one."""
    return [tensors] if isinstance(tensors, Tensor) else list(tensors)


def only(tensors: Any) -> Tensor:
    """Return the one tensor, given it or a list of it."""
    (tensor,) = as_list(tensors)
    return tensor


def only_list(lists: Any) -> list[Tensor]:
    """Return the one list of tensors, given it or a list of it."""
    if lists and isinstance(lists[0], Tensor):
        return list(lists)
    (tensors,) = lists
    return list(tensors)


def op_name(opts: Any) -> str:
    """Return the name of a reduction, given torch's options or the reduction; by default "sum".

    Raises:
        NotSupported: The ring does not have this reduction.
    """
    wanted = getattr(opts, "reduceOp", opts)
    if wanted is None or isinstance(wanted, int):
        return "sum"
    for name, known in _OPS.items():
        if wanted == known:
            return name
    raise NotSupported(f"the ring does not have the reduction {wanted}; it has {', '.join(_OPS)}")


def root_of(opts: Any) -> int:
    """Return the root's rank in the group, given torch's options or the rank; by default 0."""
    return int(getattr(opts, "rootRank", opts) or 0)


def seconds_of(opts: Any, timeout: timedelta | None, default: timedelta) -> float:
    """Return how long a collective may take, in seconds."""
    given = timeout or getattr(opts, "timeout", None)
    if given is None or given <= timedelta(0):
        given = default
    return float(given.total_seconds())


class Staged:
    """The values of tensors of one dtype, one tensor after another, in host memory.

    Args:
        tensors: At least one; strided. Complex numbers are pairs of real ones.
        copy: Whether the values must not be the tensors' own memory.

    Attributes:
        flat: The values, [n].
        is_copy: Whether the values lie apart from the tensors, so that they must be stored at the end.

    Raises:
        ValueError: The tensors are of several dtypes.
        NotSupported: A tensor is sparse.
    """

    def __init__(self, tensors: Sequence[Tensor], *, copy: bool = False) -> None:
        self._tensors = [plain(tensor) for tensor in tensors]
        first = self._tensors[0]
        if any(tensor.dtype != first.dtype for tensor in self._tensors):
            raise ValueError(f"one collective takes tensors of one dtype, not {[str(t.dtype) for t in tensors]}")
        if len(self._tensors) == 1:
            self.flat = in_host_memory(first)
        else:
            self.flat = torch.cat([in_host_memory(tensor) for tensor in self._tensors])
        self.is_copy = len(self._tensors) > 1 or not is_same_memory(self.flat, first)
        if copy and not self.is_copy:
            self.flat, self.is_copy = self.flat.clone(), True

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of every value."""
        return self.flat.dtype

    @property
    def data(self) -> memoryview:
        """The values' bytes."""
        return as_bytes(self.flat)

    def store(self) -> None:
        """Copy the values into the tensors, unless they are the tensors' own memory."""
        if self.is_copy:
            sizes = [tensor.numel() for tensor in self._tensors]
            for tensor, values in zip(self._tensors, torch.split(self.flat, sizes), strict=True):
                tensor.copy_(values.view(tensor.shape))


def storing(staged: Sequence[Staged]) -> Callable[[], None] | None:
    """Return a function that stores the values in the tensors, or None if they are there already."""
    copies = [one for one in staged if one.is_copy]

    def store() -> None:
        for one in copies:
            one.store()

    return store if copies else None


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor without its history, and with complex numbers as pairs of real ones. It shares the memory.

    Raises:
        NotSupported: The tensor is sparse.
    """
    if tensor.layout is not torch.strided:
        raise NotSupported("the ring carries sparse tensors in all_reduce only: make them dense")
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def in_host_memory(tensor: Tensor) -> Tensor:
    """Return the tensor's values, [n], contiguous in host memory: its own memory if possible."""
    return (tensor if tensor.is_cpu else tensor.cpu()).contiguous().view(-1)


def is_same_memory(flat: Tensor, tensor: Tensor) -> bool:
    """Return whether what is written to `flat` is written to `tensor`."""
    return flat.device == tensor.device and flat.data_ptr() == tensor.data_ptr()


def as_bytes(flat: Tensor) -> memoryview:
    """Return the bytes of contiguous values [n] in host memory. They share the memory."""
    return flat.view(torch.uint8).numpy().data


def fill(flat: Tensor, tensor: Tensor) -> None:
    """Copy the values of `tensor` to `flat` [n], of which it may be a view.

    Raises:
        ValueError: They do not fit.
    """
    check_size(flat, tensor)
    values = plain(tensor)
    if not (values.is_contiguous() and is_same_memory(flat, values)):
        flat.copy_(values.reshape(-1))


def check_size(flat: Tensor, tensor: Tensor) -> None:
    """Raise ValueError unless both hold as many values, of one dtype."""
    values = plain(tensor)
    if flat.numel() != values.numel() or flat.dtype != values.dtype:
        raise ValueError(f"{values.numel()} x {values.dtype} do not fit {flat.numel()} x {flat.dtype} on the same rank")


def split(flat: Tensor, tensor: Tensor, sizes: Sequence[int], count: int) -> list[Tensor]:
    """Cut the values of a tensor in parts along its first dimension.

    Args:
        flat: The values, [n].
        tensor: The tensor that they are the values of.
        sizes: The rows of each part; none = equal parts.
        count: How many parts.

    Raises:
        ValueError: The tensor cannot be cut so.
    """
    rows = tensor.shape[0] if tensor.dim() else 1
    if not sizes:
        if rows % count:
            raise ValueError(f"{rows} rows cannot be split evenly over {count} ranks")
        sizes = [rows // count] * count
    if len(sizes) != count or sum(sizes) != rows:
        raise ValueError(f"{list(sizes)} does not split {rows} rows over {count} ranks")
    width = flat.numel() // rows if rows else 0
    return list(torch.split(flat, [size * width for size in sizes]))


class SparseSum:
    """The sum of a sparse tensor over all ranks: every rank gets every rank's entries, and adds them in rank order.

    A message is the coordinates of the entries, int64 [dimensions, entries], then their values.

    Args:
        tensor: The tensor, in COO layout. All ranks' tensors have its shape, and it becomes the sum.
        op: The reduction; only "sum".
        rank: This worker's rank in the group.
        size: The number of ranks.

    Attributes:
        messages: What each rank has, by rank. Only this rank's is there at first.
        limit: The most bytes that a rank's message can have.

    Raises:
        NotSupported: The reduction is not a sum, or the numbers are complex.
    """

    def __init__(self, tensor: Tensor, op: str, *, rank: int, size: int) -> None:
        if op != "sum" or tensor.is_complex():
            raise NotSupported(f"there is no {op} of sparse {tensor.dtype} over the ring, only sums of real numbers")
        self._tensor = tensor
        mine = tensor.detach().coalesce()
        indices, values = mine.indices().cpu(), mine.values().cpu()
        self._dense = values.shape[1:]
        self._dtype, self._dimensions = values.dtype, indices.shape[0]
        self._width = max(1, _INDEX * self._dimensions + prod(self._dense) * values.itemsize)
        self.limit = prod(tensor.shape[: self._dimensions]) * self._width
        self.messages = [memoryview(b"")] * size
        self.messages[rank] = memoryview(_copied(indices) + _copied(values))

    @property
    def what(self) -> str:
        """What the operation is, equal on all ranks; part of the protocol."""
        return f"allreduce sparse {self._dtype} {list(self._tensor.shape)} of {self._dimensions} sparse dimensions"

    def store(self) -> None:
        """Make the tensor the sum, coalesced, once all messages are there.

        Raises:
            BadFrame: A message is not one of entries.
        """
        parts = [self._entries(message, rank) for rank, message in enumerate(self.messages)]
        indices, values = torch.cat([one for one, _ in parts], dim=1), torch.cat([one for _, one in parts])
        total = torch.sparse_coo_tensor(indices, values, self._tensor.shape, check_invariants=True).coalesce()
        with torch.no_grad():
            self._tensor.copy_(total.to(self._tensor.device))

    def _entries(self, message: memoryview, rank: int) -> tuple[Tensor, Tensor]:
        """Return the coordinates [dimensions, n] and values [n, ...] in a message."""
        count, rest = divmod(len(message), self._width)
        if rest:
            raise BadFrame(f"rank {rank} sent {len(message)} bytes, of entries of {self._width} bytes", rank=rank)
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
        places, values = data.tensor_split((_INDEX * self._dimensions * count,))
        shape = (count, *self._dense)
        return places.view(torch.int64).view(self._dimensions, count), values.clone().view(self._dtype).view(shape)


def _copied(tensor: Tensor) -> bytes:
    return bytes(as_bytes(tensor.contiguous().view(-1))) if tensor.numel() else b""
