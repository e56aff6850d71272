"""What goes from stage to stage: a header of int64 values, then the tensor.

    magic  step  kind  stage  micro_batch  version  dtype  dimensions  shape[8]

The header says what is to come, so that shapes may change from one micro-batch to the next. A receiver
trusts none of it.
"""

from dataclasses import dataclass
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from fedring.pipeline.errors import PipelineError
from fedring.schedules.schedule import Kind

HEADER_WORDS = 16
HEADER_BYTES = 8 * HEADER_WORDS
_MAGIC = 0x46524E47
_FIXED, _DIMENSIONS = 8, 8
_KINDS = (Kind.FORWARD, Kind.BACKWARD)
_DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8)


class Key(NamedTuple):
    """Which message it is; `stage` is the one that it goes to."""

    step: int
    kind: Kind
    stage: int
    micro_batch: int


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """A tensor on its way, and the version of the weights that made it."""

    key: Key
    version: int
    tensor: Tensor


def header(message: Message) -> Tensor:
    """The header of a message, [16] int64."""
    key, tensor = message.key, message.tensor
    if tensor.dtype not in _DTYPES or tensor.dim() > _DIMENSIONS:
        raise PipelineError(f"stages cannot send {tensor.dtype} of {tensor.dim()} dimensions")
    code = _DTYPES.index(tensor.dtype)
    words = [_MAGIC, key.step, _KINDS.index(key.kind), key.stage, key.micro_batch, message.version, code, tensor.dim()]
    words += [*tensor.shape, *[0] * (_DIMENSIONS - tensor.dim())]
    return torch.tensor(words, dtype=torch.int64)


def parse(words: Tensor, *, max_bytes: int) -> Message:
    """The message that a header [16] int64 announces, with an empty tensor; PipelineError if it is none."""
    magic, step, kind, stage, micro_batch, version, code, dimensions, *shape = words.tolist()
    if magic != _MAGIC or not 0 <= kind < len(_KINDS) or not 0 <= code < len(_DTYPES):
        raise PipelineError("what came is no header of a pipeline's message")
    if not 0 <= dimensions <= _DIMENSIONS or min(step, stage, micro_batch, version, *shape) < 0:
        raise PipelineError("a header holds numbers that no stage sends")
    dtype = _DTYPES[code]
    size = prod(max(1, width) for width in shape[:dimensions]) * dtype.itemsize  # torch has no huge shapes of nothing
    if size > max_bytes:
        raise PipelineError(f"a message of {size} bytes, more than {max_bytes}")
    key = Key(step, _KINDS[kind], stage, micro_batch)
    return Message(key, version, torch.empty(shape[:dimensions], dtype=dtype))
