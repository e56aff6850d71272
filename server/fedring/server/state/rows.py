"""The facts that fl-server keeps, as values.

Digests are names (fedring.codec.digest); times are wall clock, for people.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

Vector = Literal["parameters", "buffers"]
Kind = Literal["weights", "delta"]


@dataclass(frozen=True, slots=True)
class PacketSpec:
    """One encoded vector; packets of the same vector add up."""

    vector: Vector
    kind: Kind
    encoding: str  # a name of fedring.codec.encoding.NAMES, or "fp64"
    offset: int  # in the payload, bytes
    bytes: int


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job. `state` is queued, running, completed, failed or stopped."""

    job_id: int  # 0 = to be given by the store
    name: str
    spec: dict[str, Any]
    rounds: int
    created_at: float
    state: str = "queued"
    reason: str = ""
    rounds_done: int = 0  # published rounds
    idempotency_key: str | None = None  # unique


@dataclass(frozen=True, slots=True)
class RoundRow:
    """A round of a job; open until `ended_at` is set."""

    round: int  # 0 = to be given by the store
    job_id: int
    job_round: int
    phase: str
    started_at: float
    base_version: int = 0
    model_version: int = 0  # that it published; 0 = none
    reason: str = ""
    selected: tuple[str, ...] = ()
    ended_at: float | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    seconds_left: float | None = None  # until its phase ends, should the server be killed; None = all of them


@dataclass(frozen=True, slots=True)
class UpdateRow:
    """An accepted update: one per round and client."""

    round: int
    client_id: str
    digest: str  # of the payload
    name: str  # the update's: of its header and its payload's digest
    packets: tuple[PacketSpec, ...]
    num_samples: int
    total_bytes: int
    train_seconds: float
    norm: float
    accepted_at: float
    metrics: dict[str, float] = field(default_factory=dict)
    blob: str = ""  # the payload's blob, or, for a small one, empty:
    payload: bytes = b""  # it lies in the row, which costs one sync for many instead of one each
    epoch: int = 0  # in which it was accepted; its header may name another one, of before a restore


@dataclass(frozen=True, slots=True, order=True)
class LastAccepted:
    """The newest update of a client that was accepted. The order is that of acceptance, also across restores."""

    epoch: int
    round: int
    name: str


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A published model; an empty blob name means that there is no such blob."""

    version: int
    round: int  # that published it; 0 = the initial model
    digest: str  # of the model (Vectors.digest)
    blob: str  # the model file
    schema_hash: str
    parameters: int  # number of values
    bytes: int  # of the model file
    created_at: float
    base_version: int = 0  # that the delta is added to; 0 = none
    base_digest: str = ""  # the digest of that model
    delta_blob: str = ""
    delta_packets: tuple[PacketSpec, ...] = ()
    residual_blob: str = ""  # what the delta left out
    optimizer_blob: str = ""  # the server optimizer's state


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """One client's, or with an empty client_id the server's, evaluation of a model."""

    round: int
    version: int
    client_id: str
    correct: int
    total: int
    loss_sum: float


@dataclass(frozen=True, slots=True)
class EventRow:
    """Something that an operator may want to read."""

    id: int  # unique and rising
    at: float
    kind: str
    text: str
    job_id: int = 0
    round: int = 0
    client_id: str = ""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A bearer token, but for its secret."""

    token_id: str
    digest: str  # SHA-256 of the secret
    role: str
    name: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None


def lay_out(packets: Iterable[tuple[Vector, Kind, str, int]]) -> tuple[PacketSpec, ...]:
    """The packets (vector, kind, encoding, bytes), one after the other."""
    specs: list[PacketSpec] = []
    offset = 0
    for vector, kind, encoding, size in packets:
        specs.append(PacketSpec(vector, kind, encoding, offset, size))
        offset += size
    return tuple(specs)
