"""Evidence of single updates in an fl-server's state folder.

The folder is searched for them, and compared with the true ones.
"""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import log2, sqrt
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from fedring.server.state.blob_interfaces import BlobReader

Key = tuple[int, str]
"""The number of a round, and a client's id."""

Updates = Mapping[Key, NDArray[np.float32]]
"""What clients have learned, [n]."""

_PASSAGES = 64
_PASSAGE_VALUES = 4
_ALL = 1_000_000
_CHANCE = 6.0
"""A correlation of unrelated values is this many times its standard deviation 1 / sqrt(n) once in 500 million."""


@dataclass(frozen=True, slots=True, eq=False)
class Stored:
    """A stored update, as its reader would take it."""

    data: bytes  # of its values
    values: NDArray[np.int64]  # [n]


@dataclass(frozen=True, slots=True)
class Evidence:
    """The findings in a state folder."""

    files: int
    bytes: int
    model_passages: int  # of a published model that are there: this shows that the search works
    update_passages: int  # of true updates and trained parameters that are there
    searched: int  # passages of true updates and trained parameters in all
    stored: int  # updates that the folder holds and whose true values are known
    correlation: float  # the largest of a stored update with the true one, in magnitude
    chance: float  # what unrelated values may have
    entropy: float  # the least of a stored update's bytes, bits per byte

    @property
    def readable(self) -> bool:
        """Whether anything says that an update can be read."""
        return bool(self.update_passages) or self.correlation > self.chance


def gather(
    folder: Path, stored: Mapping[Key, Stored], updates: Updates, trained: Updates, model: NDArray[np.float32]
) -> Evidence:
    """Search a state folder whose server has ended.

    Args:
        folder: The state folder.
        stored: The updates that it holds.
        updates: What clients have learned, as differences.
        trained: The parameters that their training ended with, for the same rounds and clients.
        model: Parameters of a model that the server has published, [n].
    """
    held = [path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()]
    wanted = [
        passage for known in (updates, trained) for key in known for passage in passages(known[key], updates[key])
    ]
    pairs = [(each, updates[key]) for key, each in stored.items() if key in updates]
    return Evidence(
        files=len(held),
        bytes=sum(map(len, held)),
        model_passages=_found(passages(model, model), held),
        update_passages=_found(wanted, held),
        searched=len(wanted),
        stored=len(pairs),
        correlation=max((abs(correlation(each.values, update)) for each, update in pairs), default=0.0),
        chance=_CHANCE / sqrt(len(model)),
        entropy=min((entropy(each.data) for each, _ in pairs), default=8.0),
    )


def passages(values: NDArray[np.float32], changed: NDArray[np.float32]) -> list[bytes]:
    """Return some passages of a vector, 16 bytes each.

    They are the bytes of neighbouring values, from all over it.

    Args:
        values: The vector, [n].
        changed: Passages in which a value of this vector is 0 are left out, [n].
    """
    starts = np.linspace(0, max(len(values) - _PASSAGE_VALUES, 0), _PASSAGES, dtype=int).tolist()
    places = [slice(start, start + _PASSAGE_VALUES) for start in sorted(set(starts))]
    return [values[place].astype("<f4").tobytes() for place in places if np.all(changed[place])]


def stored_payloads(folder: Path) -> dict[Key, bytes]:
    """Return the updates' payloads in a state folder.

    The keys are the number of the round and the client's id.
    """
    from fedring.server.state.identity import open_state  # imports the database, which other demos do not need

    store, blobs = open_state(folder, adopt=False)
    try:
        updates = [
            (round_.round, row) for round_ in store.rounds.newest(_ALL) for row in store.updates.of_round(round_.round)
        ]
        return {(at, row.client_id): row.payload or _content(blobs.reader(row.blob)) for at, row in updates}
    finally:
        store.close()
        blobs.close()


def correlation(one: NDArray[Any], other: NDArray[Any]) -> float:
    """Return Pearson's correlation of two vectors [n], -1 to 1.

    0 if one of them is constant.
    """
    one, other = one - one.mean(), other - other.mean()
    norms = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / norms if norms else 0.0


def entropy(data: bytes) -> float:
    """Return the entropy of the bytes, 0 to 8 bits per byte."""
    return -sum(count / len(data) * log2(count / len(data)) for count in Counter(data).values())


def _content(reader: "BlobReader") -> bytes:
    try:
        return reader.read(0, reader.size)
    finally:
        reader.close()


def _found(wanted: list[bytes], held: list[bytes]) -> int:
    return sum(any(passage in data for data in held) for passage in wanted)
