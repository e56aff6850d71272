"""Downloads of some tensors: their values arrive where they belong, and anything else is refused."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fedring.client.transfer.partial import PartialDownload, ranges_of
from fedring.codec.digest import name_of
from fedring.codec.schema import Entry, Schema
from fedring.train.tensors.download import BadModel, OtherSchema
from fedring.v1 import federation_pb2 as pb

SCHEMA = Schema(
    (
        Entry("a", (2, 3), "float32", "parameter"),
        Entry("mean", (2,), "float32", "buffer"),
        Entry("b", (4,), "float32", "parameter"),
        Entry("c", (5,), "float32", "parameter"),
        Entry("nothing", (0,), "float32", "parameter"),
        Entry("d", (1,), "float32", "parameter"),
        Entry("count", (), "int64", "buffer"),
    )
)
MODEL = name_of(b"a model")
WANTED = ["d", "b", "c", "count"]
VALUES = np.arange(10, dtype="<f4").tobytes() + np.array([3.0], "<f8").tobytes()


class Received:
    """A sink that keeps what arrives, by tensor."""

    def __init__(self) -> None:
        self.values: dict[str, list[float]] = {}

    def __call__(self, entry: Entry, start: int, values: NDArray[np.floating]) -> None:
        mine = self.values.setdefault(entry.name, [])
        mine[start : start + len(values)] = values.tolist()


def header(**changes: Any) -> pb.ModelHeader:
    fixed: dict[str, Any] = {
        "model_digest": MODEL,
        "schema_hash": SCHEMA.hash,
        "schema": SCHEMA.json,
        "ranges": list(ranges_of(SCHEMA, WANTED)),
        "total_bytes": len(VALUES),
        "payload_name": name_of(VALUES),
    }
    return pb.ModelHeader(**{**fixed, **changes})


def download() -> tuple[PartialDownload, Received]:
    sink = Received()
    return PartialDownload(MODEL, SCHEMA, WANTED, sink), sink


def test_neighbours_share_a_range() -> None:
    rows = [(one.vector, one.start, one.count) for one in ranges_of(SCHEMA, WANTED)]
    assert rows == [(pb.VECTOR_PARAMETERS, 6, 10), (pb.VECTOR_BUFFERS, 2, 1)]
    rows = [(one.vector, one.start, one.count) for one in ranges_of(SCHEMA, ["a", "c", "mean"])]
    assert rows == [(pb.VECTOR_PARAMETERS, 0, 6), (pb.VECTOR_PARAMETERS, 10, 5), (pb.VECTOR_BUFFERS, 0, 2)]


@pytest.mark.parametrize("size", [1, 3, 7, 16, 1000])
def test_values_arrive_whole_whatever_the_chunks(size: int) -> None:
    part, sink = download()
    part.begin(header())
    for offset in range(0, len(VALUES), size):
        part.add(pb.Chunk(offset=offset, data=VALUES[offset : offset + size]))
    assert part.complete
    part.finish()
    assert sink.values == {"b": [0, 1, 2, 3], "c": [4, 5, 6, 7, 8], "d": [9], "count": [3]}


def test_a_download_that_broke_off_continues_if_the_payload_is_the_same() -> None:
    part, sink = download()
    part.begin(header())
    part.add(pb.Chunk(data=VALUES[:10]))
    assert (part.request.offset, part.request.payload_name) == (10, name_of(VALUES))
    part.begin(header())
    part.add(pb.Chunk(offset=10, data=VALUES[10:]))
    part.finish()
    assert sink.values["c"] == [4, 5, 6, 7, 8]
    part.begin(header(payload_name=name_of(b"other")))
    assert part.request.offset == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"model_digest": name_of(b"other")},
        {"ranges": []},
        {"ranges": list(ranges_of(SCHEMA, ["a"]))},
        {"total_bytes": len(VALUES) + 1},
        {"payload_name": "values"},
    ],
)
def test_a_header_of_something_else_is_refused(changes: dict[str, Any]) -> None:
    part, _ = download()
    with pytest.raises(BadModel):
        part.begin(header(**changes))


def test_another_schema_is_named() -> None:
    other = Schema(SCHEMA.entries[:-1])
    part, _ = download()
    with pytest.raises(OtherSchema, match="expected 6 tensors, got 7"):
        part.begin(header(schema=other.json, schema_hash=other.hash))


def not_finite(part: PartialDownload) -> None:
    data = np.array([np.inf], "<f4").tobytes() + VALUES[4:]
    part.begin(header(payload_name=name_of(data)))
    part.add(pb.Chunk(data=data))


def gap(part: PartialDownload) -> None:
    part.begin(header())
    part.add(pb.Chunk(offset=4, data=VALUES[4:]))


def too_long(part: PartialDownload) -> None:
    part.begin(header())
    part.add(pb.Chunk(data=VALUES + b"x"))


def too_early(part: PartialDownload) -> None:
    part.add(pb.Chunk(data=VALUES))


def other_bytes(part: PartialDownload) -> None:
    part.begin(header(payload_name=name_of(b"other")))
    part.add(pb.Chunk(data=VALUES))
    part.finish()


def too_short(part: PartialDownload) -> None:
    part.begin(header())
    part.add(pb.Chunk(data=VALUES[:-1]))
    part.finish()


@pytest.mark.parametrize("send", [not_finite, gap, too_long, too_early, other_bytes, too_short])
def test_values_that_are_not_those_of_the_header_are_refused(send: Callable[[PartialDownload], None]) -> None:
    with pytest.raises(BadModel):
        send(download()[0])


def test_a_name_that_is_no_digest_is_refused() -> None:
    with pytest.raises(BadModel, match="not a digest"):
        PartialDownload("newest", SCHEMA, WANTED, Received())
