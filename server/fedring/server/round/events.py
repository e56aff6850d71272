"""Phases, states, events and effects of a round, as values.

Nothing here computes. `fedring.server.round.machine` says what follows from an event, and when.
"""

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Protocol

from fedring.server.sessions.members import Members
from fedring.train.jobs.labels import Wanted


class Phase(StrEnum):
    """The phase that a round is in."""

    WAITING = "waiting"
    TRAINING = "training"
    AGGREGATING = "aggregating"
    PUBLISHED = "published"
    ABANDONED = "abandoned"


class Presence(StrEnum):
    """The server's knowledge of a client."""

    JOINED = "joined"  # has a session, does not watch yet
    MATCHED = "watching"  # watches, and has confirmed it
    AWAY = "away"  # its stream is gone; it may come back within its grace


@dataclass(frozen=True, slots=True)
class Member:
    """A client, with the time of its last change of presence."""

    presence: Presence
    since: float  # seconds, monotonic
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    late: float | None = None  # since then it works on a round that has ended, seconds, monotonic; None = it does not
    max_jobs: int = 1  # of how many jobs it takes part in rounds at once; 0 = of none
    unapproved: frozenset[int] = frozenset()  # jobs that nobody at its site has approved yet


@dataclass(frozen=True, slots=True)
class RoundRules:
    """The rules of a round; durations are in seconds."""

    phases: tuple["PhaseStep", ...] = ()  # that it goes through; empty = those of machine.SYNCHRONOUS
    labels: Wanted = field(default_factory=lambda: MappingProxyType({}))  # of the clients that can take part
    left_out: frozenset[str] = frozenset()  # clients that can not, whatever their labels
    job_id: int = 0  # which job clients may not have approved; 0 = none is asked about
    min_clients: int = 1
    barrier: str = "matched"
    barrier_timeout: float = 600.0
    approval_timeout: float = 604_800.0  # for people at sites to approve the job
    sample_ratio: float = 1.0
    sample_clients: int = 0
    select_factor: float = 1.0  # times the clients that are needed are drawn
    min_to_aggregate: int = 1
    close_at_minimum: bool = False
    deadline: float = 600.0
    grace: float = 5.0
    stalled_after: float = 0.0  # without progress a client is stalled; 0 = never
    straggler_factor: float = 0.0  # times the median time of a delivery, after which the round ends; 0 = never
    evaluate_timeout: float = 120.0
    seed: int = 0
    buffer: int = 0  # updates that make the model of an asynchronous round, of clients that `concurrency` limits
    concurrency: int = 0
    carried: frozenset[str] = frozenset()  # clients that still work on commands of its job's earlier rounds


class Steps(Protocol):
    """Steps that a kind of round adds to its phases.

    They begin with the command and end before the model is made. What they make due is done before all else.
    """

    @property
    def ended(self) -> bool:
        """Whether the steps are over, and the model can be made."""
        ...

    def happened(self, event: object, now: float) -> "Steps":
        """Return the state after an event of their own."""
        ...

    def closed(self, delivered: frozenset[str]) -> "Steps":
        """Return the state after the round has closed.

        `delivered` are the clients whose updates it has.
        """
        ...

    def delayed(self, seconds: float) -> "Steps":
        """Return the state after a time without progress."""
        ...

    def due(self, reachable: frozenset[str], now: float) -> "Effect | None":
        """Return the effect that is due now, if there is one.

        `reachable` are the clients that can still answer.
        """
        ...

    def wake_at(self) -> float:
        """Return when `due` may change without an event.

        In monotonic seconds; inf means never.
        """
        ...


@dataclass(frozen=True, slots=True)
class Round:
    """The state of one round.

    Its sets of clients only grow, except `stalled`, and `delivered` when an update is lost again.
    """

    number: int
    rules: RoundRules
    phase: Phase
    since: float  # when the phase began
    selected: frozenset[str] = frozenset()
    delivered: frozenset[str] = frozenset()
    delivery_seconds: tuple[float, ...] = ()  # from the command to each delivery
    stalled: frozenset[str] = frozenset()  # clients that make no progress: nobody waits for them until they do
    failed: frozenset[str] = frozenset()  # clients that said they cannot train
    evaluators: frozenset[str] = frozenset()
    evaluated: frozenset[str] = frozenset()
    reason: str = ""
    steps: Steps | None = None  # those that its kind adds; None = none, or they have not begun
    held: float = 0.0  # seconds of its phase that do not count as a wait for clients


@dataclass(frozen=True, slots=True)
class RoundState:
    """All clients, and the round in progress."""

    members: Members[Member] = field(default_factory=Members)
    round: Round | None = None
    busy: frozenset[str] = frozenset()  # clients that other rounds have, or have the first claim to


@dataclass(frozen=True, slots=True)
class Joined:
    """The client has opened a session."""

    client: str
    labels: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    max_jobs: int = 1


@dataclass(frozen=True, slots=True)
class Matched:
    """The client watches, and has confirmed it."""

    client: str


@dataclass(frozen=True, slots=True)
class Left:
    """The client's stream has ended, or was silent for too long."""

    client: str


@dataclass(frozen=True, slots=True)
class LeftBehind:
    """The client still works on a round that has ended."""

    client: str


@dataclass(frozen=True, slots=True)
class Freed:
    """The client does not work on an ended round any more."""

    client: str


@dataclass(frozen=True, slots=True)
class Decided:
    """A client has named the jobs that its site has not approved."""

    client: str
    unapproved: frozenset[int]


@dataclass(frozen=True, slots=True)
class Shared:
    """Other rounds have these clients, and this one may draw the rest."""

    busy: frozenset[str]


@dataclass(frozen=True, slots=True)
class RoundOpened:
    """A round has begun to wait for clients."""

    number: int
    rules: RoundRules
    elapsed: float = 0.0  # seconds that it had waited before the server was restarted


@dataclass(frozen=True, slots=True)
class Resumed:
    """A restarted server goes on with a round.

    Its clients have `grace` seconds to come back.
    """

    round: Round
    grace: float
    elapsed: float  # seconds that its phase had taken before the restart


@dataclass(frozen=True, slots=True)
class Delayed:
    """Nobody could go on for these seconds, so they do not count."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Started:
    """The command was sent to these clients."""

    clients: frozenset[str]
    steps: Steps | None = None  # that begin with it


@dataclass(frozen=True, slots=True)
class Enlisted:
    """One more client takes part in the round."""

    client: str


@dataclass(frozen=True, slots=True)
class Held:
    """A round has waited for its turn, or for people at sites.

    These seconds do not count as a wait for clients.
    """

    seconds: float


@dataclass(frozen=True, slots=True)
class Delivered:
    """Updates of these clients were accepted together."""

    clients: Set[str]


@dataclass(frozen=True, slots=True)
class Stalled:
    """A client in session has reported no progress for too long."""

    client: str


@dataclass(frozen=True, slots=True)
class Moved:
    """The client makes progress again."""

    client: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The client's accepted update turned out to be damaged."""

    client: str


@dataclass(frozen=True, slots=True)
class Failed:
    """The client said that it cannot train in this round."""

    client: str
    round: int


@dataclass(frozen=True, slots=True)
class Stepped:
    """Something has happened in the steps that the round's kind adds."""

    event: object


@dataclass(frozen=True, slots=True)
class Closed:
    """The round takes no more updates."""


@dataclass(frozen=True, slots=True)
class Published:
    """The next model is durable; these clients are asked to evaluate it."""

    evaluators: frozenset[str]


@dataclass(frozen=True, slots=True)
class Evaluated:
    """The client has reported its evaluation."""

    client: str


@dataclass(frozen=True, slots=True)
class Abandoned:
    """The round ends without a model."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    """The round is over, with its evaluation."""


Event = (
    Joined
    | Matched
    | Left
    | LeftBehind
    | Freed
    | Decided
    | Shared
    | RoundOpened
    | Resumed
    | Delayed
    | Held
    | Started
    | Enlisted
    | Delivered
    | Stalled
    | Moved
    | Lost
    | Failed
    | Stepped
    | Closed
    | Published
    | Evaluated
    | Abandoned
    | Finished
)


@dataclass(frozen=True, slots=True)
class Start:
    """The effect that sends the command to clients, answered by Started."""

    clients: frozenset[str]


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Let the round take no more updates (Closed)."""

    stragglers: frozenset[str] = frozenset()  # clients that `straggler_factor` or `select_factor` leaves out


@dataclass(frozen=True, slots=True)
class MakeModel:
    """Make the next model of the delivered updates (Published)."""


@dataclass(frozen=True, slots=True)
class TakeStep:
    """Perform an effect of the kind's steps (Stepped)."""

    effect: object


@dataclass(frozen=True, slots=True)
class Abandon:
    """End the round without a model (Abandoned)."""

    reason: str
    why: str = ""  # a sentence, for people


@dataclass(frozen=True, slots=True)
class Finish:
    """The round is over, evaluation included (Finished)."""


Effect = Start | Aggregate | MakeModel | TakeStep | Abandon | Finish

OPEN = (Phase.WAITING, Phase.TRAINING, Phase.AGGREGATING)
"""Phases in which a round can still be abandoned."""


@dataclass(frozen=True, slots=True)
class PhaseStep:
    """One phase of a kind of round, as data."""

    phase: Phase
    ended_by: type[Event]  # begins the next phase
    limit: Callable[[RoundRules], float]  # the longest time that the phase may take, seconds
    asked: Callable[[Round], frozenset[str]]  # clients that were asked for something and have not answered
    due: Callable[[RoundState, Round, float], Effect | None]  # the effect due at a time in monotonic seconds
