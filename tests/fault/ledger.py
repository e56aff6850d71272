"""What clients have offered to a server, and what they were told of it."""

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
    """One client's update: its values, [n], and the payload that says the same."""

    values: NDArray[np.float32]
    samples: int
    encoding: str
    payload: bytes

    @property
    def digest(self) -> str:
        """The name of the payload."""
        return name_of(self.payload)

    @property
    def packet(self) -> pb.Packet:
        """What a header says of the payload."""
        return pb.Packet(
            vector=pb.VECTOR_PARAMETERS,
            kind=pb.KIND_DELTA,
            encoding=self.encoding,
            bytes=len(self.payload),
            num_samples=self.samples,
        )

    @property
    def large(self) -> bool:
        """Whether it is too large for a row of the database."""
        return len(self.payload) > 1 << 16


def drawn(seed: str, size: int, *, large: bool | None = None) -> Update:
    """An update of a model of `size` parameters that `seed` alone decides: all values, or if not `large` a few."""
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
class Ledger:
    """What all clients together have offered and heard; they write to it from threads of their own."""

    seed: int
    offered: dict[Key, Update] = field(default_factory=dict)
    told: dict[tuple[object, object], str] = field(default_factory=dict)  # digest by round and client
    refused: set[Key] = field(default_factory=set)  # for good: the client will not ask again
    surprises: list[str] = field(default_factory=list)  # answers that no kill explains
    again: int = 0  # acceptances that were told as those of before
    lock: threading.Lock = field(default_factory=threading.Lock)

    def accepted(self, number: int, client: str, digest: str, *, already: bool) -> None:
        """The client was told that this update counts."""
        with self.lock:
            self.again += already
            if self.told.setdefault((number, client), digest) != digest:
                self.surprises.append(f"two updates of {client} were accepted for round {number}")

    def summary(self) -> str:
        """How much there was, for people."""
        large = sum(self.offered[*key, digest].large for key, digest in self.told.items())
        return f"{len(self.told)} told ({large} large, {self.again} asked again), {len(self.refused)} refused"
