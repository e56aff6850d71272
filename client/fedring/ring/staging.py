"""Tensors as the bytes that the ring moves: their own memory where it will do, else a copy in host memory."""

from collections.abc import Sequence

import torch
from torch import Tensor

from fedring.ring.errors import NotSupported


class Staged:
    """The values of tensors of one dtype, one after another, in host memory."""

    def __init__(self, tensors: Sequence[Tensor], *, copy: bool = False) -> None:
        self._tensors = [plain(tensor) for tensor in tensors]
        first = self._tensors[0]
        if any(tensor.dtype != first.dtype for tensor in self._tensors):
            raise ValueError(f"one collective takes tensors of one dtype, not {[str(t.dtype) for t in tensors]}")
        if len(self._tensors) == 1:
            self.flat = in_host_memory(first)
        else:
            self.flat = torch.cat([in_host_memory(tensor) for tensor in self._tensors])
        self.apart = len(self._tensors) > 1 or not is_same_memory(self.flat, first)  # from the tensors' memory
        if copy and not self.apart:
            self.flat, self.apart = self.flat.clone(), True

    @property
    def dtype(self) -> torch.dtype:
        """Of every value."""
        return self.flat.dtype

    @property
    def data(self) -> memoryview:
        """The values' bytes."""
        return as_bytes(self.flat)

    def store(self) -> None:
        """The tensors hold the values."""
        if self.apart:
            sizes = [tensor.numel() for tensor in self._tensors]
            for tensor, values in zip(self._tensors, torch.split(self.flat, sizes), strict=True):
                tensor.copy_(values.view(tensor.shape))


def plain(tensor: Tensor) -> Tensor:
    """The tensor's memory, without its history; complex numbers are pairs of real ones."""
    if tensor.layout is not torch.strided:
        raise NotSupported("sparse tensors do not travel over the ring: make them dense")
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def in_host_memory(tensor: Tensor) -> Tensor:
    """Its values, [n]: its own memory if that will do."""
    return (tensor if tensor.is_cpu else tensor.cpu()).contiguous().view(-1)


def is_same_memory(flat: Tensor, tensor: Tensor) -> bool:
    """Whether what is written to `flat` is written to `tensor`."""
    return flat.device == tensor.device and flat.data_ptr() == tensor.data_ptr()


def as_bytes(flat: Tensor) -> memoryview:
    """The bytes of contiguous values [n] in host memory."""
    return flat.view(torch.uint8).numpy().data


def fill(flat: Tensor, tensor: Tensor) -> None:
    """`flat` [n] holds the values of `tensor`, which may be a view of it."""
    check_size(flat, tensor)
    values = plain(tensor)
    if not (values.is_contiguous() and is_same_memory(flat, values)):
        flat.copy_(values.reshape(-1))


def check_size(flat: Tensor, tensor: Tensor) -> None:
    """Both hold as many values, of one dtype."""
    values = plain(tensor)
    if flat.numel() != values.numel() or flat.dtype != values.dtype:
        raise ValueError(f"{values.numel()} x {values.dtype} do not fit {flat.numel()} x {flat.dtype} on the same rank")
