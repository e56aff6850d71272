"""Random updates, and a log of what clients have offered to a server and what it answered."""

import random
import threading
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedring.codec import Encoding, encode
from fedring.codec.digest import name_of
from fedring.v1 import federation_pb2 as pb

Key = tuple[object, object, object]  # round, client, digest of the payload


@dataclass(frozen=True, slots=True, eq=False)
class Update:
    """One client's update."""

    values: NDArray[np.float32]  # [n]
    samples: int
    encoding: str
    payload: bytes  # the encoded values

    @property
    def digest(self) -> str:
        """The digest of the payload."""
        return name_of(self.payload)

    @property
    def packet(self) -> pb.Packet:
        """The part of an update's header that describes the payload."""
        return pb.Packet(
            vector=pb.VECTOR_PARAMETERS,
            kind=pb.KIND_DELTA,
            encoding=self.encoding,
            bytes=len(self.payload),
            num_samples=self.samples,
        )

    @property
    def large(self) -> bool:
        """Whether the payload is too large for a row of the database."""
        return len(self.payload) > 1 << 16


def random_update(seed: str, size: int, *, large: bool | None = None) -> Update:
    """Return a random update of a model of `size` parameters.

    Args:
        seed: decides the update alone.
        large: whether all values change, or one in 50; drawn by `seed` if it is None.
    """
    rng = random.Random(seed)
    noise = np.random.default_rng(rng.randrange(1 << 63))
    values = noise.standard_normal(size).astype(np.float32)
    samples = rng.randrange(1, 1000)
    if rng.random() < 0.5 if large is None else large:
        return Update(values, samples, "fp32", encode(values, Encoding("fp32")))
    kept = noise.permutation(size)[: size // 50]
    few = np.zeros_like(values)
    few[kept] = values[kept]
    return Update(few, samples, "fp32_sparse", encode(few, Encoding("fp32_sparse", keep_ratio=0.02)))


@dataclass(slots=True)
class UpdateLog:
    """All updates that clients have offered, and the answers; each client writes to it from a thread of its own."""

    seed: int
    offered: dict[Key, Update] = field(default_factory=dict)
    confirmed: dict[tuple[object, object], str] = field(default_factory=dict)  # accepted digest by round and client
    refused: set[Key] = field(default_factory=set)  # for good: the client does not try again
    surprises: list[str] = field(default_factory=list)  # answers that no kill explains
    repeated: int = 0  # confirmations that the server marked as `already`
    lock: threading.Lock = field(default_factory=threading.Lock)

    def confirm(self, number: int, client: str, digest: str, *, already: bool) -> None:
        """Log that the server told the client that this update is accepted."""
        with self.lock:
            self.repeated += already
            if self.confirmed.setdefault((number, client), digest) != digest:
                self.surprises.append(f"two updates of {client} were accepted for round {number}")

    def summary(self) -> str:
        """Return the counts as a sentence."""
        large = sum(self.offered[*key, digest].large for key, digest in self.confirmed.items())
        return f"{len(self.confirmed)} confirmed ({large} large, {self.repeated} repeated), {len(self.refused)} refused"
