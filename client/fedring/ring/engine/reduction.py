"""Reductions of numbers in byte buffers; no I/O."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedring.ring.errors import NotSupported

_NUMPY: dict[str, np.ufunc] = {
    "sum": np.add,
    "avg": np.add,
    "product": np.multiply,
    "min": np.minimum,
    "max": np.maximum,
    "band": np.bitwise_and,
    "bor": np.bitwise_or,
    "bxor": np.bitwise_xor,
}
_TORCH: dict[str, Callable[..., Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
}
_HALF = (torch.float16, torch.bfloat16)  # numpy has no bfloat16, and is slow with float16
_DTYPES: dict[torch.dtype, Any] = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.int8: np.int8,
    torch.uint8: np.uint8,
    torch.int16: np.int16,
    torch.int32: np.int32,
    torch.int64: np.int64,
    torch.bool: np.bool_,
    torch.complex64: np.complex64,
    torch.complex128: np.complex128,
}
OPS = tuple(_NUMPY)
_ORDER, _BITS = ("min", "max"), ("band", "bor", "bxor")


@dataclass(frozen=True, slots=True)
class Reduction:
    """An operator on values of one dtype.

    Attributes:
        op: "sum", "avg", "product", "min", "max", "band", "bor" or "bxor".
        dtype: The values' dtype in memory.
        wire: A half dtype in which float32 values are sent; they are added as float32. None = as they are.

    Raises:
        NotSupported: The operator does not exist for the dtype.

    As with NCCL, sums and products of bool are "or" and "and". A mean of integers is their sum, in their dtype, divided
    by the number of ranks and rounded towards zero.
    """

    op: str
    dtype: torch.dtype
    wire: torch.dtype | None = None

    def __post_init__(self) -> None:
        if self.dtype not in _DTYPES and self.dtype not in _HALF:
            raise NotSupported(f"the ring has no reductions of {self.dtype}: convert the tensor to another dtype")
        if self.op not in _NUMPY or (
            (self.op in _BITS and (self.dtype.is_floating_point or self.dtype.is_complex))
            or (self.op in _ORDER and self.dtype.is_complex)
            or (self.op == "avg" and self.dtype == torch.bool)
        ):
            raise NotSupported(f"there is no {self.op} of {self.dtype}")

    @property
    def itemsize(self) -> int:
        """Bytes of a value in memory."""
        return self.dtype.itemsize

    @property
    def wire_itemsize(self) -> int:
        """Bytes of a value on the wire."""
        return (self.wire or self.dtype).itemsize

    def combine(self, target: memoryview, data: memoryview) -> None:
        """Reduce `data` into `target`: target = op(target, data).

        Args:
            target: Bytes of dtype.
            data: Bytes of the wire's dtype.
        """
        if self.wire is None and self.dtype not in _HALF:
            kind = _DTYPES[self.dtype]
            values = np.frombuffer(target, kind)
            with np.errstate(all="ignore"):
                _NUMPY[self.op](values, np.frombuffer(data, kind), out=values)
            return
        into = _in_place(target, self.dtype)
        _TORCH[self.op](into, _tensor(data, self.wire or self.dtype).to(self.dtype), out=into)

    def finish(self, target: memoryview, size: int) -> None:
        """Turn a sum into the result: divide for "avg", and round.

        Args:
            target: The sum of `size` ranks, which is rounded to values that the wire can carry.
            size: The number of ranks.
        """
        if self.op == "avg" and (self.dtype.is_floating_point or self.dtype.is_complex):
            _in_place(target, self.dtype).div_(size)
        elif self.op == "avg":
            _divide_integers(np.frombuffer(target, _DTYPES[self.dtype]), size)
        if self.wire is not None:
            values = _in_place(target, self.dtype)
            values.copy_(values.to(self.wire))

    def outgoing(self, source: memoryview) -> bytes | memoryview:
        """Return `source` (bytes of dtype) as it is sent."""
        if self.wire is None:
            return source
        return _in_place(source, self.dtype).to(self.wire).view(torch.uint8).numpy().data

    def store(self, target: memoryview, data: memoryview) -> None:
        """Copy received values into `target`.

        Args:
            target: Bytes of dtype.
            data: Bytes of the wire's dtype.
        """
        if self.wire is None:
            target[:] = data
        else:
            _in_place(target, self.dtype).copy_(_tensor(data, self.wire))


def _divide_integers(values: NDArray[Any], size: int) -> None:
    """Divide integers in place, rounding towards zero.

    The divisor may be too large for the dtype of the values.
    """
    ranks = np.int64(size)
    np.subtract(values, np.fmod(values, ranks), out=values, casting="unsafe")
    np.floor_divide(values, ranks, out=values, casting="unsafe")


def _in_place(memory: memoryview, dtype: torch.dtype) -> Tensor:
    """Return the values in `memory` as a tensor that shares it.

    The memory may be empty, which torch.frombuffer refuses.
    """
    return torch.frombuffer(memory, dtype=dtype) if memory else torch.empty(0, dtype=dtype, device="cpu")


def _tensor(data: memoryview, dtype: torch.dtype) -> Tensor:
    """Return a copy of the values in read-only `data`.

    torch has no read-only tensors.
    """
    return _in_place(memoryview(bytearray(data)), dtype)
