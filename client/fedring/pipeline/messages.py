"""Messages between stages: a header of 16 int64 values, then the tensor.

    magic  step  kind  edge  micro_batch  version  dtype  dimensions  shape[8]

The header describes the tensor, so shapes may change from one micro-batch to the next. A receiver checks every value.
An empty tensor [0] says that there is no gradient. The magic number changes with the meaning of the header.
"""

import struct
from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fedring.pipeline.errors import PipelineError
from fedring.schedules.schedule import Kind

HEADER_WORDS = 16
HEADER_BYTES = 8 * HEADER_WORDS
_MAGIC = 0x46524E33  # "FRN3"
_OLDER = (
    0x46524E47,  # "FRNG": the third number was the stage that receives the message
    0x46524E32,  # "FRN2": more messages had receipts
)
_FIXED, _DIMENSIONS = 8, 8
_KINDS = (Kind.FORWARD, Kind.BACKWARD)
_DTYPES = (
    torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8,
    torch.bool, torch.int16, torch.int8,
)  # fmt: skip
_CODES = {dtype: code for code, dtype in enumerate(_DTYPES)}
_WORDS = struct.Struct(f"<{HEADER_WORDS}q")
_NO_SHAPE = (0,) * _DIMENSIONS

NO_GRADIENT = torch.empty(0, device="cpu")
"""Is sent instead of a gradient if the later stage's outputs do not depend on the tensor."""


class Key(NamedTuple):
    """The identity of a message."""

    step: int  # the number of the run
    kind: Kind  # FORWARD for tensors, BACKWARD for their gradients
    edge: int  # the number of the edge in Routes.edges: which tensor passes between which stages
    micro_batch: int


@dataclass(frozen=True, slots=True, eq=False)
class StageMessage:
    """A tensor for another stage, with the version of its weights.

    The weights of that version have computed the tensor.
    """

    key: Key
    version: int
    tensor: Tensor  # [batch, ...]


class Described(NamedTuple):
    """A message as its header describes it, without its data."""

    key: Key
    version: int
    dtype: torch.dtype
    shape: list[int]

    @property
    def nbytes(self) -> int:
        """The bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize


def header(message: StageMessage) -> bytes:
    """Return the header of a message, HEADER_BYTES bytes.

    Raises:
        PipelineError: If the tensor's dtype or its number of dimensions cannot be sent.
    """
    key, tensor = message.key, message.tensor
    code, shape = _CODES.get(tensor.dtype), tensor.shape
    if code is None or len(shape) > _DIMENSIONS:
        raise PipelineError(
            f"stages cannot send a tensor of {tensor.dtype} with {tensor.dim()} dimensions: at most {_DIMENSIONS} "
            f"dimensions are possible, of {', '.join(map(str, _DTYPES))}"
        )
    numbers = _MAGIC, key.step, _KINDS.index(key.kind), key.edge, key.micro_batch, message.version, code, len(shape)
    return _WORDS.pack(*numbers, *shape, *_NO_SHAPE[len(shape) :])


def parse(data: bytes | memoryview, *, max_bytes: int) -> Described:
    """Parse a header.

    Args:
        data: The header, HEADER_BYTES bytes.
        max_bytes: The largest tensor to accept.

    Raises:
        PipelineError: If the header is not valid, or the tensor is too large.
    """
    if len(data) != HEADER_BYTES:
        raise PipelineError(f"a peer sent {len(data)} bytes where a header of {HEADER_BYTES} bytes belongs")
    magic, step, kind, edge, micro_batch, version, code, dimensions, *shape = _WORDS.unpack(data)
    if magic in _OLDER:
        raise PipelineError("a peer runs an older release of fedring: all workers of a pipeline need the same one")
    if magic != _MAGIC or not 0 <= kind < len(_KINDS) or not 0 <= code < len(_DTYPES):
        raise PipelineError("a peer sent something that is not the header of a pipeline's message")
    if not 0 <= dimensions <= _DIMENSIONS or min(step, edge, micro_batch, version, *shape) < 0:
        raise PipelineError("a peer sent a header with numbers that no stage sends")
    dtype = _DTYPES[code]
    # Widths of 0 count as 1, because torch refuses other huge widths even in an empty tensor.
    size = prod(max(1, width) for width in shape[:dimensions]) * dtype.itemsize
    if size > max_bytes:
        raise PipelineError(f"a message has {size} bytes, more than max_message_bytes={max_bytes}")
    return Described(Key(step, _KINDS[kind], edge, micro_batch), version, dtype, shape[:dimensions])
