"""The simulation of a schedule without a network.

It finds whether the schedule ends, how long it takes, and how much stages must keep.
"""

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fedring.schedules.routes import Routes, chain
from fedring.schedules.schedule import Action, Kind, Schedule, ScheduleError
from fedring.schedules.traffic import Lane, Traffic


class Costs(NamedTuple):
    """The durations of actions by kind, in any unit of time."""

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
        """The idle share of the workers' time, 0 to 1."""
        busy = sum(span.end - span.start for span in self.spans)
        whole = self.makespan * self.workers
        return 1 - busy / whole if whole else 0.0


class Needs(NamedTuple):
    """The most that a worker keeps of a stage at a time."""

    activations: int  # micro-batches between their forward and their backward
    versions: int  # of the weights, including the newest


def check(
    schedule: Schedule,
    *,
    routes: Routes | None = None,
    credits: int = 0,
    bounds: Sequence[Needs] | None = None,
) -> list[Needs]:
    """Check that a schedule is complete, correct, and comes to an end.

    It is correct if each action uses the right version of the weights.

    Args:
        schedule: The schedule.
        routes: The tensors that each stage uses of others; None means a chain.
        credits: If above 0, how many messages a stage may send to the next one before the first of them is taken;
            a lane that passes by other stages has more, see Traffic.credits().
        bounds: The most that each stage may need.

    Returns:
        The needs of each stage; if it has replicas, those of the one that needs the most.

    Raises:
        ScheduleError: If the schedule is wrong, deadlocks, or exceeds `bounds`.
    """
    # Each stage on its own first: the simulation below relies on complete actions.
    for worker, actions in enumerate(schedule.workers):
        if any(not 0 <= a.stage < schedule.stages or worker not in schedule.owners(a.stage) for a in actions):
            raise ScheduleError(f"worker {worker} has an action of a stage that it does not have")
    needs = [_check_stage(stage, schedule) for stage in range(schedule.stages)]
    simulate(schedule, routes=routes, credits=credits)
    for stage, (need, bound) in enumerate(zip(needs, bounds or needs, strict=True)):
        if need.activations > bound.activations or need.versions > bound.versions:
            raise ScheduleError(f"stage {stage} needs {need}, which exceeds its bound {bound}")
    return needs


def simulate(
    schedule: Schedule, costs: Costs | None = None, *, routes: Routes | None = None, credits: int = 0
) -> Timeline:
    """Simulate a run in which every action begins as early as possible.

    Every tensor is supposed to have a gradient. A run in which some have none only has fewer messages to wait for.

    Args:
        schedule: The schedule.
        costs: How long actions take.
        routes: As for check().
        credits: As for check().

    Raises:
        ScheduleError: If the workers wait for each other for ever.
    """
    run = _Run(Traffic(schedule, routes or chain(schedule.stages)), costs or Costs(), credits)
    while run.awake:
        run.advance(run.awake.popleft())
    places = zip(run.position, schedule.workers, strict=True)
    stuck = [(w, actions[at]) for w, (at, actions) in enumerate(places) if at < len(actions)]
    if stuck or any(run.unsent):
        where = ", ".join(f"worker {w} at {action} of stage {action.stage}" for w, action in stuck)
        raise ScheduleError(f"{schedule.name} deadlocks: {where}")
    spans = sorted(run.spans, key=lambda span: span.start)  # stable, and every cause was appended before its effects
    return Timeline(spans, len(schedule.workers))


def needs_of(actions: Sequence[Action]) -> Needs:
    """Return the most that a stage keeps during these actions.

    It keeps activations and versions of the weights.
    """
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
    needs = [_check_replica(stage, worker, schedule) for worker in schedule.owners(stage)]
    return Needs(*(max(values) for values in zip(*needs, strict=True)))


def _check_replica(stage: int, worker: int, schedule: Schedule) -> Needs:
    actions = schedule.of_stage(stage, worker)
    forwards: dict[int, int] = {}
    backwards: dict[int, int] = {}
    newest, missing = 0, 0
    updates = [action.version for action in actions if action.kind is Kind.UPDATE]
    others = [a.version for a in schedule.of_stage(stage, schedule.owners(stage)[0]) if a.kind is Kind.UPDATE]
    # Replicas sum their gradients at an update, so all of them must come to the same ones.
    if updates != others:
        raise ScheduleError(f"the replicas of stage {stage} do not make the same updates")
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
    wanted = set(schedule.micro_batches_of(stage, worker))
    if set(forwards) != wanted or set(backwards) != wanted or missing:
        raise ScheduleError(f"stage {stage} lacks a forward, a backward, or an update after its last backward")
    return needs_of(actions)


def _require(holds: bool, action: Action, fault: str) -> None:
    if not holds:
        raise ScheduleError(f"{action} of stage {action.stage} {fault}")


@dataclass(slots=True)
class _Run:
    """A simulated run, with workers as sequential processes.

    The outcome does not depend on the order in which they advance.
    """

    traffic: Traffic
    costs: Costs
    credits: int
    spans: list[Span] = field(default_factory=list)
    arrived: dict[tuple[Lane, int], float] = field(default_factory=dict)  # when a lane's micro-batch has arrived
    sent: Counter[Lane] = field(default_factory=Counter)  # messages of each lane
    taken: defaultdict[Lane, list[float]] = field(default_factory=lambda: defaultdict(list))  # when each was taken
    ready: defaultdict[tuple[int, int], dict[int, float]] = field(
        default_factory=lambda: defaultdict(dict)
    )  # when each worker has come to the update of a stage to a version
    position: list[int] = field(init=False)  # of each worker in its actions
    clock: list[float] = field(init=False)  # of each worker
    unsent: list[deque[tuple[Lane, int]]] = field(init=False)  # the messages that each worker has yet to send
    awake: deque[int] = field(init=False)  # workers that may have something to do

    def __post_init__(self) -> None:
        workers = len(self.traffic.schedule.workers)
        self.position, self.clock, self.unsent = [0] * workers, [0.0] * workers, [deque() for _ in range(workers)]
        self.awake = deque(range(workers))

    def advance(self, worker: int) -> None:
        """Run a worker until it must wait.

        Workers that may have waited for it are woken.
        """
        actions = self.traffic.schedule.workers[worker]
        self._send(worker)
        while not self.unsent[worker] and self.position[worker] < len(actions):
            if not self._do(worker, actions[self.position[worker]]):
                break
            self.position[worker] += 1
            self._send(worker)

    def _do(self, worker: int, action: Action) -> bool:
        """Do an action if it can begin, and return whether it could."""
        kind, micro_batch = action.kind, action.micro_batch
        lanes = [self.traffic.lane(kind, edge, micro_batch) for edge in self.traffic.received(action)]
        if kind is Kind.UPDATE:
            causes = self._come_to_update(worker, action)
        else:
            causes = [self.arrived.get((lane, micro_batch)) for lane in lanes]
        start = self.clock[worker]
        # Nothing may change before every cause is known: a worker that cannot begin tries again later.
        for cause in causes:
            if cause is None:
                return False
            start = max(start, cause)
        for lane in lanes:
            self.taken[lane].append(start)
            self.awake.append(lane.sender)
        costs = {Kind.FORWARD: self.costs.forward, Kind.BACKWARD: self.costs.backward, Kind.UPDATE: self.costs.update}
        self.clock[worker] = start + costs[kind]
        self.spans.append(Span(worker, action, start, self.clock[worker]))
        self.unsent[worker].extend(
            (self.traffic.lane(kind, edge, micro_batch), micro_batch) for edge in self.traffic.sent(action)
        )
        return True

    def _come_to_update(self, worker: int, action: Action) -> list[float | None]:
        """Return the times at which the stage's replicas reached the update.

        A time is None for a replica that has not reached it.
        """
        ready = self.ready[action.stage, action.version]
        owners = self.traffic.schedule.owners(action.stage)
        if worker not in ready:
            ready[worker] = self.clock[worker]
            self.awake.extend(owners if len(ready) == len(owners) > 1 else ())
        return [ready.get(replica) for replica in owners]

    def _send(self, worker: int) -> None:
        """Send those of the worker's messages whose lanes have credit.

        They are sent in order.
        """
        unsent = self.unsent[worker]
        while unsent:
            lane, micro_batch = unsent[0]
            number, remote = self.sent[lane], lane.sender != lane.receiver
            most = self.traffic.credits(lane, self.credits) if remote and self.credits else number + 1
            if number >= most:
                if len(self.taken[lane]) <= number - most:
                    break
                self.clock[worker] = max(self.clock[worker], self.taken[lane][number - most])
            self.sent[lane] += 1
            self.arrived[lane, micro_batch] = self.clock[worker] + (self.costs.transfer if remote else 0.0)
            self.awake.append(lane.receiver)
            unsent.popleft()
