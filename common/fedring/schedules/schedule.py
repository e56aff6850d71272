"""Schedules as plain data: the actions of each worker, in order.

An action is the forward or the backward of a micro-batch through a stage, with the version of the weights that it uses,
or an update of a stage, with the version that it makes. A run begins with version 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import pairwise
from math import lcm
from typing import NamedTuple


class ScheduleError(ValueError):
    """A schedule is impossible.

    It cannot be made, would deadlock or lose a gradient, or would need more memory than allowed.
    """


class Kind(StrEnum):
    """The kinds of actions."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"

    __hash__ = str.__hash__  # Enum's is Python code, and all messages are found by their kind


class Versions(StrEnum):
    """The weights that the forwards of an asynchronous schedule use.

    The first two are of PipeDream (Narayanan et al. 2019, section 3.3), the third is of PipeDream-2BW (Narayanan et al.
    2021, "Memory-Efficient Pipeline-Parallel DNN Training", section 3.1).
    """

    STASHED = "stashed"  # weight stashing: the newest weights of the stage
    VERTICAL = "vertical"  # vertical sync: on all stages, those that the first stage used for the micro-batch
    MACROBATCH = "macrobatch"  # 2BW: on all stages, those from before the newest complete batch; two versions suffice


class Action(NamedTuple):
    """One action of one stage."""

    kind: Kind
    stage: int
    micro_batch: int  # of an update: the last one whose gradients it uses
    version: int = 0  # of the weights that it uses; of an update: that it makes

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The actions of every worker in one run.

    Without replicas, worker w has the stages s with s modulo the number of workers = w. With replicas, the first
    workers have stage 0, the next ones stage 1, and so on; replica r of a stage does the micro-batches m with m modulo
    the number of its replicas = r.
    """

    name: str
    stages: int
    micro_batches: int  # of a run
    interval: int  # micro-batches from one update to the next
    workers: tuple[tuple[Action, ...], ...]  # the actions of each worker, in order
    versions: Versions = Versions.STASHED
    replicas: tuple[int, ...] = ()  # the number of workers of each stage; () = each stage has one

    def owner(self, stage: int, micro_batch: int) -> int:
        """Return the worker that does a micro-batch of a stage."""
        owners = self.owners(stage)
        return owners[micro_batch % len(owners)]

    def owners(self, stage: int) -> range:
        """Return the workers that have a stage, replica 0 first."""
        if not self.replicas:
            worker = stage % len(self.workers)
            return range(worker, worker + 1)
        first = sum(self.replicas[:stage])
        return range(first, first + self.replicas[stage])

    def stages_of(self, worker: int) -> list[int]:
        """Return the stages of a worker."""
        return [stage for stage in range(self.stages) if worker in self.owners(stage)]

    def micro_batches_of(self, stage: int, worker: int) -> list[int]:
        """Return the micro-batches that a worker does of a stage."""
        return [m for m in range(self.micro_batches) if self.owner(stage, m) == worker]

    def of_stage(self, stage: int, worker: int) -> list[Action]:
        """Return the actions of a worker for one stage, in order."""
        return [action for action in self.workers[worker] if action.stage == stage]


def gpipe(stages: int, micro_batches: int, *, replicas: Sequence[int] = ()) -> Schedule:
    """Return GPipe: all forwards, all backwards, then the update.

    See Huang et al. 2019, section 2.2.

    Args:
        stages: The number of stages.
        micro_batches: The number of micro-batches of a run.
        replicas: As for one_forward_one_backward().

    Raises:
        ScheduleError: If a number does not fit.
    """
    counts = _check_counts(stages, micro_batches, replicas)
    orders = [_alternate(s, micro_batches, micro_batches) for s in range(stages)]
    return _synchronous("gpipe", micro_batches, _divided(orders, counts), stages, replicas)


def one_forward_one_backward(stages: int, micro_batches: int, *, replicas: Sequence[int] = ()) -> Schedule:
    """Return 1F1B: backwards as early as possible, and one final update.

    The result is that of GPipe, with fewer activations in memory. Narayanan et al. 2021 ("Efficient Large-Scale
    Language Model Training on GPU Clusters Using Megatron-LM", section 2.2.1) call it PipeDream-Flush. With replicas,
    it is 1F1B-RR (Narayanan et al. 2019, section 3.2): the workers of a stage take its micro-batches by turns, and each
    stage keeps as many of them in flight as there are workers from this stage on.

    Args:
        stages: The number of stages.
        micro_batches: The number of micro-batches of a run.
        replicas: The number of workers of each stage; () means one for each.

    Raises:
        ScheduleError: If a number does not fit.
    """
    counts = _check_counts(stages, micro_batches, replicas)
    orders = [_alternate(s, micro_batches, sum(counts[s:]) - 1) for s in range(stages)]
    return _synchronous("1f1b", micro_batches, _divided(orders, counts), stages, replicas)


def interleaved(stages: int, micro_batches: int, *, workers: int) -> Schedule:
    """Return interleaved 1F1B, with several stages for each worker.

    So the pipeline fills earlier. The schedule is that of Narayanan et al. 2021 (Megatron-LM, as above), section 2.2.2.

    Args:
        stages: A multiple of `workers`.
        micro_batches: A multiple of `workers`.
        workers: The number of workers.

    Raises:
        ScheduleError: If a number does not fit.
    """
    _check_counts(stages, micro_batches)
    if not 1 <= workers <= stages or stages % workers:
        raise ScheduleError(f"{stages} stages cannot be divided evenly among {workers} workers")
    if micro_batches % workers:
        raise ScheduleError(
            f"{micro_batches} micro-batches must be a multiple of {workers}, the number of workers, to be interleaved"
        )
    # A group of `workers` micro-batches fills the pipeline exactly once: a rest would leave gaps in each turn.
    orders = [_interleave(w, stages, micro_batches, workers) for w in range(workers)]
    return _synchronous("interleaved_1f1b", micro_batches, orders, stages)


def pipedream(
    stages: int,
    micro_batches: int,
    *,
    warmups: Sequence[int] | None = None,
    interval: int = 0,
    versions: Versions = Versions.STASHED,
    replicas: Sequence[int] = (),
) -> Schedule:
    """Return PipeDream: 1F1B without a flush before each update.

    See Narayanan et al. 2019, sections 3.2 and 3.3. The replicas of a stage take its micro-batches by turns (1F1B-RR),
    and make each update together: a replica waits in it for the others. Each stashes the weights of its own
    micro-batches.

    Args:
        stages: The number of stages.
        micro_batches: The number of micro-batches of a run.
        warmups: How many forwards each stage does before it alternates, all of its workers together; None means one
            for each worker from this stage on but one.
        interval: The number of backwards of a stage from one update to the next, all of its workers together; 0 means
            that of default_interval().
        versions: Which weights a forward uses.
        replicas: The number of workers of each stage; () means one for each.

    Raises:
        ScheduleError: If a number does not fit, or the schedule would deadlock.
    """
    counts = _check_counts(stages, micro_batches, replicas)
    ahead = [sum(counts[s:]) - 1 for s in range(stages)] if warmups is None else list(warmups)
    every = interval or default_interval(counts, versions)
    if len(ahead) != stages or min(ahead) < 0 or every < 1:
        raise ScheduleError(
            f"warm-ups {ahead} and interval {every} do not fit {stages} stages: give one warm-up of 0 or more for each "
            "stage, and an interval of 1 or more"
        )
    if any(first < second for first, second in pairwise(ahead)):
        raise ScheduleError(
            f"warm-ups {ahead} would deadlock: a stage must not have a longer warm-up than the stage before it"
        )
    if versions is Versions.MACROBATCH and every < max(ahead):
        raise ScheduleError(
            f"macrobatch needs an interval of at least {max(ahead)}, the longest warm-up, and it is {every}"
        )
    # An update adds up gradients of all replicas, so each must have a part in every one.
    if uneven := [count for count in counts if every % count]:
        raise ScheduleError(
            f"an interval of {every} micro-batches cannot be divided evenly among {uneven[0]} workers of a stage: use "
            f"a multiple of {lcm(*counts)}"
        )
    # The orders do not depend on the versions. Add those last: vertical sync needs the whole order of the first stage.
    orders = [
        [
            _with_updates([a for a in order if a.micro_batch % count == replica], s, micro_batches, every, count=count)
            for replica in range(count)
        ]
        for s, (order, count) in enumerate(
            zip((_alternate(s, micro_batches, ahead[s]) for s in range(stages)), counts, strict=True)
        )
    ]
    used = [_newest(orders[0 if versions is Versions.VERTICAL else s]) for s in range(stages)]
    if versions is Versions.MACROBATCH:
        used = [{m: max(0, m // every - 1) for m in range(micro_batches)}] * stages
    actions = [[_versioned(action, used[s]) for action in order] for s in range(stages) for order in orders[s]]
    return Schedule("pipedream", stages, micro_batches, every, _frozen(actions), versions, tuple(replicas))


def default_interval(counts: Sequence[int], versions: Versions) -> int:
    """Return the fewest micro-batches from one update of PipeDream to the next.

    All workers of a stage have equally many of them. Under macrobatch, there are at least as many as stages, and as
    the longest warm-up.

    Args:
        counts: The number of workers of each stage.
        versions: Which weights a forward uses.
    """
    even = lcm(*counts)
    least = max(len(counts), sum(counts) - 1) if versions is Versions.MACROBATCH else 1
    return -(-least // even) * even


def forwards(schedule: Schedule, micro_batches: int) -> Schedule:
    """Return a schedule of forwards alone, for evaluation.

    It runs on the workers of another schedule, whose model it evaluates. The stages of a worker take turns, with as
    many micro-batches each as there are workers.

    Args:
        schedule: Says which worker has which stage.
        micro_batches: The number of micro-batches to evaluate.

    Raises:
        ScheduleError: If there is no micro-batch.
    """
    _check_counts(schedule.stages, micro_batches)
    workers = len(schedule.workers)
    groups = [range(first, min(first + workers, micro_batches)) for first in range(0, micro_batches, workers)]
    orders = [
        [
            Action(Kind.FORWARD, stage, m)
            for group in groups
            for stage in schedule.stages_of(worker)
            for m in group
            if schedule.owner(stage, m) == worker
        ]
        for worker in range(workers)
    ]
    made = Schedule("forwards", schedule.stages, micro_batches, micro_batches, _frozen(orders))
    return replace(made, replicas=schedule.replicas)


def make(name: str, stages: int, micro_batches: int, *, workers: int = 0, replicas: Sequence[int] = ()) -> Schedule:
    """Return the schedule called `name`, one of NAMES.

    Args:
        name: pipedream gets its default settings.
        stages: The number of stages.
        micro_batches: The number of micro-batches of a run.
        workers: The number of workers; 0 means one for each stage. Only interleaved_1f1b can have fewer than stages.
        replicas: The number of workers of each stage, not for interleaved_1f1b; () means one for each.

    Raises:
        ScheduleError: If there is no such schedule, or it cannot have these workers.
    """
    flushed = {"gpipe": gpipe, "1f1b": one_forward_one_backward}
    if replicas and (name == "interleaved_1f1b" or workers):
        raise ScheduleError(
            f"replicas={list(replicas)} do not work with {name}: stages with several workers each need the schedule "
            "gpipe, 1f1b or pipedream"
        )
    if name == "interleaved_1f1b":
        return interleaved(stages, micro_batches, workers=workers or stages)
    if workers not in (0, stages):
        raise ScheduleError(
            f"{name} has one stage per worker, but {stages} stages were given {workers} workers: use interleaved_1f1b"
        )
    if name in flushed:
        return flushed[name](stages, micro_batches, replicas=replicas)
    if name != "pipedream":
        raise ScheduleError(f"there is no schedule {name!r}: use {', '.join(NAMES)}")
    return pipedream(stages, micro_batches, replicas=replicas)


NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "pipedream")


def _check_counts(stages: int, micro_batches: int, replicas: Sequence[int] = ()) -> Sequence[int]:
    """Return the number of workers of each stage."""
    if stages < 1 or micro_batches < 1:
        raise ScheduleError(f"there must be at least one stage and one micro-batch, not {stages} and {micro_batches}")
    if replicas and (len(replicas) != stages or min(replicas) < 1):
        raise ScheduleError(
            f"replicas={list(replicas)} do not fit {stages} stages: give a number of workers, 1 or more, for each stage"
        )
    return replicas or [1] * stages


def _alternate(stage: int, micro_batches: int, warmup: int) -> list[Action]:
    """Return the actions of one stage under 1F1B.

    They are `warmup` forwards, then forwards and backwards in alternation, then the backwards that are left.
    """
    ahead = min(warmup, micro_batches)
    actions = [Action(Kind.FORWARD, stage, m) for m in range(ahead)]
    for m in range(ahead, micro_batches):
        actions += [Action(Kind.FORWARD, stage, m), Action(Kind.BACKWARD, stage, m - ahead)]
    return actions + [Action(Kind.BACKWARD, stage, m) for m in range(micro_batches - ahead, micro_batches)]


def _interleave(worker: int, stages: int, micro_batches: int, workers: int) -> list[Action]:
    """Return the actions of one worker under interleaved 1F1B.

    Its stages take `workers` micro-batches each, by turns.
    """
    chunks = stages // workers
    turns = [
        (chunk, group + m)
        for group in range(0, micro_batches, workers)
        for chunk in range(chunks)
        for m in range(workers)
    ]
    forwards = [Action(Kind.FORWARD, chunk * workers + worker, m) for chunk, m in turns]
    backwards = [Action(Kind.BACKWARD, (chunks - 1 - chunk) * workers + worker, m) for chunk, m in turns]
    ahead = min(len(turns), 2 * (workers - 1 - worker) + (chunks - 1) * workers)
    pairs = zip(forwards[ahead:], backwards, strict=False)
    return [*forwards[:ahead], *(a for pair in pairs for a in pair), *backwards[len(turns) - ahead :]]


def _divided(orders: Iterable[Sequence[Action]], replicas: Iterable[int]) -> list[list[Action]]:
    """Divide the order of each stage among its replicas."""
    return [
        [action for action in order if action.micro_batch % count == replica]
        for order, count in zip(orders, replicas, strict=True)
        for replica in range(count)
    ]


def _synchronous(
    name: str, micro_batches: int, orders: Sequence[Sequence[Action]], stages: int, replicas: Sequence[int] = ()
) -> Schedule:
    """Return the schedule with these orders, and updates at the end.

    After its order, each worker updates all its stages.
    """
    made = Schedule(name, stages, micro_batches, micro_batches, _frozen(orders), replicas=tuple(replicas))
    ends = [
        [Action(Kind.UPDATE, stage, micro_batches - 1, 1) for stage in made.stages_of(worker)]
        for worker in range(len(orders))
    ]
    return replace(made, workers=_frozen([*order, *end] for order, end in zip(orders, ends, strict=True)))


def _with_updates(
    order: Iterable[Action], stage: int, micro_batches: int, interval: int, *, count: int
) -> list[Action]:
    """Return the order of one of `count` replicas, with its updates.

    Each comes as soon as the replica has done its own micro-batches of it.
    """
    updates = [
        Action(Kind.UPDATE, stage, min(first + interval, micro_batches) - 1, first // interval + 1)
        for first in range(0, micro_batches, interval)
    ]
    actions, made = [], 0
    for action in order:
        actions.append(action)
        following = action.micro_batch + count
        while action.kind is Kind.BACKWARD and made < len(updates) and updates[made].micro_batch < following:
            actions.append(updates[made])
            made += 1
    return [*actions, *updates[made:]]


def _newest(orders: Iterable[Iterable[Action]]) -> dict[int, int]:
    """Return the newest version when the forward of each micro-batch begins.

    It is that of the replica that does the micro-batch.
    """
    newest = {}
    for order in orders:
        version = 0
        for action in order:
            if action.kind is Kind.FORWARD:
                newest[action.micro_batch] = version
            elif action.kind is Kind.UPDATE:
                version = action.version
    return newest


def _versioned(action: Action, used: dict[int, int]) -> Action:
    return action if action.kind is Kind.UPDATE else action._replace(version=used[action.micro_batch])


def _frozen(orders: Iterable[Iterable[Action]]) -> tuple[tuple[Action, ...], ...]:
    return tuple(tuple(order) for order in orders)
