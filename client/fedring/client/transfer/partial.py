"""One download of some tensors of a model.

The values go straight to where they belong. There is no I/O but the sink's. Nobody else can check a part of a model
against the model's digest. So the server checks its whole file, and names the payload by the digest of the values that
it sends, which is compared here.
"""

from collections.abc import Callable, Collection, Iterator
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from fedring.codec.digest import Digest, is_name
from fedring.codec.schema import Entry, Schema
from fedring.train.tensors.download import BadModel, BlobDownload
from fedring.v1 import federation_pb2 as pb

Sink = Callable[[Entry, int, NDArray[np.floating]], None]
"""Takes a tensor's entry, the place of the first value in the flat tensor, and the values, float32 or float64."""

_ROLES = (("parameter", pb.VECTOR_PARAMETERS, "<f4"), ("buffer", pb.VECTOR_BUFFERS, "<f8"))


class PartialDownload(BlobDownload[None]):
    """A download of some tensors, which may take several calls.

    Args:
        digest: The name of the model.
        schema: The schema that it must have.
        names: The tensors that are wanted, at least one.
        sink: Takes their values as they arrive; they must be finite. After BadModel, they must not be used.

    Raises:
        BadModel: If `digest` is not the form of a digest.
    """

    def __init__(self, digest: str, schema: Schema, names: Collection[str], sink: Sink) -> None:
        super().__init__(digest, schema)
        self._sink = sink
        self._ranges = list(ranges_of(schema, names))
        self._entries = list(_entries_of(schema, names))
        self.total = sum(width * entry.size for entry, width in self._entries)  # bytes of the payload
        self._hash = Digest()
        self._at, self._filled = 0, 0  # the entry that the next value belongs to, and how many values it has
        self._rest = b""  # of a value that was received in part

    def _wanted(self) -> pb.FetchModelRequest:
        return pb.FetchModelRequest(ranges=self._ranges)

    def _check(self, header: pb.ModelHeader) -> None:
        if list(header.ranges) != self._ranges or header.total_bytes != self.total:
            raise BadModel("the server did not send the tensors that were asked for: update fl-server")
        if not is_name(header.payload_name):
            raise BadModel(f"the server names the values {header.payload_name[:80]!r}, which is not a digest")

    def _start(self, header: pb.ModelHeader) -> None:
        self._at, self._filled, self._rest = 0, 0, b""
        self._hash = Digest()

    def _take(self, data: bytes | memoryview) -> None:
        self._hash.update(data)
        data = self._rest + bytes(data)
        used = 0
        while self._at < len(self._entries):
            entry, width = self._entries[self._at]
            count = min((len(data) - used) // width, entry.size - self._filled)
            if count:
                values: NDArray[np.floating] = np.frombuffer(data, f"<f{width}", count, used)
                if not np.isfinite(values).all():
                    raise BadModel(f"a value of {entry.name} is not finite")
                self._sink(entry, self._filled, values)
                used, self._filled = used + width * count, self._filled + count
            if self._filled < entry.size:
                break
            self._at, self._filled = self._at + 1, 0
        self._rest = data[used:]

    def _result(self, header: pb.ModelHeader) -> None:
        if self._hash.name != header.payload_name:
            raise BadModel("the values do not have the digest that the server named")


def ranges_of(schema: Schema, names: Collection[str]) -> Iterator[pb.ValueRange]:
    """Yield the ranges of a model's vectors with the named tensors.

    Neighbours share a range.

    Args:
        schema: What the model consists of.
        names: The wanted tensors.
    """
    wanted = frozenset(names)
    for role, vector, _ in _ROLES:
        spans = [(entry, span) for entry, span in schema.spans(role) if entry.size]
        for is_wanted, group in groupby(spans, key=lambda pair: pair[0].name in wanted):
            if is_wanted:
                places = [span for _, span in group]
                yield pb.ValueRange(vector=vector, start=places[0].start, count=places[-1].stop - places[0].start)


def _entries_of(schema: Schema, names: Collection[str]) -> Iterator[tuple[Entry, int]]:
    """Yield the named tensors' entries and value sizes in bytes.

    They are in the order in which they are sent.
    """
    wanted = frozenset(names)
    for role, _, dtype in _ROLES:
        for entry, _ in schema.spans(role):
            if entry.size and entry.name in wanted:
                yield entry, int(dtype[2:])
