"""Model files: ordinary safetensors files in which each flat vector can be read by range."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import safetensors
import safetensors.torch
import torch

from fedring.codec import TILE, Entry, Schema, Vectors
from fedring.codec.errors import CodecError
from fedring.server.aggregation.aggregate import store_model
from fedring.server.aggregation.modelfile import ModelReader, ModelWriter
from fedring.server.state.blobs import FileBlobs

SCHEMA = Schema(
    (
        Entry("conv.weight", (3, 5), "float32", "parameter"),
        Entry("bn.mean", (3,), "float32", "buffer"),
        Entry("empty", (0, 4), "float32", "parameter"),
        Entry("bn.count", (), "int64", "buffer"),
        Entry("scale", (), "float16", "parameter"),
    )
)
VECTORS = Vectors(np.arange(16, dtype=np.float32), np.array([0.5, 1.5, 2.5, 7.0]))


@pytest.fixture
def blobs(tmp_path: Path) -> Iterator[FileBlobs]:
    blobs = FileBlobs(tmp_path)
    yield blobs
    blobs.close()


def test_the_safetensors_library_reads_every_tensor(blobs: FileBlobs, tmp_path: Path) -> None:
    model = store_model(SCHEMA, VECTORS, blobs, {"round": "3"})
    path = tmp_path / "blobs" / model.blob
    tensors = safetensors.torch.load_file(path)
    assert set(tensors) == {entry.name for entry in SCHEMA.entries}
    assert torch.equal(tensors["conv.weight"], torch.arange(15.0).reshape(3, 5))
    assert torch.equal(tensors["bn.mean"], torch.tensor([0.5, 1.5, 2.5], dtype=torch.float64))
    assert tensors["empty"].shape == (0, 4)
    assert (tensors["bn.count"].item(), tensors["scale"].item()) == (7.0, 15.0)
    with safetensors.safe_open(path, "numpy") as file:
        metadata = file.metadata()
        assert metadata["schema"].encode() == SCHEMA.json
        assert (metadata["schema_hash"], metadata["round"]) == (SCHEMA.hash.hex(), "3")


def test_a_reader_returns_what_was_written(blobs: FileBlobs) -> None:
    model = store_model(SCHEMA, VECTORS, blobs, {})
    assert model.digest == VECTORS.digest()
    with blobs.reader(model.blob) as blob:
        reader = ModelReader(blob)
        assert (reader.schema, blob.size) == (SCHEMA, model.bytes)
        assert reader.parameters(4, 6).tolist() == [4.0, 5.0]
        assert reader.buffers(1, 4).tolist() == [1.5, 2.5, 7.0]
        assert reader.parameter_bytes(2, 6) == VECTORS.parameters.astype("<f4").tobytes()[2:8]
        assert reader.buffer_bytes(0, 32) == VECTORS.buffers.astype("<f8").tobytes()
        vectors = reader.vectors()
        assert vectors.digest() == model.digest
        np.add(vectors.parameters, 1, out=vectors.parameters)
        assert vectors.parameters.tolist() == (VECTORS.parameters + 1).tolist()
        with pytest.raises(ValueError, match="not within"):
            reader.parameters(15, 17)


def test_values_are_aligned_to_their_size(blobs: FileBlobs, tmp_path: Path) -> None:
    for length in range(1, 9):
        schema = Schema((Entry("p" * length, (3,), "float32", "parameter"), Entry("b", (1,), "float32", "buffer")))
        model = store_model(schema, Vectors(np.ones(3, np.float32), np.ones(1)), blobs, {})
        assert (tmp_path / "blobs" / model.blob).stat().st_size % 8 == (8 + 12) % 8


@pytest.mark.parametrize(("parameters", "buffers"), [(0, 0), (3, 0), (0, 3), (TILE + 3, 2 * TILE + 1)])
def test_models_of_all_sizes_are_read_as_they_were_written(blobs: FileBlobs, parameters: int, buffers: int) -> None:
    entries = (Entry("p", (parameters,), "float32", "parameter"), Entry("b", (buffers,), "float64", "buffer"))
    vectors = Vectors(np.arange(parameters, dtype=np.float32), np.arange(buffers) / 3)
    model = store_model(Schema(entries), vectors, blobs, {})
    with blobs.reader(model.blob) as blob:
        got = ModelReader(blob).vectors()
    assert got.digest() == model.digest == vectors.digest()


def test_a_writer_takes_exactly_the_values_of_the_schema_in_order(blobs: FileBlobs) -> None:
    writer = ModelWriter(blobs.open_partial("m"), SCHEMA, {})
    with pytest.raises(ValueError, match="buffers are missing"):
        writer.write_parameters(VECTORS.parameters)
    writer.write_buffers(VECTORS.buffers[:1])
    with pytest.raises(ValueError, match="more values"):
        writer.write_buffers(VECTORS.buffers)
    writer.write_buffers(VECTORS.buffers[1:])
    writer.write_parameters(VECTORS.parameters[:10])
    with pytest.raises(ValueError, match="24 bytes are missing"):
        writer.finish()
    writer.write_parameters(VECTORS.parameters[10:])
    assert writer.finish() == VECTORS.digest()


@pytest.mark.parametrize("names", [("a", "a"), ("a", "__metadata__")])
def test_tensor_names_that_a_file_cannot_hold_are_refused(blobs: FileBlobs, names: tuple[str, str]) -> None:
    schema = Schema(tuple(Entry(name, (1,), "float32", "parameter") for name in names))
    with pytest.raises(CodecError, match="bad_schema"):
        store_model(schema, Vectors(np.ones(2, np.float32), np.empty(0)), blobs, {})
    assert blobs.partials() == []


@pytest.mark.parametrize("cut", [0, 7, 8, 40, -1])
def test_a_file_that_was_cut_short_is_not_a_model(blobs: FileBlobs, tmp_path: Path, cut: int) -> None:
    model = store_model(SCHEMA, VECTORS, blobs, {})
    path = tmp_path / "blobs" / model.blob
    path.write_bytes(path.read_bytes()[:cut])
    with blobs.reader(model.blob) as blob, pytest.raises(CodecError, match="bad_model"):
        _ = ModelReader(blob).schema
