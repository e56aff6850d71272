"""Schedules as plain data: what each worker does, in order.

An action is the forward or backward of a micro-batch through a stage, with the version of the weights that it uses, or
an update, with the version that it makes. Version 0 is what a run begins with.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple


class ScheduleError(ValueError):
    """A list of actions would deadlock, lose a gradient, or need more memory than it may."""


class Kind(StrEnum):
    """What an action does."""

    FORWARD = "F"
    BACKWARD = "B"
    UPDATE = "U"


class Versions(StrEnum):
    """Which weights an asynchronous forward uses (PipeDream, sec. 3.3; PipeDream-2BW, sec. 3.1)."""

    STASHED = "stashed"  # the newest of its stage
    VERTICAL = "vertical"  # the newest of the first stage when the micro-batch entered it
    MACROBATCH = "macrobatch"  # those before the newest complete batch, on every stage: two versions are enough


class Action(NamedTuple):
    """One thing that one stage does; an update's micro-batch is the last that it takes in."""

    kind: Kind
    stage: int
    micro_batch: int
    version: int = 0

    def __str__(self) -> str:
        return f"{self.kind}{self.micro_batch}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """What every worker does in one run of `micro_batches`; stage s lies on worker s modulo their number."""

    name: str
    stages: int
    micro_batches: int
    interval: int  # micro-batches of an update
    workers: tuple[tuple[Action, ...], ...]
    versions: Versions = Versions.STASHED

    def owner(self, stage: int) -> int:
        """The worker of a stage."""
        return stage % len(self.workers)

    def of_stage(self, stage: int) -> list[Action]:
        """What one stage does."""
        return [action for action in self.workers[self.owner(stage)] if action.stage == stage]


def gpipe(stages: int, micro_batches: int) -> Schedule:
    """All forwards, then all backwards, then the update (Huang et al. 2019, sec. 2.3)."""
    _check_counts(stages, micro_batches)
    warmups = [micro_batches] * stages
    return _synchronous("gpipe", micro_batches, [_alternate(s, micro_batches, warmups[s]) for s in range(stages)])


def one_forward_one_backward(stages: int, micro_batches: int) -> Schedule:
    """A backward as soon as there is one, and one update in the end: fewer activations than GPipe, the same result."""
    _check_counts(stages, micro_batches)
    orders = [_alternate(s, micro_batches, stages - 1 - s) for s in range(stages)]
    return _synchronous("1f1b", micro_batches, orders)


def interleaved(stages: int, micro_batches: int, *, workers: int) -> Schedule:
    """1F1B where each worker has several stages, and the pipeline fills sooner (Narayanan et al. 2021, sec. 2.2)."""
    _check_counts(stages, micro_batches)
    if not 1 <= workers <= stages or stages % workers:
        raise ScheduleError(f"{stages} stages do not spread evenly over {workers} workers")
    if micro_batches % workers:
        raise ScheduleError(f"interleaving needs a multiple of {workers} micro-batches, the number of workers")
    orders = [_interleave(w, stages, micro_batches, workers) for w in range(workers)]
    return _synchronous("interleaved_1f1b", micro_batches, orders, stages)


def pipedream(
    stages: int,
    micro_batches: int,
    *,
    warmups: Sequence[int] | None = None,
    interval: int = 0,
    versions: Versions = Versions.STASHED,
) -> Schedule:
    """1F1B without a flush: an update every `interval` backwards (Narayanan et al. 2019, sec. 3.2 and 3.3).

    Stage s does `warmups[s]` forwards before it alternates, by default one for each later stage; `interval` is 1 by
    default, and the number of stages under macrobatch.
    """
    _check_counts(stages, micro_batches)
    ahead = list(range(stages - 1, -1, -1) if warmups is None else warmups)
    every = interval or (stages if versions is Versions.MACROBATCH else 1)
    if len(ahead) != stages or min(ahead) < 0 or every < 1:
        raise ScheduleError(f"{stages} stages need as many warm-ups of 0 or more, and an interval of 1 or more")
    if any(first < second for first, second in pairwise(ahead)):
        raise ScheduleError(f"warm-ups {ahead} would deadlock: no stage may wait for more than the one before it gives")
    if versions is Versions.MACROBATCH and every < max(ahead):
        raise ScheduleError(f"macrobatch needs an interval of at least {max(ahead)}, the longest warm-up")
    orders = [_with_updates(_alternate(s, micro_batches, ahead[s]), micro_batches, every) for s in range(stages)]
    used = [_newest(orders[0 if versions is Versions.VERTICAL else s]) for s in range(stages)]
    if versions is Versions.MACROBATCH:
        used = [{m: max(0, m // every - 1) for m in range(micro_batches)}] * stages
    actions = [[_versioned(action, used[s]) for action in orders[s]] for s in range(stages)]
    return Schedule("pipedream", stages, micro_batches, every, _frozen(actions), versions)


def make(name: str, stages: int, micro_batches: int, *, workers: int = 0) -> Schedule:
    """The schedule of this name: gpipe, 1f1b, interleaved_1f1b (over `workers`) or pipedream."""
    if name == "interleaved_1f1b":
        return interleaved(stages, micro_batches, workers=workers or stages)
    if workers not in (0, stages):
        raise ScheduleError(f"{name} has one stage a worker; interleaved_1f1b may have more")
    makers = {"gpipe": gpipe, "1f1b": one_forward_one_backward, "pipedream": pipedream}
    if name not in makers:
        raise ScheduleError(f"there is no schedule {name!r}: use {', '.join(NAMES)}")
    return makers[name](stages, micro_batches)


NAMES = ("gpipe", "1f1b", "interleaved_1f1b", "pipedream")


def _check_counts(stages: int, micro_batches: int) -> None:
    if stages < 1 or micro_batches < 1:
        raise ScheduleError(f"{stages} stages and {micro_batches} micro-batches: give at least one of each")


def _alternate(stage: int, micro_batches: int, warmup: int) -> list[Action]:
    """`warmup` forwards, then one forward and one backward by turns, then the backwards that are left."""
    ahead = min(warmup, micro_batches)
    actions = [Action(Kind.FORWARD, stage, m) for m in range(ahead)]
    for m in range(ahead, micro_batches):
        actions += [Action(Kind.FORWARD, stage, m), Action(Kind.BACKWARD, stage, m - ahead)]
    return actions + [Action(Kind.BACKWARD, stage, m) for m in range(micro_batches - ahead, micro_batches)]


def _interleave(worker: int, stages: int, micro_batches: int, workers: int) -> list[Action]:
    """`workers` micro-batches go through each of the worker's stages in turn."""
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


def _synchronous(
    name: str, micro_batches: int, orders: Sequence[Sequence[Action]], stages: int | None = None
) -> Schedule:
    """The orders, each ended by an update of all stages of its worker."""
    count = stages or len(orders)
    ends = [
        [Action(Kind.UPDATE, s, micro_batches - 1, 1) for s in range(worker, count, len(orders))]
        for worker in range(len(orders))
    ]
    actions = [[*order, *end] for order, end in zip(orders, ends, strict=True)]
    return Schedule(name, count, micro_batches, micro_batches, _frozen(actions))


def _with_updates(order: Iterable[Action], micro_batches: int, interval: int) -> list[Action]:
    actions = []
    for action in order:
        actions.append(action)
        done = action.micro_batch + 1
        if action.kind is Kind.BACKWARD and (done % interval == 0 or done == micro_batches):
            actions.append(Action(Kind.UPDATE, action.stage, action.micro_batch, -(-done // interval)))
    return actions


def _newest(order: Iterable[Action]) -> dict[int, int]:
    """The version that is the newest when each micro-batch's forward begins."""
    version, newest = 0, {}
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
