"""Files of tensors in the format of safetensors.

They are written and read one tensor after the other.

The library of safetensors maps a whole file into memory, or takes the bytes of all tensors at once. Here, a tensor on
the CPU is written from its own memory and read into it, so that a file of any size takes no memory.

A text in the header is the BLAKE3 of the whole file, with zeros in the digest's place.
"""

import json
import os
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch
from blake3 import blake3
from torch import Tensor

from fedring.daemon.durable import sync
from fedring.train.errors import TrainError, on_disk
from fedring.untrusted import parse_json

_LENGTH = struct.Struct("<Q")
_MAX_HEADER_BYTES = 64 << 20
PIECE = 1 << 16
"""Values that are checked or sent at a time."""

_METADATA, _DIGEST = "__metadata__", "blake3"
_NO_DIGEST = "0" * 64
_STEP = 1 << 20  # bytes that are read at a time for the digest
_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """The place of a tensor in a file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int  # from the beginning of the file, in bytes
    size: int  # in bytes


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a file durably, replacing a file of this name.

    Nobody ever finds half of one.

    Args:
        path: The file.
        tensors: The tensors by name, of any device.
        metadata: Any texts by name.

    Raises:
        TrainError: With the reason bad_checkpoint, if a tensor's dtype cannot be stored, or disk_failed.
    """
    part, header = path.with_name(path.name + ".part"), _header(tensors, {_DIGEST: _NO_DIGEST, **metadata})
    digest = blake3(header)
    with on_disk(part), part.open("wb", buffering=0) as file:
        file.write(header)
        for tensor in tensors.values():
            left = _bytes_of(tensor.detach().cpu().contiguous())
            digest.update(left)
            while left:
                left = left[file.write(left) :]
        os.pwrite(file.fileno(), digest.hexdigest().encode(), header.index(_NO_DIGEST.encode()))
        # The values must be on the disk before the rename is, or a power loss could leave the name without them.
        os.fsync(file.fileno())
        part.replace(path)
        sync(path.parent)


class TensorFile:
    """A file that write_tensors() has written; a context manager.

    It may have been written on another machine.

    Attributes:
        tensors: The tensors' places in the file, by name.
        metadata: Its texts, by name.

    Raises:
        TrainError: With the reason bad_checkpoint, if it is no such file.
        OSError: If it cannot be read.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("rb", buffering=0)
        try:
            self.tensors, self.metadata = self._read_header()
        except (ValueError, TypeError, KeyError, AttributeError, struct.error) as error:
            self._file.close()
            raise self._bad(f"its header cannot be used ({error})") from error

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()

    def check(self) -> None:
        """Compare the file with its digest.

        One without a digest, which fedring 1.0.0 has written, is taken for sound.

        Raises:
            TrainError: With the reason bad_checkpoint, if not.
            OSError: If it cannot be read.
        """
        if not self._digest:
            return
        header = os.pread(self._file.fileno(), self._begin, 0)
        found = blake3(header.replace(self._digest.encode(), _NO_DIGEST.encode(), 1))
        offset = self._begin
        while data := os.pread(self._file.fileno(), _STEP, offset):
            found.update(data)
            offset += len(data)
        if found.hexdigest() != self._digest:
            raise self._bad("it does not hold what was written to it")

    def read_into(self, name: str, tensor: Tensor) -> None:
        """Fill a tensor, of any device, with the values of the file.

        Raises:
            TrainError: With the reason bad_checkpoint, if the file has no such tensor, or one of another shape or
                dtype, or if a value is not finite.
        """
        stored = self.tensors.get(name)
        if stored is None or (stored.dtype, stored.shape) != (tensor.dtype, tuple(tensor.shape)):
            found = "nothing" if stored is None else f"{stored.dtype}{list(stored.shape)}"
            raise self._bad(f"{name} must be {tensor.dtype}{list(tensor.shape)}, and the file has {found}")
        target = tensor.detach()
        if target.device.type != "cpu" or not target.is_contiguous():
            # Read into host memory first, if the tensor's own memory cannot be read into.
            target = torch.empty(stored.shape, dtype=stored.dtype)
        left, offset = _bytes_of(target), stored.start
        while left:
            count = os.preadv(self._file.fileno(), [left], offset)
            if not count:
                raise self._bad("it has been cut short")
            left, offset = left[count:], offset + count
        if target.is_floating_point() and not all(
            bool(p.isfinite().all()) for p in torch.split(target.view(-1), PIECE)
        ):
            raise self._bad(f"a value of {name} is not finite")
        if target.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(target)

    def _read_header(self) -> tuple[dict[str, StoredTensor], dict[str, str]]:
        fd = self._file.fileno()
        size = os.fstat(fd).st_size
        (length,) = _LENGTH.unpack(os.pread(fd, _LENGTH.size, 0))
        if not 0 < length <= min(_MAX_HEADER_BYTES, size - _LENGTH.size):
            raise ValueError(f"a length of {length} bytes")
        rows: dict[str, Any] = parse_json(os.pread(fd, length, _LENGTH.size))
        metadata = {str(key): str(value) for key, value in rows.pop(_METADATA, {}).items()}
        self._digest, self._begin = metadata.pop(_DIGEST, ""), _LENGTH.size + length
        tensors, at = {}, self._begin
        for name, row in rows.items():
            tensors[name] = _stored(row, at, _LENGTH.size + length)
            at += tensors[name].size
        if at != size:
            raise ValueError(f"{at} bytes are expected, and the file has {size}")
        return tensors, metadata

    def _bad(self, clause: str) -> TrainError:
        return TrainError("bad_checkpoint", f"The checkpoint {self._path} cannot be used: {clause}.")


def _header(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> bytes:
    rows: dict[str, Any] = {_METADATA: dict(metadata)}
    start = 0
    for name, tensor in tensors.items():
        if tensor.dtype not in _NAMES:
            raise TrainError("bad_checkpoint", f"{name} is of {tensor.dtype}, which a checkpoint cannot hold.")
        end = start + tensor.numel() * tensor.element_size()
        rows[name] = {"dtype": _NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return _LENGTH.pack(len(text)) + text


def _stored(row: Mapping[str, Any], at: int, data: int) -> StoredTensor:
    """Return the place of a tensor that must begin at `at`.

    The tensors' bytes begin at `data`.
    """
    dtype, shape = _DTYPES[row["dtype"]], tuple(row["shape"])
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"the shape {str(shape)[:100]}")
    size = prod(shape) * dtype.itemsize
    if row["data_offsets"] != [at - data, at - data + size]:
        raise ValueError("tensors that do not follow each other")
    return StoredTensor(dtype, shape, at, size)


def _bytes_of(tensor: Tensor) -> memoryview:
    """Return the memory of a contiguous tensor on the CPU."""
    if not tensor.numel():
        return memoryview(b"")
    return tensor.view(-1).view(torch.uint8).numpy().data


def pieces(tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """Yield the values of a tensor in pieces of some MiB.

    Each piece is on the CPU, [n] of `dtype`; pieces are in order.
    """
    for piece in torch.split(tensor.detach().reshape(-1), PIECE):
        yield piece.to("cpu", dtype).contiguous()
