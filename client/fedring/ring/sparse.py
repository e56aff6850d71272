"""Sums of sparse tensors: every rank's entries come to every rank, which adds them in rank order.

A message is the coordinates of the entries, int64 [dimensions, entries], then their values.
"""

from math import prod

import torch
from torch import Tensor

from fedring.ring.errors import BadFrame, NotSupported
from fedring.ring.staging import as_bytes

_INDEX = 8  # bytes


class SparseSum:
    """A tensor that becomes the sum of all ranks' tensors of its shape; `messages[r]` is what rank r has of it."""

    def __init__(self, tensor: Tensor, op: str, *, rank: int, size: int) -> None:
        if op != "sum" or tensor.is_complex():
            raise NotSupported(f"there is no {op} of sparse {tensor.dtype} over the ring, only sums of real numbers")
        self._tensor = tensor
        mine = tensor.detach().coalesce()
        indices, values = mine.indices().cpu(), mine.values().cpu()
        self._dense = values.shape[1:]
        self._dtype, self._dimensions = values.dtype, indices.shape[0]
        self._width = max(1, _INDEX * self._dimensions + prod(self._dense) * values.itemsize)
        self.limit = prod(tensor.shape[: self._dimensions]) * self._width  # of any rank's message
        self.messages = [memoryview(b"")] * size
        self.messages[rank] = memoryview(_bytes(indices) + _bytes(values))

    @property
    def what(self) -> str:
        """What is the same on all ranks."""
        return f"allreduce sparse {self._dtype} {list(self._tensor.shape)} of {self._dimensions} sparse dimensions"

    def store(self) -> None:
        """The tensor holds the sum, coalesced."""
        parts = [self._entries(message, rank) for rank, message in enumerate(self.messages)]
        indices, values = torch.cat([one for one, _ in parts], dim=1), torch.cat([one for _, one in parts])
        total = torch.sparse_coo_tensor(indices, values, self._tensor.shape, check_invariants=True).coalesce()
        with torch.no_grad():
            self._tensor.copy_(total.to(self._tensor.device))

    def _entries(self, message: memoryview, rank: int) -> tuple[Tensor, Tensor]:
        """The coordinates [dimensions, n] and values [n, ...] in a message."""
        count, rest = divmod(len(message), self._width)
        if rest:
            raise BadFrame(f"rank {rank} sent {len(message)} bytes, of entries of {self._width} bytes", rank=rank)
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8) if message else torch.empty(0, dtype=torch.uint8)
        places, values = data.tensor_split((_INDEX * self._dimensions * count,))
        shape = (count, *self._dense)
        return places.view(torch.int64).view(self._dimensions, count), values.clone().view(self._dtype).view(shape)


def _bytes(tensor: Tensor) -> bytes:
    return bytes(as_bytes(tensor.contiguous().view(-1))) if tensor.numel() else b""
