"""Schemas: names, shapes and dtypes of a model's tensors, in order.

A model travels as two flat vectors: all parameters as float32, and all buffers (BatchNorm's running statistics and
counts) as float64, which holds float32 and integers up to 2^53 exactly. Each tensor is laid out row by row, in the
order of the schema. protos/FORMATS.md specifies a schema's canonical JSON and its hash.
"""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np
from numpy.typing import NDArray

from fedring.codec.digest import Digest
from fedring.codec.errors import CodecError
from fedring.untrusted import parse_json

MAX_TENSORS = 100_000
MAX_ENTRIES = 1 << 40
ROLES = ("parameter", "buffer")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a model."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # torch's name without the module: "float32"
    role: str  # "parameter" or "buffer"

    @property
    def size(self) -> int:
        """The number of values."""
        return prod(self.shape)


@dataclass(frozen=True)
class Schema:
    """A model's tensors in their order.

    Two models fit each other exactly if the hashes of their schemas are equal.
    """

    entries: tuple[Entry, ...]

    @cached_property
    def json(self) -> bytes:
        """The canonical JSON."""
        rows = [[e.name, list(e.shape), e.dtype, e.role] for e in self.entries]
        return json.dumps(rows, separators=(",", ":"), ensure_ascii=True).encode()

    @cached_property
    def hash(self) -> bytes:
        """SHA-256 of the canonical JSON, 32 bytes."""
        return hashlib.sha256(self.json).digest()

    @cached_property
    def names(self) -> frozenset[str]:
        """The names of all tensors."""
        return frozenset(entry.name for entry in self.entries)

    @cached_property
    def num_parameters(self) -> int:
        """The length of the parameter vector."""
        return sum(e.size for e in self.entries if e.role == "parameter")

    @cached_property
    def num_buffers(self) -> int:
        """The length of the buffer vector."""
        return sum(e.size for e in self.entries if e.role == "buffer")

    @cached_property
    def without_buffers(self) -> "Schema":
        """The schema of the parameters alone."""
        return Schema(tuple(entry for entry in self.entries if entry.role == "parameter"))

    def spans(self, role: str) -> Iterator[tuple[Entry, slice]]:
        """Yield each tensor of a role, with its place in the vector.

        Args:
            role: "parameter" or "buffer".
        """
        return iter(self._spans[role])

    @cached_property
    def _spans(self) -> dict[str, list[tuple[Entry, slice]]]:
        spans: dict[str, list[tuple[Entry, slice]]] = {role: [] for role in ROLES}
        ends: dict[str, int] = dict.fromkeys(ROLES, 0)
        for entry in self.entries:
            start = ends[entry.role]
            ends[entry.role] = start + entry.size
            spans[entry.role].append((entry, slice(start, ends[entry.role])))
        return spans

    def difference(self, other: "Schema") -> str:
        """Return one clause that names the first difference, or "".

        Args:
            other: The schema that was found where this one is expected.
        """
        for entry, its in zip(self.entries, other.entries, strict=False):
            if entry != its:
                return f"expected {_describe(entry)}, got {_describe(its)}"
        if len(self.entries) != len(other.entries):
            mine, theirs = len(self.entries), len(other.entries)
            odd = f"without {self.entries[theirs].name}" if theirs < mine else f"with {other.entries[mine].name}"
            return f"expected {mine} tensors, got {theirs}, {odd}"
        return ""


@dataclass(frozen=True, slots=True, eq=False)
class Vectors:
    """The values of a model, as two flat vectors."""

    parameters: NDArray[np.float32]  # [schema.num_parameters]
    buffers: NDArray[np.float64]  # [schema.num_buffers]

    def digest(self, like: str = "blake3-") -> str:
        """Return the name of the model.

        It is the digest of both vectors' little-endian bytes, parameters first.

        Args:
            like: A name, whose algorithm is used.
        """
        digest = Digest(like)
        digest.update(np.ascontiguousarray(self.parameters, "<f4").data)
        digest.update(np.ascontiguousarray(self.buffers, "<f8").data)
        return digest.name


def parse_schema(data: bytes) -> Schema:
    """Parse the canonical JSON of a schema.

    Raises:
        CodecError: "bad_schema" if `data` is not the canonical JSON of a schema, or if it is too large.
    """
    try:
        rows = parse_json(data)
        if not isinstance(rows, list) or len(rows) > MAX_TENSORS:
            raise TypeError(f"not a list of at most MAX_TENSORS = {MAX_TENSORS} tensors")
        schema = Schema(tuple(_parse_entry(row) for row in rows))
    except (ValueError, TypeError) as error:
        raise CodecError("bad_schema", str(error)) from error
    if schema.json != data or schema.num_parameters + schema.num_buffers > MAX_ENTRIES:
        raise CodecError("bad_schema", "not canonical, or too large")
    return schema


def _parse_entry(row: object) -> Entry:
    match row:
        case [str(name), list(shape), str(dtype), str(role)] if role in ROLES:
            sizes = tuple(size for size in shape if type(size) is int and size >= 0)
            if len(sizes) == len(shape):
                return Entry(name, sizes, dtype, role)
    raise TypeError(f"not a tensor: {str(row)[:100]}")


def _describe(entry: Entry) -> str:
    return f"{entry.role} {entry.name} {entry.dtype}{list(entry.shape)}"
