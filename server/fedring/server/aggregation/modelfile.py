"""A model version on disk: one safetensors file.

Each flat vector is contiguous in it.

    header length u64 | header JSON, padded to 8 bytes | buffers f64 | parameters f32

Both vectors are laid out as in the schema, so that a range of them is one read. The buffers come first, because they
need the larger alignment. Parameters are stored as F32 and buffers as F64, whatever their dtypes in the schema, which
lies in the metadata.
"""

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import starmap
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fedring.codec.digest import Digest
from fedring.codec.errors import CodecError
from fedring.codec.schema import Schema, Vectors, parse_schema
from fedring.server.aggregation.walk import gather, tiles
from fedring.server.state.blob_interfaces import Partial
from fedring.untrusted import parse_json

_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8
_MAX_HEADER = 100_000_000  # the limit of the safetensors library
_METADATA = "__metadata__"


class _Bytes(Protocol):
    @property
    def size(self) -> int: ...
    def read(self, offset: int, size: int) -> bytes: ...


def model_file_header(schema: Schema, metadata: Mapping[str, str]) -> bytes:
    """Return the bytes of a model file that precede the buffers.

    Args:
        schema: what the model consists of.
        metadata: goes into the file, for people.

    Raises:
        CodecError: "bad_schema", if two tensors have one name, or there are too many.
    """
    own = {"format": "pt", "schema": schema.json.decode(), "schema_hash": schema.hash.hex()}
    rows: dict[str, Any] = {_METADATA: {**metadata, **own}} | _tensors(schema)
    if len(rows) != len(schema.entries) + 1:
        raise CodecError("bad_schema", f"two tensors have the same name, or one is named {_METADATA}")
    text = json.dumps(rows, separators=(",", ":")).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > _MAX_HEADER:
        raise CodecError(
            "bad_schema", f"the header would take {len(text)} bytes, more than {_MAX_HEADER}: use fewer tensors"
        )
    return _LENGTH.pack(len(text)) + text


_known_schema = lru_cache(maxsize=1)(parse_schema)  # all models of a job have one


class ModelWriter:
    """Writes a model into an empty partial, tile after tile.

    All buffers come first, then all parameters.

    Raises:
        CodecError: "bad_schema", if the schema does not fit into a model file.
    """

    def __init__(self, partial: Partial, schema: Schema, metadata: Mapping[str, str]) -> None:
        if partial.size:
            raise ValueError(f"the partial is not empty: it holds {partial.size} bytes")
        header = model_file_header(schema, metadata)
        self._partial = partial
        self._buffers_start = len(header)
        self._parameters_start = len(header) + 8 * schema.num_buffers
        self._end = self._parameters_start + 4 * schema.num_parameters
        self._digest = Digest()
        partial.write(header)

    def write_buffers(self, tile: NDArray[np.float64]) -> None:
        """Write the next buffers, [n]."""
        self._write(_little(tile, "<f8"), self._parameters_start)

    def write_parameters(self, tile: NDArray[np.float32]) -> None:
        """Write the next parameters, [n]."""
        if self._partial.size < self._parameters_start:
            raise ValueError("buffers are missing")
        data = _little(tile, "<f4")
        self._write(data, self._end)
        self._digest.update(data)

    def finish(self) -> str:
        """Return the model's digest (Vectors.digest) when all values have been written."""
        if self._partial.size != self._end:
            raise ValueError(f"{self._end - self._partial.size} bytes are missing")
        for start, stop in tiles(
            self._parameters_start - self._buffers_start
        ):  # the digest covers them after the parameters
            self._digest.update(self._partial.read(self._buffers_start + start, stop - start))
        return self._digest.name

    def _write(self, data: memoryview, limit: int) -> None:
        if self._partial.size + len(data) > limit:
            raise ValueError("more values than the schema has")
        self._partial.write(data)


@dataclass(frozen=True)
class ModelReader:
    """A model file, which is read by range.

    All attributes and methods raise CodecError ("bad_model") if it is not a model file, and StorageError if it cannot
    be read.
    """

    blob: _Bytes

    @cached_property
    def schema(self) -> Schema:
        """The schema of the model."""
        rows = dict(self._header)
        rows.pop(_METADATA, None)
        schema = _known_schema(self.metadata.get("schema", "").encode())
        if rows != _tensors(schema) or self._start + _data_bytes(schema) != self.blob.size:
            raise CodecError("bad_model", "the tensors in the file are not those of its schema")
        return schema

    @property
    def metadata(self) -> dict[str, str]:
        """The file's own metadata."""
        return {str(key): str(value) for key, value in self._header.get(_METADATA, {}).items()}

    def parameters(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return the parameters from `start` to `stop`, [stop - start], read-only."""
        return np.frombuffer(self.parameter_bytes(4 * start, 4 * (stop - start)), "<f4")

    def buffers(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return the buffers from `start` to `stop`, [stop - start], read-only."""
        return np.frombuffer(self.buffer_bytes(8 * start, 8 * (stop - start)), "<f8")

    def vectors(self) -> Vectors:
        """Return all values in new arrays."""
        schema = self.schema
        # The buffers come first in the file, which is read from front to back.
        buffers = gather(starmap(self.buffers, tiles(schema.num_buffers)), np.empty(schema.num_buffers, np.float64))
        count = schema.num_parameters
        return Vectors(gather(starmap(self.parameters, tiles(count)), np.empty(count, np.float32)), buffers)

    def parameter_bytes(self, offset: int, size: int) -> bytes:
        """Return `size` bytes at `offset` of the parameters, as sent.

        They are float32, little endian.
        """
        return self._range(self._start + self._middle, offset, size, 4 * self.schema.num_parameters)

    def buffer_bytes(self, offset: int, size: int) -> bytes:
        """Return `size` bytes at `offset` of the buffers, as sent.

        They are float64, little endian.
        """
        return self._range(self._start, offset, size, self._middle)

    @cached_property
    def _header(self) -> dict[str, Any]:
        return _read_header(self.blob, self._start - _LENGTH.size)

    @cached_property
    def _start(self) -> int:
        return _LENGTH.size + _header_length(self.blob)

    @cached_property
    def _middle(self) -> int:
        return 8 * self.schema.num_buffers

    def _range(self, start: int, offset: int, size: int, limit: int) -> bytes:
        if not 0 <= offset <= offset + size <= limit:
            raise ValueError(f"{size} bytes at {offset} are not within {limit}")
        return self.blob.read(start + offset, size)


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model in memory, which is read like a ModelReader."""

    schema: Schema
    values: Vectors

    def parameters(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return a range of the parameters, [stop - start], read-only.

        It is from `start` to `stop`.
        """
        return self.values.parameters[start:stop]

    def buffers(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return a range of the buffers, [stop - start], read-only.

        It is from `start` to `stop`.
        """
        return self.values.buffers[start:stop]

    def vectors(self) -> Vectors:
        """Return the values themselves, not to be written to."""
        return self.values


def _read_header(blob: _Bytes, length: int) -> dict[str, Any]:
    try:
        rows = parse_json(blob.read(_LENGTH.size, length))
    except ValueError as error:
        raise CodecError("bad_model", str(error)) from error
    if not isinstance(rows, dict) or not isinstance(rows.get(_METADATA, {}), dict):
        raise CodecError("bad_model", "the header is not an object")
    return rows


def _header_length(blob: _Bytes) -> int:
    if blob.size < _LENGTH.size:
        raise CodecError("bad_model", "no header")
    (length,) = _LENGTH.unpack(blob.read(0, _LENGTH.size))
    if length > min(_MAX_HEADER, blob.size - _LENGTH.size):
        raise CodecError("bad_model", f"a header of {length} bytes")
    return int(length)


def _tensors(schema: Schema) -> dict[str, Any]:
    rows: dict[str, Any] = {}
    places = (("buffer", "F64", 8, 0), ("parameter", "F32", 4, 8 * schema.num_buffers))
    for role, dtype, width, start in places:
        for entry, span in schema.spans(role):
            offsets = [start + width * span.start, start + width * span.stop]
            rows[entry.name] = {"dtype": dtype, "shape": list(entry.shape), "data_offsets": offsets}
    return rows


def _data_bytes(schema: Schema) -> int:
    return 8 * schema.num_buffers + 4 * schema.num_parameters


def _little(tile: NDArray[Any], dtype: str) -> memoryview:
    return np.ascontiguousarray(tile, dtype).view(np.uint8).data
