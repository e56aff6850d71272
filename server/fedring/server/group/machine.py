"""A pure state machine for the workers that train together.

`apply(state, event, now)` is the only way in which a state changes. `wake_at(state, now)` says when to apply a Tick if
nothing else happens. Nothing here reads a clock, sends, or knows what is trained.

    gathering ──all are ready──► joining ──all have joined──► running ──all are done──► done
        ▲                           │                            │
        └──── next generation ──────┴──── a member is lost ──────┘          (any) ──► ended
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from math import inf
from types import MappingProxyType

MOST_FRUITLESS = 5
"""Generations in a row that may end without a single step. More would not help: what breaks them stays."""


class GroupPhase(StrEnum):
    """The phase that a generation of the group is in."""

    GATHERING = "gathering"  # its workers are getting ready
    JOINING = "joining"  # its members connect to each other
    RUNNING = "running"
    DONE = "done"  # all members hold the round's result
    ENDED = "ended"


@dataclass(frozen=True, slots=True)
class GroupRules:
    """The rules of a round's groups. Durations are in seconds."""

    target: int  # workers that a group should have
    minimum: int = 1  # workers that a group must have
    patience: float = 10.0  # time to wait for a replacement before the group goes on with fewer workers
    join_timeout: float = 30.0
    whole: bool = False  # the group cannot go on with fewer, and waits for as long as clients take to come back


@dataclass(frozen=True, slots=True)
class Worker:
    """A worker whose stream is open."""

    generation: int = 0  # the generation that it is ready for
    address: str = ""
    steps: int = 0
    samples: int = 0  # that it has found to train on; 0 = it does not say
    joined: bool = False
    digest: bytes | None = None  # of the parameters that it ended with; None = it still trains
    can_deliver: bool = True  # whether it holds the whole update


@dataclass(frozen=True, slots=True)
class GroupState:
    """The groups of one round: one generation after the other."""

    rules: GroupRules
    expected: frozenset[str]  # clients that the round waits for, present or not
    generation: int = 1
    phase: GroupPhase = GroupPhase.GATHERING
    since: float = 0.0  # when the phase began
    deadline: float = inf  # when the generation goes on without workers that are not ready
    workers: Mapping[str, Worker] = field(default_factory=lambda: MappingProxyType({}))
    members: tuple[str, ...] = ()  # by rank
    has_run: bool = False
    steps: int = -1  # steps of the job that were done when the newest group began to run
    fruitless: int = 0  # generations in a row that ended without a step
    reason: str = ""  # why the group has ended, or why the generation before this one did

    @property
    def ready(self) -> list[str]:
        """The workers that listen for this generation, sorted."""
        return sorted(name for name, worker in self.workers.items() if worker.generation == self.generation)

    @property
    def deliverer(self) -> str:
        """The member that delivers the result.

        Empty if no member that holds it is left.
        """
        here = ((name, self.workers[name]) for name in self.members if name in self.workers)
        return next((name for name, worker in here if worker.digest and worker.can_deliver), "")


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed."""


@dataclass(frozen=True, slots=True)
class Expected:
    """The round waits for these clients now."""

    clients: frozenset[str]


@dataclass(frozen=True, slots=True)
class Slow:
    """Clients take long to return, so waiting `patience` seconds is worthwhile."""

    patience: float


@dataclass(frozen=True, slots=True)
class Entered:
    """The client's stream is open.

    It knows of generations up to this one.
    """

    client: str
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Ready:
    """The worker listens at its address, with its count of steps.

    The steps are those of the job that it has done.
    """

    client: str
    generation: int
    address: str
    steps: int = 0
    samples: int = 0


@dataclass(frozen=True, slots=True)
class WorkerJoined:
    """The worker is connected to its peers."""

    client: str
    generation: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The worker has lost its peers."""

    client: str
    generation: int
    reason: str


@dataclass(frozen=True, slots=True)
class WorkerDone:
    """The worker has trained to the end of the round."""

    client: str
    generation: int
    digest: bytes
    can_deliver: bool = True


@dataclass(frozen=True, slots=True)
class WorkerLeft:
    """The client's stream has ended."""

    client: str


@dataclass(frozen=True, slots=True)
class GroupClosed:
    """The round is over; `reason` is empty if it published."""

    reason: str = ""


Event = Tick | Expected | Slow | Entered | Ready | WorkerJoined | Broken | WorkerDone | WorkerLeft | GroupClosed


def apply(state: GroupState, event: Event, now: float) -> GroupState:
    """Return the state after `event` and all its consequences.

    The event happened at `now`, in monotonic seconds.
    """
    if state.phase is GroupPhase.ENDED:
        return state
    return _settle(_take(state, event, now), now)


def wake_at(state: GroupState, now: float) -> float:
    """Return when a Tick may change the state.

    In monotonic seconds; inf means never.
    """
    times: tuple[float, ...] = ()
    match state.phase:
        case GroupPhase.GATHERING:
            times = (state.deadline, state.deadline + state.rules.join_timeout)
        case GroupPhase.JOINING:
            times = (state.since + state.rules.join_timeout,)
    return min((at for at in times if at > now), default=inf)


def _take(state: GroupState, event: Event, now: float) -> GroupState:
    match event:
        case Expected(clients):
            return replace(state, expected=clients)
        case Slow(patience):
            more = max(0.0, patience - state.rules.patience)
            rules = replace(state.rules, patience=state.rules.patience + more)
            return replace(state, rules=rules, deadline=state.deadline + more) if more else state
        case Entered(client, known):
            return _enter(state, client, known, now)
        case WorkerLeft(client):
            return _without(state, client)
        case GroupClosed(reason):
            return _end(state, reason, now)
        case Ready() | WorkerJoined() | Broken() | WorkerDone():
            current = event.generation == state.generation and event.client in state.workers
            return _hear(state, event, now) if current else state
    return state


def _enter(state: GroupState, client: str, known: int, now: float) -> GroupState:
    """Add the client as new, and forget its earlier part."""
    if client in state.members and state.phase in (GroupPhase.JOINING, GroupPhase.RUNNING):
        state = _next_generation(state, f"{client} came back", now)
    state = _with(state, client, Worker())
    # A generation that is not known here was formed before the server was restarted.
    return replace(state, generation=known + 1) if known >= state.generation and not state.members else state


def _hear(state: GroupState, event: Ready | WorkerJoined | Broken | WorkerDone, now: float) -> GroupState:
    """Return the state after a worker's message on the present generation."""
    client, worker = event.client, state.workers[event.client]
    match event:
        case Ready(_, generation, address, steps, samples) if state.phase is GroupPhase.GATHERING:
            return _with(state, client, Worker(generation, address, steps, samples))
        case _ if client not in state.members:
            return state
        case WorkerJoined() if state.phase is GroupPhase.JOINING:
            return _with(state, client, replace(worker, joined=True))
        case WorkerDone(_, _, digest, can_deliver) if state.phase is GroupPhase.RUNNING:
            return _with(state, client, replace(worker, digest=digest, can_deliver=can_deliver))
        case Broken(reason="diverged"):
            return _end(state, "diverged", now)
        case Broken(_, _, reason) if state.phase in (GroupPhase.JOINING, GroupPhase.RUNNING):
            return _next_generation(state, f"{client}: {reason}", now)
    return state


def _settle(state: GroupState, now: float) -> GroupState:
    match state.phase:
        case GroupPhase.GATHERING:
            return _settle_gathering(state, now)
        case GroupPhase.DONE:
            return (
                state if state.deliverer else _next_generation(state, "all members that hold the update are lost", now)
            )
        case GroupPhase.ENDED:
            return state
    # A group with a gap cannot finish, so the loss of any member starts the next generation.
    if lost := [name for name in state.members if name not in state.workers]:
        return _next_generation(state, f"lost {', '.join(lost)}", now)
    members = [state.workers[name] for name in state.members]
    if state.phase is GroupPhase.RUNNING:
        if not all(worker.digest is not None for worker in members):
            return state
        # All members must hold the same result, since any one of them may deliver it for all.
        equal = len({worker.digest for worker in members}) == 1
        return replace(state, phase=GroupPhase.DONE, since=now) if equal else _end(state, "diverged", now)
    if all(worker.joined for worker in members):
        steps = max(worker.steps for worker in members)
        # Progress forgives failed generations; without any, the group gives up in the end.
        fruitless = 0 if steps > state.steps else state.fruitless
        return replace(
            state, phase=GroupPhase.RUNNING, since=now, has_run=True, steps=steps, fruitless=fruitless, reason=""
        )
    if now < state.since + state.rules.join_timeout:
        return state
    late = [name for name in state.members if not state.workers[name].joined]
    for name in late:
        state = _without(state, name)
    return _next_generation(state, f"{', '.join(late)} did not join", now)


def _settle_gathering(state: GroupState, now: float) -> GroupState:
    rules = state.rules
    if len(state.ready) >= rules.target:
        return _form(state, now)
    if (
        state.deadline == inf and len(state.expected) < rules.target
    ):  # a client was lost before the first group was formed
        state = replace(state, deadline=now + rules.patience)
    # Workers that are here may still be finding out that the generation before has ended.
    slack = rules.join_timeout if len(state.ready) < len(state.workers) else 0.0
    if now < state.deadline + slack or _more_are_coming(state):
        return state
    return _form(state, now) if len(state.ready) >= rules.minimum else _end(state, "too_few_clients", now)


def _more_are_coming(state: GroupState) -> bool:
    """Return whether to wait for clients on their way.

    They may load for minutes.

    Once a group has run, those who can go on with fewer workers no longer wait in this way.
    """
    on_their_way = state.expected - set(state.ready)
    needed = not state.has_run or len(state.ready) < state.rules.minimum
    return needed and bool(on_their_way) and len(state.expected) >= state.rules.minimum


def _form(state: GroupState, now: float) -> GroupState:
    """Form the generation's group of the workers with the most steps."""
    ahead = sorted(state.ready, key=lambda name: (-state.workers[name].steps, name))
    members = tuple(sorted(ahead[: state.rules.target]))
    return replace(state, phase=GroupPhase.JOINING, since=now, members=members)


def _next_generation(state: GroupState, reason: str, now: float) -> GroupState:
    if state.fruitless == MOST_FRUITLESS:
        return _end(state, "no_group", now)
    # What the workers said of this generation no longer holds.
    workers = MappingProxyType({name: Worker() for name in state.workers})
    return replace(
        state,
        generation=state.generation + 1,
        phase=GroupPhase.GATHERING,
        since=now,
        deadline=now + state.rules.patience,
        workers=workers,
        members=(),
        fruitless=state.fruitless + 1,
        reason=reason,
    )


def _end(state: GroupState, reason: str, now: float) -> GroupState:
    return replace(state, phase=GroupPhase.ENDED, since=now, reason=reason)


def _with(state: GroupState, client: str, worker: Worker) -> GroupState:
    return replace(state, workers=MappingProxyType({**state.workers, client: worker}))


def _without(state: GroupState, client: str) -> GroupState:
    rest = {name: worker for name, worker in state.workers.items() if name != client}
    return replace(state, workers=MappingProxyType(rest))
