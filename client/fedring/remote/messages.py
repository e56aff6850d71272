"""Messages: a header of JSON, and the bytes of tensors.

A message is sent by a program of the ring's engine. No I/O, no locks.

    step 0, part 0:      magic "FRC1" | u32 number of parts | u32 length of the header | header | small tensors
    step 1, parts 0...:  the bytes of large tensors, one after another, each cut into parts of at most MAX_PAYLOAD bytes

The header is {"tensors": [{"dtype", "shape", "grad"}, ...], "content": ...}, at most MAX_HEADER bytes of JSON. Tensors
of at most SMALL bytes together follow the header; then there are no parts. Larger ones are received into their own
memory, which is allocated once the header is checked. Integers are little endian, and so are the tensors.
"""

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from fedring.remote.errors import BadMessage
from fedring.ring.engine.program import Expect, Program, Receive, Send
from fedring.ring.torch.tensors import as_bytes, in_host_memory, plain
from fedring.ring.transport.frames import MAX_PAYLOAD

MAX_HEADER = 1 << 20
SMALL = 32 << 10

_PREFIX = struct.Struct("<4sII")
_MAGIC = b"FRC1"
_MAX_TENSORS = MAX_HEADER // len('{"dtype":"int8","shape":[]},')
_MAX_DIMENSIONS = 64  # torch's own limit
_DTYPES: dict[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    )
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_Dtype = Literal[
    "float16", "bfloat16", "float32", "float64", "complex64", "complex128", "uint8", "int8", "int16", "int32", "int64",
    "bool",
]  # fmt: skip


class _Tensor(BaseModel):
    """The description of a tensor in a header."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    dtype: _Dtype
    shape: Annotated[list[Annotated[int, Field(ge=0, lt=2**48)]], Field(max_length=_MAX_DIMENSIONS)]
    grad: bool = False

    @property
    def nbytes(self) -> int:
        """The bytes of the values, with widths of 0 counted as 1.

        torch refuses huge widths even beside a 0.
        """
        return prod(max(1, width) for width in self.shape) * _DTYPES[self.dtype].itemsize


class _Header(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    tensors: list[_Tensor] = []
    content: Any


@dataclass(frozen=True, slots=True, eq=False)
class Message:
    """JSON and tensors.

    Attributes:
        content: JSON.
        tensors: Tensors, contiguous in host memory, without history.
        grads: For each tensor whether gradients flow back to its sender.
    """

    content: Any
    tensors: Sequence[Tensor] = ()
    grads: Sequence[bool] = ()


def outgoing(content: Any, tensors: Sequence[Tensor] = (), grads: Sequence[bool] | None = None) -> Message:
    """Return a message of JSON and of any tensors.

    Raises:
        BadMessage: A tensor's dtype cannot be sent.
        NotSupported: A tensor is sparse, quantized or has no data.
    """
    for tensor in tensors:
        if tensor.dtype not in _NAMES:
            raise BadMessage(f"a tensor of {tensor.dtype} cannot be sent: convert it to one of {', '.join(_DTYPES)}")
    values = [in_host_memory(plain(tensor)).view(tensor.shape) for tensor in tensors]
    return Message(content, values, [False] * len(values) if grads is None else list(grads))


def encode(message: Message) -> bytes:
    """Return the first frame of a message.

    Raises:
        BadMessage: The header is too large, or has a string that is not Unicode.
    """
    described = [
        _Tensor(dtype=_NAMES[tensor.dtype], shape=list(tensor.shape), grad=grad)  # type: ignore[arg-type]  # a name
        for tensor, grad in zip(message.tensors, message.grads, strict=True)
    ]
    try:
        header = _Header(tensors=described, content=message.content).model_dump_json(exclude_defaults=True).encode()
    except ValueError as error:  # pydantic's
        raise BadMessage(f"a value cannot be written as JSON: {error}") from None
    if len(header) > MAX_HEADER:
        raise BadMessage(f"what is not in tensors takes {len(header)} bytes, more than {MAX_HEADER}: use tensors")
    parts = list(_parts(message.tensors))
    if sum(map(len, parts)) > SMALL:
        return _PREFIX.pack(_MAGIC, len(parts), len(header)) + header
    return b"".join((_PREFIX.pack(_MAGIC, 0, len(header)), header, *parts))


def send(to: int, message: Message) -> Program:
    """Send a message to a rank.

    Its tensors must not change before their bytes are copied.
    """
    yield Expect({}, 0)
    yield Send(to, encode(message))
    parts = list(_parts(message.tensors))
    if sum(map(len, parts)) > SMALL:
        for part, data in enumerate(parts):
            yield Send(to, data, 1, part)


@dataclass(slots=True, eq=False)
class Incoming:
    """The result of `receive`: a message or an error."""

    max_bytes: int
    message: Message | None = None
    error: BadMessage | None = None

    def take(self) -> Message:
        """Return the message.

        Raises:
            BadMessage: The received bytes are not a message.
        """
        if self.error is not None or self.message is None:
            raise self.error or BadMessage("nothing has come")
        return self.message


def receive(source: int, incoming: Incoming) -> Program:
    """Receive a message from a rank.

    Bytes that are not a message are received as well, and dropped.
    """
    # Of a message that is too large, too, the parts are used as they come.
    yield Expect({source: MAX_PAYLOAD + incoming.max_bytes}, 1 + incoming.max_bytes // MAX_PAYLOAD + _MAX_TENSORS)
    first = yield Receive(source, -1)
    count = _PREFIX.unpack_from(first)[1] if len(first) >= _PREFIX.size and first[:4] == _MAGIC else 0
    message, into = Message(None), []
    try:
        message = decode(bytes(first), max_bytes=incoming.max_bytes)
        into = list(_parts(message.tensors))  # of which `count` come in parts
    except BadMessage as error:
        incoming.error = error
    for part in range(count):
        came = yield Receive(source, -1, 1, part)
        if incoming.error is None and len(came) != len(into[part]):
            incoming.error = BadMessage(f"part {part} of a message has {len(came)} bytes, not {len(into[part])}")
        if incoming.error is None:
            into[part][:] = came
    if incoming.error is None:
        incoming.error = _wrong_booleans(message.tensors)
        incoming.message = message


def decode(data: bytes, *, max_bytes: int) -> Message:
    """Parse the beginning of a message, and allocate its tensors.

    Their values are not initialised unless the tensors are small.

    Args:
        data: The result of `encode`, from a peer.
        max_bytes: The most bytes of its tensors together.

    Raises:
        BadMessage: `encode` cannot have made it, or the tensors are too large.
    """
    if len(data) < _PREFIX.size or data[:4] != _MAGIC:
        raise BadMessage(f"{len(data)} bytes came that are not the beginning of a message")
    _, count, length = _PREFIX.unpack_from(data)
    small = memoryview(data)[_PREFIX.size + length :]
    if length > MAX_HEADER or _PREFIX.size + length > len(data) or len(small) > SMALL:
        raise BadMessage(f"{len(data)} bytes came, of which {length} are to be the header of a message")
    try:
        header = _Header.model_validate_json(data[_PREFIX.size : _PREFIX.size + length])
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False, include_context=False)[0]
        place = ".".join(map(str, first["loc"])) or "the header"
        raise BadMessage(f"the header of a message is not valid: {place}: {first['msg']}") from None
    total = sum(described.nbytes for described in header.tensors)
    if total > max_bytes:
        raise BadMessage(f"the tensors of a message have {total} bytes, more than max_message_bytes={max_bytes}")
    # Allocate only now, when the sum of the sizes is known to be within the limit.
    tensors = [
        torch.empty(described.shape, dtype=_DTYPES[described.dtype], device="cpu") for described in header.tensors
    ]
    parts = list(_parts(tensors))
    held = sum(map(len, parts))
    expected = (len(parts), 0) if held > SMALL else (0, held)
    if (count, len(small)) != expected:
        raise BadMessage(
            f"a message has {count} parts, and {len(small)} bytes behind its header, where its tensors need "
            f"{expected[0]} and {expected[1]}"
        )
    if not count:
        for part in parts:
            part[:], small = small[: len(part)], small[len(part) :]
    return Message(header.content, tensors, [described.grad for described in header.tensors])


def _parts(tensors: Sequence[Tensor]) -> Iterator[memoryview]:
    """Yield the memory of the tensors in parts."""
    for tensor in tensors:
        data = as_bytes(tensor.view(-1)) if tensor.numel() else memoryview(b"")
        for begin in range(0, len(data), MAX_PAYLOAD):
            yield data[begin : begin + MAX_PAYLOAD]


def _wrong_booleans(tensors: Sequence[Tensor]) -> BadMessage | None:
    for tensor in tensors:
        if tensor.dtype is torch.bool and tensor.numel() and int(tensor.view(torch.uint8).max()) > 1:
            return BadMessage("a tensor of booleans has a byte that is neither 0 nor 1")
    return None
