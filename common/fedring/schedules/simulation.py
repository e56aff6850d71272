"""What a schedule comes to, without a network: whether it ends, how long it takes, what it has to keep."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fedring.schedules.schedule import Action, Kind, Schedule, ScheduleError


class Costs(NamedTuple):
    """How long an action of each kind takes; `transfer` is a message's way to another worker."""

    forward: float = 1.0
    backward: float = 2.0
    update: float = 0.0
    transfer: float = 0.0


class Span(NamedTuple):
    """When a worker did an action."""

    worker: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Timeline:
    """When everything happens, in an order in which one thread could do it."""

    spans: list[Span]
    workers: int

    @property
    def makespan(self) -> float:
        """When the last action ends."""
        return max(span.end for span in self.spans)

    @property
    def bubble(self) -> float:
        """The share of the workers' time in which they do nothing."""
        busy = sum(span.end - span.start for span in self.spans)
        whole = self.makespan * self.workers
        return 1 - busy / whole if whole else 0.0


class Needs(NamedTuple):
    """The most that a stage keeps at a time."""

    activations: int
    versions: int


def check(schedule: Schedule, *, credits: int = 0, bounds: Sequence[Needs] | None = None) -> list[Needs]:
    """What each stage needs; ScheduleError if the schedule is wrong, deadlocks, or exceeds `bounds`.

    With `credits`, no stage sends while as many of its messages to the same stage have not been taken.
    """
    for worker, actions in enumerate(schedule.workers):
        if any(not 0 <= a.stage < schedule.stages or schedule.owner(a.stage) != worker for a in actions):
            raise ScheduleError(f"worker {worker} acts for a stage that it does not have")
    needs = [_check_stage(stage, schedule) for stage in range(schedule.stages)]
    simulate(schedule, credits=credits)
    for stage, (need, bound) in enumerate(zip(needs, bounds or needs, strict=True)):
        if need.activations > bound.activations or need.versions > bound.versions:
            raise ScheduleError(f"stage {stage} needs {need}, more than {bound}")
    return needs


def simulate(schedule: Schedule, costs: Costs | None = None, *, credits: int = 0) -> Timeline:
    """When everything happens if every action begins as soon as it can; ScheduleError if some never can."""
    run = _Run(schedule, costs or Costs(), credits)
    while any(run.advance(worker) for worker in range(len(schedule.workers))):
        pass
    places = zip(run.position, schedule.workers, strict=True)
    stuck = [(w, actions[at]) for w, (at, actions) in enumerate(places) if at < len(actions)]
    if stuck or any(run.owed):
        where = ", ".join(f"worker {w} at {action} of stage {action.stage}" for w, action in stuck)
        raise ScheduleError(f"{schedule.name} deadlocks: {where}")
    spans = sorted(run.spans, key=lambda span: span.start)  # stable: causes were appended before their effects
    return Timeline(spans, len(schedule.workers))


def needs_of(actions: Sequence[Action]) -> Needs:
    """The most activations, and versions of weights, that a stage keeps while it does these actions."""
    uses = Counter(action.version for action in actions if action.kind is not Kind.UPDATE)
    flying = most_flying = newest = 0
    most_kept = 1
    for action in actions:
        if action.kind is Kind.UPDATE:
            newest = action.version
        else:
            uses[action.version] -= 1
            flying += 1 if action.kind is Kind.FORWARD else -1
        most_flying = max(most_flying, flying)
        most_kept = max(most_kept, 1 + sum(left > 0 and version < newest for version, left in uses.items()))
    return Needs(most_flying, most_kept)


def _check_stage(stage: int, schedule: Schedule) -> Needs:
    actions = schedule.of_stage(stage)
    forwards: dict[int, int] = {}
    backwards: dict[int, int] = {}
    newest, missing = 0, 0
    for action in actions:
        known = {Kind.FORWARD: forwards, Kind.BACKWARD: backwards}.get(action.kind)
        if known is None:
            _require(action.version == newest + 1, action, "does not make the next version")
            newest, missing = action.version, 0
            continue
        _require(action.micro_batch not in known, action, "comes twice")
        _require(action.version <= newest, action, "uses weights that do not exist yet")
        if known is backwards:
            _require(forwards.get(action.micro_batch) == action.version, action, "has no forward with its weights")
            missing += 1
        known[action.micro_batch] = action.version
    wanted = set(range(schedule.micro_batches))
    if set(forwards) != wanted or set(backwards) != wanted or missing:
        raise ScheduleError(f"stage {stage} leaves out a forward, a backward, or the update after it")
    return needs_of(actions)


def _require(true: bool, action: Action, what: str) -> None:
    if not true:
        raise ScheduleError(f"{action} of stage {action.stage} {what}")


def neighbours(action: Action, schedule: Schedule) -> tuple[int | None, int | None]:
    """The stages that an action's message comes from and goes to."""
    if action.kind is Kind.UPDATE:
        return None, None
    below = action.stage - 1 if action.stage else None
    above = action.stage + 1 if action.stage + 1 < schedule.stages else None
    return (below, above) if action.kind is Kind.FORWARD else (above, below)


Lane = tuple[Kind, int]  # the messages of a kind to a stage


@dataclass(slots=True)
class _Run:
    """Workers as sequential processes: the outcome does not depend on the order in which they advance."""

    schedule: Schedule
    costs: Costs
    credits: int
    spans: list[Span] = field(default_factory=list)
    came: dict[tuple[Lane, int], float] = field(default_factory=dict)  # when a lane's micro-batch can be taken
    sent: Counter[Lane] = field(default_factory=Counter)
    taken: defaultdict[Lane, list[float]] = field(default_factory=lambda: defaultdict(list))
    position: list[int] = field(init=False)
    clock: list[float] = field(init=False)
    owed: list[tuple[Lane, int] | None] = field(init=False)  # what a worker has still to send

    def __post_init__(self) -> None:
        workers = len(self.schedule.workers)
        self.position, self.clock, self.owed = [0] * workers, [0.0] * workers, [None] * workers

    def advance(self, worker: int) -> bool:
        """Whether the worker has done anything."""
        actions, before = self.schedule.workers[worker], self.position[worker]
        moved = self._send(worker)
        while self.owed[worker] is None and self.position[worker] < len(actions):
            if not self._do(worker, actions[self.position[worker]]):
                break
            self.position[worker] += 1
            self._send(worker)
        return moved or self.position[worker] > before

    def _do(self, worker: int, action: Action) -> bool:
        source, target = neighbours(action, self.schedule)
        lane, start = (action.kind, action.stage), self.clock[worker]
        if source is not None:
            came = self.came.get((lane, action.micro_batch))
            if came is None:
                return False
            start = max(start, came)
            self.taken[lane].append(start)
        costs = {Kind.FORWARD: self.costs.forward, Kind.BACKWARD: self.costs.backward, Kind.UPDATE: self.costs.update}
        self.clock[worker] = start + costs[action.kind]
        self.spans.append(Span(worker, action, start, self.clock[worker]))
        if target is not None:
            self.owed[worker] = (action.kind, target), action.micro_batch
        return True

    def _send(self, worker: int) -> bool:
        """Whether the worker has sent what it owed; it waits for a credit first."""
        owed = self.owed[worker]
        if owed is None:
            return False
        lane, micro_batch = owed
        number, remote = self.sent[lane], self.schedule.owner(lane[1]) != worker
        if remote and self.credits and number >= self.credits:
            if len(self.taken[lane]) <= number - self.credits:
                return False
            self.clock[worker] = max(self.clock[worker], self.taken[lane][number - self.credits])
        self.sent[lane] += 1
        self.came[lane, micro_batch] = self.clock[worker] + (self.costs.transfer if remote else 0.0)
        self.owed[worker] = None
        return True
