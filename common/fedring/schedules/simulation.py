"""The simulation of a schedule without a network: whether it ends, how long it takes, and what stages must keep."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fedring.schedules.schedule import Action, Kind, Schedule, ScheduleError


class Costs(NamedTuple):
    """How long an action of each kind takes, in any unit of time."""

    forward: float = 1.0
    backward: float = 2.0
    update: float = 0.0
    transfer: float = 0.0  # of a message to another worker


class Span(NamedTuple):
    """The time in which a worker did an action."""

    worker: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """The times of all actions."""

    spans: list[Span]  # in an order in which a single thread could do the actions
    workers: int

    @property
    def makespan(self) -> float:
        """The time at which the last action ends."""
        return max(span.end for span in self.spans)

    @property
    def bubble(self) -> float:
        """The share of the workers' time in which they are idle, 0 to 1."""
        busy = sum(span.end - span.start for span in self.spans)
        whole = self.makespan * self.workers
        return 1 - busy / whole if whole else 0.0


class Needs(NamedTuple):
    """The most that a stage keeps at a time."""

    activations: int  # micro-batches between their forward and their backward
    versions: int  # of the weights, including the newest


def check(schedule: Schedule, *, credits: int = 0, bounds: Sequence[Needs] | None = None) -> list[Needs]:
    """Check that a schedule is complete, uses each version correctly, and comes to an end.

    Args:
        schedule: The schedule.
        credits: If above 0, how many messages a stage may send to another one before the first of them is taken.
        bounds: The most that each stage may need.

    Returns:
        What each stage needs.

    Raises:
        ScheduleError: If the schedule is wrong, deadlocks, or exceeds `bounds`.
    """
    for worker, actions in enumerate(schedule.workers):
        if any(not 0 <= a.stage < schedule.stages or schedule.owner(a.stage) != worker for a in actions):
            raise ScheduleError(f"worker {worker} has an action of a stage that it does not have")
    needs = [_check_stage(stage, schedule) for stage in range(schedule.stages)]
    simulate(schedule, credits=credits)
    for stage, (need, bound) in enumerate(zip(needs, bounds or needs, strict=True)):
        if need.activations > bound.activations or need.versions > bound.versions:
            raise ScheduleError(f"stage {stage} needs {need}, which exceeds its bound {bound}")
    return needs


def simulate(schedule: Schedule, costs: Costs | None = None, *, credits: int = 0) -> Timeline:
    """Simulate a run in which every action begins as early as possible.

    Args:
        schedule: The schedule.
        costs: How long actions take.
        credits: As for check().

    Raises:
        ScheduleError: If the workers wait for each other for ever.
    """
    run = _Run(schedule, costs or Costs(), credits)
    while any(run.advance(worker) for worker in range(len(schedule.workers))):
        pass
    places = zip(run.position, schedule.workers, strict=True)
    stuck = [(w, actions[at]) for w, (at, actions) in enumerate(places) if at < len(actions)]
    if stuck or any(run.unsent):
        where = ", ".join(f"worker {w} at {action} of stage {action.stage}" for w, action in stuck)
        raise ScheduleError(f"{schedule.name} deadlocks: {where}")
    spans = sorted(run.spans, key=lambda span: span.start)  # stable, and every cause was appended before its effects
    return Timeline(spans, len(schedule.workers))


def needs_of(actions: Sequence[Action]) -> Needs:
    """Return the most activations and versions of the weights that a stage keeps while it does these actions."""
    uses = Counter(action.version for action in actions if action.kind is not Kind.UPDATE)
    in_flight = most_in_flight = newest = 0
    most_kept = 1
    for action in actions:
        if action.kind is Kind.UPDATE:
            newest = action.version
        else:
            uses[action.version] -= 1
            in_flight += 1 if action.kind is Kind.FORWARD else -1
        most_in_flight = max(most_in_flight, in_flight)
        most_kept = max(most_kept, 1 + sum(left > 0 and version < newest for version, left in uses.items()))
    return Needs(most_in_flight, most_kept)


def _check_stage(stage: int, schedule: Schedule) -> Needs:
    actions = schedule.of_stage(stage)
    forwards: dict[int, int] = {}
    backwards: dict[int, int] = {}
    newest, missing = 0, 0
    for action in actions:
        known = {Kind.FORWARD: forwards, Kind.BACKWARD: backwards}.get(action.kind)
        if known is None:
            _require(action.version == newest + 1, action, "does not make the version after the newest")
            newest, missing = action.version, 0
            continue
        _require(action.micro_batch not in known, action, "is listed twice")
        _require(action.version <= newest, action, "uses a version of the weights that does not exist yet")
        if known is backwards:
            _require(forwards.get(action.micro_batch) == action.version, action, "has no forward with the same weights")
            missing += 1
        known[action.micro_batch] = action.version
    wanted = set(range(schedule.micro_batches))
    if set(forwards) != wanted or set(backwards) != wanted or missing:
        raise ScheduleError(f"stage {stage} lacks a forward, a backward, or an update after its last backward")
    return needs_of(actions)


def _require(holds: bool, action: Action, fault: str) -> None:
    if not holds:
        raise ScheduleError(f"{action} of stage {action.stage} {fault}")


def neighbours(action: Action, schedule: Schedule) -> tuple[int | None, int | None]:
    """Return the stages that an action gets a message from and sends one to; None where there is none."""
    if action.kind is Kind.UPDATE:
        return None, None
    below = action.stage - 1 if action.stage else None
    above = action.stage + 1 if action.stage + 1 < schedule.stages else None
    return (below, above) if action.kind is Kind.FORWARD else (above, below)


Lane = tuple[Kind, int]  # the messages of one kind to one stage


@dataclass(slots=True)
class _Run:
    """Workers as sequential processes. The outcome does not depend on the order in which they advance."""

    schedule: Schedule
    costs: Costs
    credits: int
    spans: list[Span] = field(default_factory=list)
    arrived: dict[tuple[Lane, int], float] = field(default_factory=dict)  # when a lane's micro-batch has arrived
    sent: Counter[Lane] = field(default_factory=Counter)  # messages of each lane
    taken: defaultdict[Lane, list[float]] = field(default_factory=lambda: defaultdict(list))  # when each was taken
    position: list[int] = field(init=False)  # of each worker in its actions
    clock: list[float] = field(init=False)  # of each worker
    unsent: list[tuple[Lane, int] | None] = field(init=False)  # the message that each worker has yet to send

    def __post_init__(self) -> None:
        workers = len(self.schedule.workers)
        self.position, self.clock, self.unsent = [0] * workers, [0.0] * workers, [None] * workers

    def advance(self, worker: int) -> bool:
        """Let a worker do what it can, and return whether that was anything."""
        actions, before = self.schedule.workers[worker], self.position[worker]
        moved = self._send(worker)
        while self.unsent[worker] is None and self.position[worker] < len(actions):
            if not self._do(worker, actions[self.position[worker]]):
                break
            self.position[worker] += 1
            self._send(worker)
        return moved or self.position[worker] > before

    def _do(self, worker: int, action: Action) -> bool:
        source, target = neighbours(action, self.schedule)
        lane, start = (action.kind, action.stage), self.clock[worker]
        if source is not None:
            arrived = self.arrived.get((lane, action.micro_batch))
            if arrived is None:
                return False
            start = max(start, arrived)
            self.taken[lane].append(start)
        costs = {Kind.FORWARD: self.costs.forward, Kind.BACKWARD: self.costs.backward, Kind.UPDATE: self.costs.update}
        self.clock[worker] = start + costs[action.kind]
        self.spans.append(Span(worker, action, start, self.clock[worker]))
        if target is not None:
            self.unsent[worker] = (action.kind, target), action.micro_batch
        return True

    def _send(self, worker: int) -> bool:
        """Send the worker's message if there is one and its lane has a credit, and return whether it was sent."""
        unsent = self.unsent[worker]
        if unsent is None:
            return False
        lane, micro_batch = unsent
        number, remote = self.sent[lane], self.schedule.owner(lane[1]) != worker
        if remote and self.credits and number >= self.credits:
            if len(self.taken[lane]) <= number - self.credits:
                return False
            self.clock[worker] = max(self.clock[worker], self.taken[lane][number - self.credits])
        self.sent[lane] += 1
        self.arrived[lane, micro_batch] = self.clock[worker] + (self.costs.transfer if remote else 0.0)
        self.unsent[worker] = None
        return True
