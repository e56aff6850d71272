"""One download of a model, as values: what comes is checked, placed and counted; nothing here reads a socket."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedring.client.errors import BadModel, WrongModel
from fedring.codec import BUFFERS, CodecError, Schema, Vectors, decode, open_payload, parse_schema
from fedring.codec.digest import Digest, is_name
from fedring.rpc.chunks import ReceivedChunk
from fedring.v1 import federation_pb2 as pb

MAX_PACKETS = 1024
_SLACK = 1 << 16  # bytes for the packets' headers
_SMALL_BYTES = 1 << 20
_HEADER_BYTES = 16  # before the values of an fp32 or fp64 packet
_AS_STORED = {"fp32": np.float32, BUFFERS: np.float64}  # encodings whose payload is the vector itself


@dataclass(frozen=True, slots=True, eq=False)
class HeldModel:
    """One version of the model, whole. Nobody changes its vectors."""

    digest: str  # names it
    schema: Schema
    vectors: Vectors


class Download:
    """The model that has the digest, for a model of `schema`, in full or as a step from `base`."""

    def __init__(self, digest: str, schema: Schema, base: HeldModel | None) -> None:
        if not is_name(digest):
            raise BadModel(f"the server names the model {digest[:80]!r}, which is no digest")
        self.received = 0  # bytes of the payload
        self.header: pb.ModelHeader | None = None
        self._digest = digest
        self._schema = schema
        self._base = base
        self._payload: NDArray[np.uint8] = np.empty(0, np.uint8)
        self._hash = Digest(like=digest)
        self._values: list[slice] = []  # where in the payload the model's own bytes lie, if it comes as it is

    @property
    def request(self) -> pb.FetchModelRequest:
        """Asks for what is missing."""
        return pb.FetchModelRequest(
            digest=self._digest,
            held_digest=self._base.digest if self._base else "",
            offset=self.received,
            payload_name=self.header.payload_name if self.header and self.received else "",
        )

    @property
    def complete(self) -> bool:
        """Whether every byte is here."""
        return self.header is not None and self.received == self.header.total_bytes

    @property
    def is_small(self) -> bool:
        """Whether the model is put together sooner than a thread is found for it, however few bytes of it came."""
        return 4 * self._schema.num_parameters + 8 * self._schema.num_buffers <= _SMALL_BYTES

    @property
    def share(self) -> float:
        """How much of the payload is here, 0 to 1."""
        return self.received / self.header.total_bytes if self.header else 0.0

    def begin(self, header: pb.ModelHeader) -> None:
        """A stream begins: it goes on with the payload that is half here, or starts another one."""
        self._check(header)
        if self.header is None or header.payload_name != self.header.payload_name:
            self._payload = np.empty(header.total_bytes, np.uint8)
            self._values = list(_values_of(header))
            self.received = 0
        self.header = header

    def add(self, chunk: pb.Chunk | ReceivedChunk) -> None:
        """The next bytes have come."""
        end = self.received + len(chunk.data)
        if self.header is None or chunk.offset != self.received or end > self.header.total_bytes:
            raise BadModel(f"a chunk at {chunk.offset} where one at {self.received} was due")
        self._payload[self.received : end] = np.frombuffer(chunk.data, np.uint8)
        for place in self._values:
            self._hash.update(self._payload[max(place.start, self.received) : min(place.stop, end)].data)
        self.received = end

    def finish(self) -> HeldModel:
        """The model, proven to be the server's by its digest; BadModel if it is not."""
        if self.header is None or not self.complete:
            raise BadModel("it is not complete")
        base = self._base.vectors if self._base and self.header.base_digest else None
        try:
            vectors = Vectors(
                self._vector(pb.VECTOR_PARAMETERS, self._schema.num_parameters, base.parameters if base else None),
                self._vector(pb.VECTOR_BUFFERS, self._schema.num_buffers, base.buffers if base else None),
            )
        except CodecError as error:
            raise BadModel(str(error)) from error
        if (self._hash.name if self._values else vectors.digest(like=self._digest)) != self._digest:
            raise BadModel("the model is not what its digest says")
        return HeldModel(self._digest, self._schema, vectors)

    def _check(self, header: pb.ModelHeader) -> None:
        """Refuse before a byte is allocated what cannot become the wanted model."""
        if header.model_digest != self._digest:
            raise BadModel(f"model {header.model_digest[:80]!r} where {self._digest} was asked for")
        if header.schema_hash != self._schema.hash:
            raise WrongModel(difference(self._schema, header.schema))
        if header.base_digest not in ("", self._base.digest if self._base else ""):
            raise BadModel(f"a step from model {header.base_digest[:80]!r}, which is not held")
        if not 1 <= len(header.packets) <= MAX_PACKETS or sum(p.bytes for p in header.packets) != header.total_bytes:
            raise BadModel("the packets do not make up the payload")
        most = 8 * self._schema.num_parameters + 16 * self._schema.num_buffers + _SLACK
        if header.total_bytes > most:
            raise BadModel(f"{header.total_bytes} bytes for a model that takes at most {most}")

    def _vector(self, which: "pb.Vector.ValueType", size: int, base: NDArray[Any] | None) -> NDArray[Any]:
        """One of the two vectors, [size]: the sum of its packets, and of `base` if they are differences."""
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
                raise BadModel("one of the two vectors is missing")
            total = np.empty(0, np.float64 if which == pb.VECTOR_BUFFERS else np.float32)
        return total

    def _packets(self) -> Iterator[tuple[pb.Packet, memoryview]]:
        view, offset = memoryview(self._payload.data), 0
        for packet in self.header.packets if self.header else ():
            yield packet, view[offset : offset + packet.bytes]
            offset += packet.bytes


def _values_of(header: pb.ModelHeader) -> Iterator[slice]:
    """Where the bytes lie that the digest of the model is over; nothing if they must be decoded first."""
    as_it_is = [(pb.VECTOR_PARAMETERS, "fp32"), (pb.VECTOR_BUFFERS, BUFFERS)]
    packets = [(packet.vector, packet.encoding) for packet in header.packets]
    if header.base_digest or packets not in (as_it_is, as_it_is[:1], as_it_is[1:]):
        return
    offset = 0
    for packet in header.packets:
        yield slice(offset + _HEADER_BYTES, offset + packet.bytes)
        offset += packet.bytes


def difference(mine: Schema, theirs: bytes) -> str:
    """One sentence that names the first difference of this client's model from the server's canonical JSON."""
    try:
        clause = parse_schema(theirs).difference(mine)
    except CodecError as error:
        raise BadModel(str(error)) from error
    return f"this model is not the one that is trained: {clause or 'their schemas differ'}"


def _decode(data: memoryview, encoding: str, size: int) -> NDArray[np.floating]:
    if encoding not in _AS_STORED:
        return decode(data, name=encoding, length=size)
    payload = open_payload(lambda offset, count: data[offset : offset + count], len(data), name=encoding, length=size)
    values = np.require(payload.decode(0, size), requirements=["ALIGNED"])  # no copy, but where packets are odd
    values.flags.writeable = True  # the payload is ours alone, and torch copies what it may not write
    return values
