"""Downloads from the server's models, without I/O.

They check the headers and chunks that are received. Of these, one makes the whole model.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedring.codec import BUFFERS, CodecError, Schema, Vectors, decode, open_payload, parse_schema
from fedring.codec.digest import Digest, is_name
from fedring.rpc.chunks import ReceivedChunk
from fedring.v1 import federation_pb2 as pb

T = TypeVar("T")

MAX_PACKETS = 1024
_SLACK = 1 << 16  # bytes, for the headers of packets
_SMALL_BYTES = 1 << 20
_HEADER_BYTES = 16  # before the values of an fp32 or fp64 packet
_AS_STORED = {"fp32": np.float32, BUFFERS: np.float64}  # encodings whose values are the vector itself


class BadModel(Exception):
    """The received bytes are not the named model."""


class OtherSchema(ValueError):
    """The model has another schema than the one that is wanted."""


@dataclass(frozen=True, slots=True, eq=False)
class HeldModel:
    """One complete version of a model.

    Its vectors must not be changed.
    """

    digest: str  # the name of the model
    schema: Schema
    vectors: Vectors


class BlobDownload(ABC, Generic[T]):
    """A download, which may take several calls.

    Args:
        digest: The name of the model.
        schema: The schema that it must have.

    Raises:
        BadModel: If `digest` is not the form of a digest.
    """

    def __init__(self, digest: str, schema: Schema) -> None:
        if not is_name(digest):
            raise BadModel(f"the server names the model {digest[:80]!r}, which is not a digest")
        self.received = 0  # bytes of the payload so far
        self.header: pb.ModelHeader | None = None
        self._digest, self._schema = digest, schema

    @property
    def request(self) -> pb.FetchModelRequest:
        """The request for the part that is missing."""
        request = self._wanted()
        request.digest, request.offset = self._digest, self.received
        request.payload_name = self.header.payload_name if self.header and self.received else ""
        return request

    @property
    def complete(self) -> bool:
        """Whether all bytes were received."""
        return self.header is not None and self.received == self.header.total_bytes

    @property
    def share(self) -> float:
        """The share of the payload that was received, 0 to 1."""
        return self.received / self.header.total_bytes if self.header else 0.0

    @property
    def is_small(self) -> bool:
        """Whether `finish` is fast enough to need no other thread."""
        return True

    def begin(self, header: pb.ModelHeader) -> None:
        """Begin a stream of the payload.

        It continues the payload that was received in part, or begins another one. No memory is allocated for a header
        that cannot lead to what is wanted.

        Raises:
            BadModel: If the header is not that of what is wanted.
            OtherSchema: If the model has another schema.
        """
        if header.model_digest != self._digest:
            raise BadModel(f"the server sent model {header.model_digest[:80]!r}, but {self._digest} was asked for")
        if header.schema_hash != self._schema.hash:
            raise OtherSchema(_difference(self._schema, header.schema))
        self._check(header)
        if self.header is None or header.payload_name != self.header.payload_name:
            self.received = 0
            self._start(header)
        self.header = header

    def add(self, chunk: pb.Chunk | ReceivedChunk) -> None:
        """Add the next bytes of the payload.

        Raises:
            BadModel: If they do not follow those before, exceed the payload, or cannot be part of it.
        """
        end = self.received + len(chunk.data)
        if self.header is None or chunk.offset != self.received or end > self.header.total_bytes:
            raise BadModel(f"a chunk at offset {chunk.offset} was received where {self.received} was expected")
        self._take(chunk.data)
        self.received = end

    def finish(self) -> T:
        """Return the result of a complete payload.

        Raises:
            BadModel: If the payload is not complete or not valid, or does not have its digest.
        """
        if self.header is None or not self.complete:
            raise BadModel("the payload is not complete")
        return self._result(self.header)

    @abstractmethod
    def _wanted(self) -> pb.FetchModelRequest:
        """Return a request for the wanted bytes of the model."""

    @abstractmethod
    def _check(self, header: pb.ModelHeader) -> None:
        """Refuse a header of anything else, with BadModel."""

    @abstractmethod
    def _start(self, header: pb.ModelHeader) -> None:
        """Begin a payload, instead of any before."""

    @abstractmethod
    def _take(self, data: bytes | memoryview) -> None:
        """Take the bytes that follow the first `received` ones."""

    @abstractmethod
    def _result(self, header: pb.ModelHeader) -> T:
        """Check the complete payload, and return the result."""


class Download(BlobDownload[HeldModel]):
    """A download of one model.

    Args:
        digest: The name of the model.
        schema: The schema that it must have.
        base: A model that the server may send a difference from; None = the model must come in full.

    Raises:
        BadModel: If `digest` is not the form of a digest.
    """

    def __init__(self, digest: str, schema: Schema, base: HeldModel | None) -> None:
        super().__init__(digest, schema)
        self._base = base
        self._payload: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._hash = Digest(like=digest)
        self._values: list[slice] = []  # the places of the model's own bytes in the payload, if it comes uncompressed

    @property
    def is_small(self) -> bool:
        """Whether `finish` is fast enough to need no other thread.

        The size of the model decides, not that of the payload.
        """
        return 4 * self._schema.num_parameters + 8 * self._schema.num_buffers <= _SMALL_BYTES

    def _wanted(self) -> pb.FetchModelRequest:
        return pb.FetchModelRequest(held_digest=self._base.digest if self._base else "")

    def _start(self, header: pb.ModelHeader) -> None:
        self._payload = np.empty(header.total_bytes, np.uint8)
        self._hash = Digest(like=self._digest)
        self._values = list(_values_of(header))

    def _take(self, data: bytes | memoryview) -> None:
        end = self.received + len(data)
        self._payload[self.received : end] = np.frombuffer(data, np.uint8)
        for place in self._values:
            self._hash.update(self._payload[max(place.start, self.received) : min(place.stop, end)].data)

    def _result(self, header: pb.ModelHeader) -> HeldModel:
        base = self._base.vectors if self._base and header.base_digest else None
        try:
            vectors = Vectors(
                self._vector(pb.VECTOR_PARAMETERS, self._schema.num_parameters, base.parameters if base else None),
                self._vector(pb.VECTOR_BUFFERS, self._schema.num_buffers, base.buffers if base else None),
            )
        except CodecError as error:
            raise BadModel(str(error)) from error
        if (self._hash.name if self._values else vectors.digest(like=self._digest)) != self._digest:
            raise BadModel("the model does not have the digest that was asked for")
        return HeldModel(self._digest, self._schema, vectors)

    def _check(self, header: pb.ModelHeader) -> None:
        if header.base_digest not in ("", self._base.digest if self._base else ""):
            raise BadModel(
                f"the server sent a difference from model {header.base_digest[:80]!r}, which is not held here"
            )
        if not 1 <= len(header.packets) <= MAX_PACKETS or sum(p.bytes for p in header.packets) != header.total_bytes:
            raise BadModel("the packets do not add up to the payload")
        most = 8 * self._schema.num_parameters + 16 * self._schema.num_buffers + _SLACK
        if header.total_bytes > most:
            raise BadModel(f"the payload has {header.total_bytes} bytes, and this model takes at most {most}")

    def _vector(self, which: "pb.Vector.ValueType", size: int, base: NDArray[Any] | None) -> NDArray[Any]:
        """Return one of the two vectors, [size].

        It is the sum of its packets, plus `base` if they are differences.
        """
        total: NDArray[Any] | None = None
        for packet, data in self._packets():
            if packet.vector != which:
                continue
            values = _decode(data, packet.encoding, size)
            start = base if packet.kind == pb.KIND_DELTA and total is None else total
            total = values if start is None else start + values
        if total is None:
            total = base
        if total is None:
            if size:
                raise BadModel("the payload lacks one of the two vectors")
            total = np.empty(0, np.float64 if which == pb.VECTOR_BUFFERS else np.float32)
        return total

    def _packets(self) -> Iterator[tuple[pb.Packet, memoryview]]:
        view, offset = memoryview(self._payload.data), 0
        for packet in self.header.packets if self.header else ():
            yield packet, view[offset : offset + packet.bytes]
            offset += packet.bytes


def _values_of(header: pb.ModelHeader) -> Iterator[slice]:
    """Return the slices of the payload that the model's digest covers.

    There are none if the payload must be decoded first.
    """
    as_it_is = [(pb.VECTOR_PARAMETERS, "fp32"), (pb.VECTOR_BUFFERS, BUFFERS)]
    packets = [(packet.vector, packet.encoding) for packet in header.packets]
    if header.base_digest or packets not in (as_it_is, as_it_is[:1], as_it_is[1:]):
        return
    offset = 0
    for packet in header.packets:
        yield slice(offset + _HEADER_BYTES, offset + packet.bytes)
        offset += packet.bytes


def _difference(mine: Schema, theirs: bytes) -> str:
    """Return a sentence that names the first difference between two schemas.

    Args:
        mine: The schema of this client's model.
        theirs: The schema of the server's model, as canonical JSON.

    Raises:
        BadModel: If `theirs` is not a schema.
    """
    try:
        clause = parse_schema(theirs).difference(mine)
    except CodecError as error:
        raise BadModel(str(error)) from error
    return f"this model is not the one that is trained: {clause or 'their schemas differ'}"


def _decode(data: memoryview, encoding: str, size: int) -> NDArray[np.floating]:
    if encoding not in _AS_STORED:
        return decode(data, name=encoding, length=size)
    payload = open_payload(lambda offset, count: data[offset : offset + count], len(data), name=encoding, length=size)
    values = np.require(payload.decode(0, size), requirements=["ALIGNED"])  # copies only if a packet is not aligned
    values.flags.writeable = True  # Nobody else has the payload, and torch would copy an array that it may not write.
    return values
