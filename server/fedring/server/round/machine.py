"""A round, as a pure state machine.

`apply(state, event, now)` is the only way a state changes; `due(state, now)` is
all that has become necessary; `wake_at(state, now)` is when to ask again if no
event comes. Nothing here reads a clock, sends, stores, or knows what a model is.

    waiting ──Started──► training ──Closed──► aggregating ──Published──► published ──Finished──► (none)
       └───────Abandoned─────┴──────Abandoned──────┘ ─────────────────► abandoned ───┘
"""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import ceil, inf
from types import MappingProxyType


class Phase(StrEnum):
    """Where a round is."""

    WAITING = "waiting"
    TRAINING = "training"
    AGGREGATING = "aggregating"
    PUBLISHED = "published"
    ABANDONED = "abandoned"


class Presence(StrEnum):
    """What the server knows of a client."""

    JOINED = "joined"  # has a session, does not watch yet
    MATCHED = "watching"  # watches, and has confirmed it
    AWAY = "away"  # its stream is gone; it may come back within its grace


@dataclass(frozen=True, slots=True)
class Member:
    """A client and since when it is as it is."""

    presence: Presence
    since: float  # seconds, monotonic


@dataclass(frozen=True, slots=True)
class Rules:
    """What a round obeys; durations in seconds."""

    min_clients: int = 1
    barrier: str = "matched"
    barrier_timeout: float = 600.0
    sample_ratio: float = 1.0
    sample_clients: int = 0
    min_to_aggregate: int = 1
    close_at_minimum: bool = False
    deadline: float = 600.0
    grace: float = 5.0
    evaluate_timeout: float = 120.0
    seed: int = 0

    def seconds(self, phase: Phase) -> float:
        """The longest time that a round may stay in the phase, in seconds."""
        return {Phase.WAITING: self.barrier_timeout, Phase.TRAINING: self.deadline}.get(phase, self.evaluate_timeout)


@dataclass(frozen=True, slots=True)
class Round:
    """One round; client sets only grow, but for updates that are lost again."""

    number: int
    rules: Rules
    phase: Phase
    since: float  # when the phase began
    selected: frozenset[str] = frozenset()
    delivered: frozenset[str] = frozenset()
    failed: frozenset[str] = frozenset()  # said that they cannot
    evaluators: frozenset[str] = frozenset()
    evaluated: frozenset[str] = frozenset()
    reason: str = ""


@dataclass(frozen=True, slots=True)
class State:
    """All clients, and the round in progress."""

    members: Mapping[str, Member] = field(default_factory=lambda: MappingProxyType({}))
    round: Round | None = None


@dataclass(frozen=True, slots=True)
class Joined:
    client: str


@dataclass(frozen=True, slots=True)
class Matched:
    client: str


@dataclass(frozen=True, slots=True)
class Left:
    """The client's stream ended, or was silent for too long."""

    client: str


@dataclass(frozen=True, slots=True)
class Opened:
    number: int
    rules: Rules
    elapsed: float = 0.0  # seconds that it has waited already, before a restart


@dataclass(frozen=True, slots=True)
class Resumed:
    """A restarted server goes on with a round; its clients have `grace` to come back, within what is left of it."""

    round: Round
    grace: float
    elapsed: float  # seconds that its phase has taken already, before the restart


@dataclass(frozen=True, slots=True)
class Delayed:
    """For so many seconds nobody could go on: they do not count."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Started:
    clients: frozenset[str]


@dataclass(frozen=True, slots=True)
class Enlisted:
    """One more client takes part."""

    client: str


@dataclass(frozen=True, slots=True)
class Delivered:
    client: str


@dataclass(frozen=True, slots=True)
class Lost:
    """The client's accepted update cannot be read any more."""

    client: str


@dataclass(frozen=True, slots=True)
class Failed:
    client: str
    round: int


@dataclass(frozen=True, slots=True)
class Closed:
    pass


@dataclass(frozen=True, slots=True)
class Published:
    evaluators: frozenset[str]


@dataclass(frozen=True, slots=True)
class Evaluated:
    client: str


@dataclass(frozen=True, slots=True)
class Abandoned:
    reason: str


@dataclass(frozen=True, slots=True)
class Finished:
    pass


Event = (
    Joined
    | Matched
    | Left
    | Opened
    | Resumed
    | Delayed
    | Started
    | Enlisted
    | Delivered
    | Lost
    | Failed
    | Closed
    | Published
    | Evaluated
    | Abandoned
    | Finished
)


@dataclass(frozen=True, slots=True)
class Start:
    """An effect, answered with the event in brackets: send the command to these clients (Started)."""

    clients: frozenset[str]


@dataclass(frozen=True, slots=True)
class Aggregate:
    """Close the round and make the next model of what was delivered (Closed, then Published)."""


@dataclass(frozen=True, slots=True)
class Abandon:
    """End the round without a model (Abandoned)."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """The round is over, evaluation included (Finished)."""


Effect = Start | Aggregate | Abandon | Finish

_NEXT = {
    Started: (Phase.WAITING, Phase.TRAINING),
    Closed: (Phase.TRAINING, Phase.AGGREGATING),
    Published: (Phase.AGGREGATING, Phase.PUBLISHED),
}
OPEN = (Phase.WAITING, Phase.TRAINING, Phase.AGGREGATING)
"""Phases in which a round can still be abandoned."""


class IllegalEvent(Exception):
    """The event cannot happen in this state: a fault of the server's own."""


def apply(state: State, event: Event, now: float) -> State:
    """The state after `event` at `now`."""
    match event:
        case Joined(client):
            return _member(state, client, Presence.JOINED, now)
        case Matched(client):
            return _member(state, client, Presence.MATCHED, now)
        case Left(client):
            return _left(state, client, now)
        case Opened(number, rules, elapsed):
            _require(state.round is None, event, state)
            return replace(state, round=Round(number, rules, Phase.WAITING, now - elapsed))
        case Resumed(round_, grace, elapsed):
            _require(state.round is None, event, state)
            # "away since the future" gives the clients more than the usual grace
            away = Member(Presence.AWAY, now + max(0.0, grace - round_.rules.grace))
            missing = dict.fromkeys(round_.selected | round_.evaluators, away)
            return State(MappingProxyType(missing | dict(state.members)), replace(round_, since=now - elapsed))
        case Finished():
            _require(state.round is not None and state.round.phase not in OPEN, event, state)
            here = {c: m for c, m in state.members.items() if m.presence is not Presence.AWAY}
            return State(MappingProxyType(here), None)
    if state.round is None:
        raise IllegalEvent(f"{event} without a round")
    after = _apply_to_round(state.round, event, now)
    # Who was chosen may have left in the meantime, and is forgotten.
    gone = dict.fromkeys((after.selected | after.evaluators) - state.members.keys(), Member(Presence.AWAY, now))
    return State(MappingProxyType({**gone, **state.members}) if gone else state.members, after)


def _apply_to_round(round_: Round, event: Event, now: float) -> Round:
    match event:
        case Delivered(client) if round_.phase is Phase.TRAINING and client in round_.selected:
            return replace(round_, delivered=round_.delivered | {client})
        case Enlisted(client) if round_.phase is Phase.TRAINING:
            return replace(round_, selected=round_.selected | {client})
        case Lost(client) if round_.phase is Phase.AGGREGATING:
            return replace(round_, delivered=round_.delivered - {client}, failed=round_.failed | {client})
        case Delayed(seconds):
            return replace(round_, since=round_.since + seconds)
        case Failed(client, number):
            known = number == round_.number and client in round_.selected
            return replace(round_, failed=round_.failed | {client}) if known else round_
        case Evaluated(client):
            return replace(round_, evaluated=round_.evaluated | {client} & round_.evaluators)
        case Abandoned(reason) if round_.phase in OPEN:
            return replace(round_, phase=Phase.ABANDONED, since=now, reason=reason)
    before, after = _NEXT.get(type(event), (None, Phase.WAITING))
    if round_.phase is not before:
        raise IllegalEvent(f"{event} while {round_.phase}")
    moved = replace(round_, phase=after, since=now)
    match event:
        case Started(clients):
            return replace(moved, selected=clients)
        case Published(evaluators):
            return replace(moved, evaluators=evaluators)
    return moved


def due(state: State, now: float) -> Effect | None:
    """What is to be done now; None = nothing until the next event or `wake_at`."""
    round_ = state.round
    if round_ is None or round_.phase is Phase.AGGREGATING:
        return None
    if round_.phase is Phase.WAITING:
        return _due_waiting(state, round_, now)
    if round_.phase is Phase.TRAINING:
        return _due_training(state, round_, now)
    if round_.phase is Phase.ABANDONED or not pending(state, now) or now >= deadline(round_):
        return Finish()
    return None


def _due_waiting(state: State, round_: Round, now: float) -> Effect | None:
    candidates = ready(state, round_.rules)
    needed = 1 if round_.rules.barrier == "none" else round_.rules.min_clients
    if len(candidates) >= needed:
        return Start(frozenset(sample(candidates, round_)))
    return Abandon("barrier_timeout") if now >= deadline(round_) else None


def _due_training(state: State, round_: Round, now: float) -> Effect | None:
    enough = len(round_.delivered) >= round_.rules.min_to_aggregate
    if round_.rules.close_at_minimum and enough:
        return Aggregate()
    if pending(state, now) and now < deadline(round_):
        return None
    return Aggregate() if enough else Abandon("too_few_clients")


def wake_at(state: State, now: float) -> float:
    """When `due` may change without an event, monotonic seconds; inf = never."""
    round_ = state.round
    if round_ is None or round_.phase in (Phase.AGGREGATING, Phase.ABANDONED):
        return inf
    graces = (state.members[client].since + round_.rules.grace for client in _absent(state, round_))
    return min([deadline(round_), *(at for at in graces if at > now)])


def deadline(round_: Round) -> float:
    """When the phase that the round is in ends at the latest, monotonic seconds."""
    return round_.since + round_.rules.seconds(round_.phase)


def ready(state: State, rules: Rules) -> list[str]:
    """The clients that may be selected, sorted."""
    passed = (Presence.MATCHED,) if rules.barrier == "matched" else (Presence.JOINED, Presence.MATCHED)
    return sorted(client for client, member in state.members.items() if member.presence in passed)


def sample(candidates: list[str], round_: Round) -> list[str]:
    """The clients that take part, drawn by the round's seed."""
    rules = round_.rules
    count = rules.sample_clients or ceil(rules.sample_ratio * len(candidates))
    count = max(count, rules.min_to_aggregate)
    if count >= len(candidates):
        return candidates
    return random.Random(f"{rules.seed}:{round_.number}").sample(candidates, count)


def pending(state: State, now: float) -> frozenset[str]:
    """The clients that the round still waits for: asked, not done, and not lost."""
    round_ = state.round
    if round_ is None:
        return frozenset()
    lost = {c for c in _absent(state, round_) if now >= state.members[c].since + round_.rules.grace}
    return _outstanding(round_) - lost


def _outstanding(round_: Round) -> frozenset[str]:
    if round_.phase is Phase.TRAINING:
        return round_.selected - round_.delivered - round_.failed
    return round_.evaluators - round_.evaluated if round_.phase is Phase.PUBLISHED else frozenset()


def _absent(state: State, round_: Round) -> Iterator[str]:
    return (c for c in _outstanding(round_) if state.members[c].presence is Presence.AWAY)


def _member(state: State, client: str, presence: Presence, now: float) -> State:
    return replace(state, members=MappingProxyType({**state.members, client: Member(presence, now)}))


def _left(state: State, client: str, now: float) -> State:
    """The client is away, and remembered only if the round may wait for it: clients come and go without end."""
    if client not in state.members:
        return state
    if state.round is not None and client in state.round.selected | state.round.evaluators:
        return _member(state, client, Presence.AWAY, now)
    rest = {other: member for other, member in state.members.items() if other != client}
    return replace(state, members=MappingProxyType(rest))


def _require(legal: bool, event: Event, state: State) -> None:
    if not legal:
        raise IllegalEvent(f"{event} while {state.round.phase if state.round else 'no round is open'}")
