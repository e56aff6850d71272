"""Conversions between tensors and the bytes of the ring.

The bytes are a tensor's own memory where that can be used, and otherwise a copy in host memory.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedring.ring.errors import BadFrame, NotSupported

_INDEX = 8  # bytes of a coordinate of a sparse tensor


class Staged:
    """Values of several tensors of one dtype, in host memory.

    They lie one tensor after another.

    Args:
        tensors: At least one; strided.
        copy: Whether the values must not be the tensors' own memory.

    Attributes:
        flat: The values, [n].
        is_copy: Whether the values lie apart from the tensors, so that they must be stored at the end.

    Raises:
        ValueError: The tensors are of several dtypes.
        NotSupported: See `plain`.
    """

    def __init__(self, tensors: Sequence[Tensor], *, copy: bool = False) -> None:
        self._tensors = [plain(tensor) for tensor in tensors]
        first = self._tensors[0]
        if len(self._tensors) == 1:
            self.flat = in_host_memory(first)
        else:
            check_dtypes(self._tensors)
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

    def check_storable(self) -> None:
        """Raise ValueError if values cannot be stored in the tensors."""
        for tensor in self._tensors:
            check_storable(tensor)

    def store(self) -> None:
        """Copy the values into the tensors.

        Nothing happens if they are the tensors' own memory.
        """
        if self.is_copy:
            sizes = [tensor.numel() for tensor in self._tensors]
            for tensor, values in zip(self._tensors, torch.split(self.flat, sizes), strict=True):
                store(values, tensor)


def storing(staged: Sequence[Staged]) -> Callable[[], None] | None:
    """Return a function that stores the values in the tensors.

    It is None if they are there already.

    Raises:
        ValueError: Values cannot be stored in a tensor.
    """
    copies = [one for one in staged if one.is_copy]
    for one in copies:
        one.check_storable()

    def store_all() -> None:
        for one in copies:
            one.store()

    return store_all if copies else None


def plain(tensor: Tensor) -> Tensor:
    """Return the tensor without its history. It shares the memory.

    Raises:
        TypeError: It is not a tensor.
        NotSupported: The tensor is sparse, quantized or without data, or its class keeps the values in its own way.
    """
    if not isinstance(tensor, Tensor):
        raise TypeError(f"a value of type {type(tensor).__name__} was given where a tensor is needed")
    if tensor.layout is not torch.strided:
        raise NotSupported("the ring carries sparse tensors in all_reduce only: make them dense")
    if tensor.is_quantized:
        raise NotSupported("the ring does not carry quantized tensors: give it their int_repr()")
    values = tensor.detach()
    if _dispatch_of(type(values)) is not _dispatch_of(Tensor):
        raise NotSupported(f"the ring does not carry a {type(tensor).__name__}: give it the plain tensor inside")
    if values.is_meta or (values.numel() and not values.untyped_storage().nbytes()):
        raise NotSupported("the ring does not carry tensors without data: they are on the meta device or were freed")
    return values


def _dispatch_of(kind: Any) -> Any:
    """Return a class of tensors' `__torch_dispatch__`.

    torch calls it for each operator; plain tensors share one.
    """
    return kind.__torch_dispatch__


def in_host_memory(tensor: Tensor) -> Tensor:
    """Return the tensor's values, [n], contiguous in host memory.

    They are the tensor's own memory if possible.
    """
    host = tensor if tensor.is_cpu else tensor.cpu()
    return host.resolve_conj().resolve_neg().contiguous().view(-1)


def is_same_memory(flat: Tensor, tensor: Tensor) -> bool:
    """Return whether `flat` and `tensor` begin at the same memory."""
    return flat.device == tensor.device and flat.data_ptr() == tensor.data_ptr()


def as_bytes(flat: Tensor) -> memoryview:
    """Return the bytes of contiguous values [n] in host memory.

    The bytes share the memory of the values, and keep it alive.

    After `Tensor.numpy()`, torch would never again let anybody resize the storage, as FSDP does. So a caller must
    not use these bytes once the operation has ended: the storage may be another one then.
    """
    return np.asarray(_Memory(flat)).data


class _Memory:
    """The memory of contiguous values [n], as numpy's array interface describes it."""

    def __init__(self, flat: Tensor) -> None:
        self._owner = flat
        self.__array_interface__ = {
            "data": (flat.data_ptr(), False),
            "shape": (flat.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def check_storable(tensor: Tensor) -> None:
    """Raise ValueError if entries of the tensor share memory.

    One place cannot hold several values.
    """
    if tensor.is_contiguous():
        return
    if any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True)):
        raise ValueError(f"an expanded tensor of shape {list(tensor.shape)} cannot hold a result: clone it before")


def store(values: Tensor, tensor: Tensor) -> None:
    """Copy values [n] into a tensor."""
    shaped = values.view(tensor.shape)
    if not tensor.is_inference():
        tensor.copy_(shaped)
        return
    with torch.inference_mode():  # the mode is this thread's, and may be another one's of the caller
        tensor.copy_(shaped)


def fill(flat: Tensor, tensor: Tensor) -> None:
    """Copy the values of `tensor` to `flat` [n].

    `tensor` may be a view of `flat`.

    Raises:
        ValueError: They do not fit.
    """
    values = plain(tensor)
    check_size(flat, values)
    if not (values.is_contiguous() and is_same_memory(flat, values)):
        flat.copy_(values.reshape(-1))


def check_size(flat: Tensor, values: Tensor) -> None:
    """Raise ValueError unless both hold as many values, of one dtype."""
    if flat.numel() != values.numel() or flat.dtype != values.dtype:
        raise ValueError(f"{values.numel()} x {values.dtype} do not fit {flat.numel()} x {flat.dtype} on the same rank")


def check_dtypes(tensors: Sequence[Tensor]) -> None:
    """Raise ValueError if the tensors are of several dtypes."""
    dtypes = sorted({str(tensor.dtype) for tensor in tensors})
    if len(dtypes) > 1:
        raise ValueError(f"one collective takes tensors of one dtype, not of {', '.join(dtypes)}")


def apart(flat: Tensor, written: Sequence[Tensor]) -> Tensor:
    """Return values [n] that no write to `written` changes.

    Args:
        flat: The values to be sent, [n]; copied if they share memory with those that are written.
        written: Values [m] that are written while `flat` is sent.
    """
    begin, end = flat.data_ptr(), flat.data_ptr() + flat.nbytes
    shared = any(one.data_ptr() < end and begin < one.data_ptr() + one.nbytes for one in written)
    return flat.clone() if shared else flat


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
    if len(sizes) != count or sum(sizes) != rows or min(sizes) < 0:
        raise ValueError(f"{list(sizes)} does not split {rows} rows over {count} ranks")
    width = flat.numel() // rows if rows else 0
    return list(torch.split(flat, [size * width for size in sizes]))


class SparseSum:
    """The sum of a sparse tensor over all ranks.

    Every rank gets every rank's entries, and adds them in rank order.

    A message is the coordinates of the entries, int64 [dimensions, entries], then their values.

    Args:
        tensor: The tensor, in COO layout. All ranks' tensors have its shape, and it becomes the sum.
        op: The reduction; only "sum".
        rank: This worker's rank in the group.
        size: The number of ranks.

    Attributes:
        messages: The message of each rank, by rank. Only this rank's is there at first.
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
        """The operation's description, equal on all ranks; part of the protocol."""
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
        none = torch.empty(0, dtype=torch.uint8, device="cpu")  # whatever the script's default device is
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else none
        places, values = data.tensor_split((_INDEX * self._dimensions * count,))
        indices = places.view(torch.int64).view(self._dimensions, count)
        ends = torch.tensor(self._tensor.shape[: self._dimensions], device="cpu").unsqueeze(1)
        if bool(((indices < 0) | (indices >= ends)).any()):
            raise BadFrame(f"rank {rank} sent entries outside of the tensor", rank=rank)
        return indices, values.clone().view(self._dtype).view(count, *self._dense)


def _copied(tensor: Tensor) -> bytes:
    return bytes(as_bytes(tensor.contiguous().view(-1))) if tensor.numel() else b""
