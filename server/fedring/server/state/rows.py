"""The facts that fl-server keeps, as values.

Each row here is also the definition of a table: `fedring.server.state.sql.tables` makes a column of each field. Digests
are names (`fedring.codec.digest`). Times are wall-clock seconds since 1970, for people.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal

from fedring.privacy.charges import Charge, charge_of

Vector = Literal["parameters", "buffers"]
Kind = Literal["weights", "delta"]

UNCOVERED = MappingProxyType({"covered": False})
"""Marks a field that the digest of its row does not cover (`fedring.server.state.sql.sealed`)."""

KEEP_EVENTS = 10_000
"""How many of the newest events a store keeps: clients come and go, even while no round ends."""


NOT_APPROVED = "not_approved"
"""Why a round was abandoned that some clients have refused, because their sites have not approved its job yet."""


@dataclass(frozen=True, slots=True)
class MetaRow:
    """A fact about the whole database: its run, its secret, its epoch."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class PacketSpec:
    """One encoded vector in a payload.

    Packets of the same vector add up.
    """

    vector: Vector
    kind: Kind
    encoding: str  # a name of fedring.codec.encoding.NAMES, or "fp64"
    offset: int  # in the payload, bytes
    bytes: int


@dataclass(frozen=True, slots=True)
class JobRow:
    """A job. `state` is queued, running, completed, failed or stopped."""

    job_id: int  # 0 before the store has assigned it
    name: str
    spec: dict[str, Any]
    rounds: int
    created_at: float
    state: str = "queued"
    reason: str = ""
    rounds_done: int = 0  # of which a model was published
    idempotency_key: str | None = None  # unique
    start_version: int = 0  # the version that it starts from; 0 = not known yet
    residual_after: int = 0  # clients' residuals of this round and of earlier ones belong to other models
    residual_epoch: int = 0  # the epoch of that round
    place: int = 0  # in the queue: jobs begin in the order of their places, then of their ids
    signed: bytes = b""  # a serialised SignedJob, which clients are sent as it is; empty = nobody has signed the job

    @property
    def priority(self) -> int:
        """Its key `priority`; that of an older job is 0."""
        found = self.spec.get("priority", 0)
        return found if isinstance(found, int) else 0


@dataclass(frozen=True, slots=True)
class RoundRow:
    """A round of a job. It is open until `ended_at` is set."""

    round: int  # 0 before the store has assigned it
    job_id: int
    job_round: int
    phase: str
    started_at: float
    base_version: int = 0
    model_version: int = 0  # the model that it published; 0 = none
    reason: str = ""
    selected: tuple[str, ...] = ()
    ended_at: float | None = None
    stats: dict[str, Any] = field(default_factory=dict)
    # Until its phase ends, if the server is killed; None = the whole phase. It is noted every few seconds.
    seconds_left: float | None = None
    # What the job's own strategy has chosen for the round, by the job's keys; None = nothing yet, or it has failed.
    settings: dict[str, float] | None = field(default_factory=dict)
    # The places of the job's overrides that hold for each selected client, by its id, as its labels were then.
    overrides: dict[str, list[int]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UpdateRow:
    """An accepted update. There is one for each command and client."""

    round: int  # whose command it answers
    client_id: str
    digest: str  # of the payload
    name: str  # of the update: the digest of its header and of its payload's digest
    packets: tuple[PacketSpec, ...]
    num_samples: int
    total_bytes: int
    train_seconds: float
    norm: float
    accepted_at: float
    metrics: dict[str, float] = field(default_factory=dict)
    blob: str = ""  # the payload's blob; empty for a small payload
    # A small payload: in the row it needs no sync of its own. `digest` is that of its bytes.
    payload: bytes = field(default=b"", metadata=UNCOVERED)
    epoch: int = 0  # in which it was accepted; its header may name one from before a restore
    control_previous: str = ""  # the update that left the client's control variate which it has used (SCAFFOLD)
    buffer: int = 0  # the round whose model it goes into, which may be a later one; 0 is read as `round`
    staleness: int = 0  # versions that its job had published between the two

    def __post_init__(self) -> None:
        if not self.buffer:
            object.__setattr__(self, "buffer", self.round)


@dataclass(frozen=True, slots=True)
class CommandRow:
    """A command that outlives its round, until its client has answered.

    A client has one of each job at most.
    """

    job_id: int
    client_id: str
    round: int  # that was open when the command was given
    job_round: int  # its number within the job
    published: int  # models that the job had published before that round
    base_version: int  # the model that the client starts from
    until: float  # when its time is over, wall clock
    overrides: list[int]  # the places of the job's overrides that hold for the client
    command: bytes  # the TrainCmd, without its deadline


@dataclass(frozen=True, slots=True)
class ClientRow:
    """The number of a client's pruned updates, and the newest one.

    The updates were accepted.
    """

    client_id: str
    pruned_updates: int
    last_epoch: int
    last_round: int
    last_name: str


@dataclass(frozen=True, slots=True, order=True)
class LastAccepted:
    """A client's newest accepted update.

    The order is that of acceptance, also across restores.
    """

    epoch: int
    round: int
    name: str


@dataclass(frozen=True, slots=True)
class ModelRow:
    """A published model.

    An empty blob name means that there is no such blob.
    """

    version: int
    round: int  # the round that published it; 0 for the first model
    digest: str  # of the model (Vectors.digest)
    blob: str  # the model file
    schema_hash: str
    parameters: int  # number of values
    bytes: int  # of the model file
    created_at: float
    base_version: int = 0  # the model that the delta is added to; 0 = none
    base_digest: str = ""  # of that model
    delta_blob: str = ""
    delta_packets: tuple[PacketSpec, ...] = ()
    residual_blob: str = ""  # what the encoded delta left out
    optimizer_blob: str = ""  # the server optimizer's state
    job_id: int = 0  # the job that published it; 0 = not known
    metrics: dict[str, float] = field(default_factory=dict)  # named figures of its round; empty for a first model
    frozen_digest: str = ""  # of the frozen tensors that it was trained with; empty = none, or not known
    control_blob: str = ""  # the server's control variate (SCAFFOLD), a model file without buffers; empty = all zero
    control_digest: str = ""  # of its values, as of a model
    control_line: str = ""  # names the rounds that it was built up in
    spread_blob: str = ""  # how much each block of the parameters changes, and how long it waits
    transforms_blob: str = ""  # what the transforms that its job names keep (safetensors); empty = nothing

    @property
    def files(self) -> tuple[str, ...]:
        """The names of its blobs."""
        own = (self.blob, self.delta_blob, self.residual_blob, self.optimizer_blob)
        return tuple(filter(None, (*own, self.control_blob, self.spread_blob, self.transforms_blob)))


@dataclass(frozen=True, slots=True)
class EvaluationRow:
    """A client's evaluation of a model.

    The server's own has an empty client_id.
    """

    round: int
    version: int
    client_id: str
    correct: int
    total: int
    loss_sum: float
    classified: int = 0  # samples among which `correct` counts; 0 = accuracy is not defined
    metrics: dict[str, float] = field(default_factory=dict)

    @property
    def accuracy(self) -> float | None:
        """The share of correct answers; None if it is not known."""
        return self.correct / self.classified if self.classified else None

    @property
    def loss(self) -> float | None:
        """The mean loss; None without samples."""
        return self.loss_sum / self.total if self.total else None


@dataclass(frozen=True, slots=True)
class ChargeRow:
    """The charge of a round with differential privacy."""

    round: int
    job_id: int
    noise_multiplier: float
    next_clip: float  # of the job's next round
    charged_at: float
    charge: str = ""  # the text of a charge; empty = Gaussian noise of that multiplier

    @property
    def cost(self) -> Charge:
        """The cost of the round."""
        return charge_of(self.charge) if self.charge else self.noise_multiplier


@dataclass(frozen=True, slots=True)
class EventRow:
    """Something that an operator may want to read."""

    id: int  # unique and increasing
    at: float
    kind: str
    text: str
    job_id: int = 0
    round: int = 0
    client_id: str = ""


@dataclass(frozen=True, slots=True)
class TokenRow:
    """A bearer token without its secret."""

    token_id: str
    digest: str  # SHA-256 of the secret
    role: str
    name: str
    created_at: float
    expires_at: float | None = None
    revoked_at: float | None = None


class Acceptance(StrEnum):
    """The outcome of an offered update."""

    NEW = "accepted"
    ALREADY = "already_accepted"  # the same update was accepted before
    OTHER = "already_accepted_other"  # refused: another update of the client was accepted for the round


@dataclass(frozen=True, slots=True)
class Pruned:
    """The removed part of a store."""

    rows: int
    blobs: frozenset[str]  # the names of the blobs that no row names any more


def lay_out(packets: Iterable[tuple[Vector, Kind, str, int]]) -> tuple[PacketSpec, ...]:
    """Lay packets out in a payload, one after the other.

    A packet is (vector, kind, encoding, bytes).
    """
    specs: list[PacketSpec] = []
    offset = 0
    for vector, kind, encoding, size in packets:
        specs.append(PacketSpec(vector, kind, encoding, offset, size))
        offset += size
    return tuple(specs)
