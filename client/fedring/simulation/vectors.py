"""The state that clients keep from round to round.

Vectors are in files with a slot for each client, and other tensors in files of their own.

They take up space on the disk, and memory only for the words by which they are known.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load, save

from fedring.client.transfer.kept import Section, Sections
from fedring.control.failure import Failure

Vector = NDArray[np.float32]  # [num_parameters]


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    """A section, in the form in which it travels between processes."""

    words: Mapping[str, str]
    vectors: Mapping[str, Vector] = field(default_factory=dict)  # all of its tensors, if each is like the parameters
    tensors: bytes = b""  # else all of them, as a safetensors file


def pack(sections: Sections, size: int) -> dict[str, Packed]:
    """Return sections in the form in which they travel.

    Args:
        sections: The sections.
        size: The number of the model's parameters.
    """
    packed = {}
    for name, section in sections.items():
        if all(each.shape == (size,) and each.dtype == torch.float32 for each in section.tensors.values()):
            packed[name] = Packed(section.words, {key: each.numpy() for key, each in section.tensors.items()})
        else:
            packed[name] = Packed(section.words, tensors=save(dict(section.tensors)))
    return packed


def unpack(packed: Mapping[str, Packed]) -> Sections:
    """Return the sections of packed ones: the inverse of `pack`.

    Their vectors must not be changed.
    """
    sections = {}
    for name, each in packed.items():
        tensors = load(each.tensors) if each.tensors else {}
        tensors |= {key: torch.from_numpy(vector) for key, vector in each.vectors.items()}
        sections[name] = Section(tensors, each.words)
    return sections


class ClientVectors:
    """One vector of each client, in one file.

    The file is deleted by `close`.

    Args:
        path: The file to make.
        size: The number of parameters of the model.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._bytes = path, 4 * size
        self._slots: dict[int, int] = {}  # by client, in the order of their first vectors
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def close(self) -> None:
        """Delete the file."""
        os.close(self._fd)
        self._path.unlink(missing_ok=True)

    def get(self, client: int) -> Vector:
        """Return the vector of a client that has one."""
        vector, start, done = np.empty(self._bytes // 4, np.float32), self._slots[client] * self._bytes, 0
        data = vector.data.cast("B")
        while done < self._bytes:  # the system reads at most 2 GiB at a time
            done += os.preadv(self._fd, [data[done:]], start + done)
        return vector

    def put(self, client: int, vector: Vector) -> None:
        """Keep the vector of a client.

        Raises:
            OSError: The disk refuses it.
        """
        start = self._slots.setdefault(client, len(self._slots)) * self._bytes
        data = np.ascontiguousarray(vector).data.cast("B")
        while data:
            written = os.pwrite(self._fd, data, start)
            data, start = data[written:], start + written


class ClientSections:
    """The sections of each client.

    All files are deleted at the end of the `with` block.

    Args:
        folder: The folder to make the files in.
        size: The number of parameters of the model.
    """

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        self._kept: dict[int, dict[str, Packed]] = {}  # by client and section, without their tensors
        self._vectors: dict[str, ClientVectors] = {}  # by section and vector

    def __enter__(self) -> Self:
        self._folder.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        for vectors in self._vectors.values():
            vectors.close()

    def get(self, client: int) -> dict[str, Packed]:
        """Return the sections of a client, with their tensors."""
        return {name: self._filled(client, name, known) for name, known in self._kept.get(client, {}).items()}

    def section(self, client: int, name: str) -> Packed | None:
        """Return one section of a client, with its tensors.

        It is None if there is none.
        """
        known = self._kept.get(client, {}).get(name)
        return None if known is None else self._filled(client, name, known)

    def put(self, client: int, sections: Mapping[str, Packed]) -> None:
        """Keep the sections of a client, and no others.

        Raises:
            Failure: The disk refuses it.
        """
        try:
            for name, section in sections.items():
                for key, vector in section.vectors.items():
                    self._vectors_of(name, key).put(client, vector)
                if section.tensors:
                    self._file(client, name).write_bytes(section.tensors)
        except OSError as error:
            text = f"what clients keep cannot be written to {self._folder}: {error.strerror or error}"
            raise Failure(text) from error
        nothing = np.empty(0, np.float32)
        self._kept[client] = {
            name: Packed(each.words, dict.fromkeys(each.vectors, nothing)) for name, each in sections.items()
        }

    def _filled(self, client: int, name: str, known: Packed) -> Packed:
        if known.vectors:
            return Packed(known.words, {key: self._vectors_of(name, key).get(client) for key in known.vectors})
        return Packed(known.words, tensors=self._file(client, name).read_bytes())

    def _vectors_of(self, section: str, key: str) -> ClientVectors:
        name = f"{section}.{key}"
        if name not in self._vectors:
            self._vectors[name] = ClientVectors(self._folder / name, self._size)
        return self._vectors[name]

    def _file(self, client: int, section: str) -> Path:
        return self._folder / f"{section}-{client}.safetensors"
