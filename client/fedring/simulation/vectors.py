"""One vector for each client, such as what its updates have left out so far, in one file with a slot for each.

The file takes up the space of these clients, and the memory of none.
"""

import os
from pathlib import Path
from typing import Self

import numpy as np
from numpy.typing import NDArray

from fedring.control.failure import Failure

Vector = NDArray[np.float32]  # [num_parameters]


class ClientVectors:
    """One vector of each client. The file is deleted at the end of the `with` block.

    Args:
        path: The file to make.
        size: The number of parameters of the model.
    """

    def __init__(self, path: Path, size: int) -> None:
        self._path, self._bytes = path, 4 * size
        self._held: set[int] = set()
        self._slots: dict[int, int] = {}  # by client, in the order of their first vectors
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        self._path.unlink(missing_ok=True)

    def get(self, client: int) -> Vector | None:
        """Return the vector of a client, which must not be changed; None if it has none."""
        if client not in self._held:
            return None
        parts, start, left = [], self._slots[client] * self._bytes, self._bytes
        while left:  # the system reads at most 2 GiB at a time
            parts.append(os.pread(self._fd, left, start))
            start, left = start + len(parts[-1]), left - len(parts[-1])
        return np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), np.float32)

    def put(self, client: int, vector: Vector | None) -> None:
        """Keep the vector of a client; None = it has none.

        Raises:
            Failure: The disk refuses it.
        """
        if vector is None:
            self._held.discard(client)
            return
        start = self._slots.setdefault(client, len(self._slots)) * self._bytes
        data = np.ascontiguousarray(vector).data.cast("B")
        try:
            while data:
                written = os.pwrite(self._fd, data, start)
                data, start = data[written:], start + written
        except OSError as error:
            raise Failure(f"what clients keep cannot be written to {self._path}: {error.strerror or error}") from error
        self._held.add(client)
