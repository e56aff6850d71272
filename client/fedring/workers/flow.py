"""The epochs of one round, trained by all members of a process group, each with its stages of the model.

Rank r is worker r modulo the pipeline's width, of pipeline r // width. All members hold the same samples, and draw the
same order: the first stage reads the inputs, and the last one the labels.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import Dataset

from fedring.pipeline.errors import noted
from fedring.pipeline.search import search_micro_batches
from fedring.pipeline.stage import Stage
from fedring.pipeline.stash import WeightStashing
from fedring.pipeline.transport import GroupTransport
from fedring.pipeline.worker import Report, Worker
from fedring.schedules.schedule import Kind
from fedring.schedules.simulation import check
from fedring.train.batches import fetch, size_of
from fedring.train.loop import Loss, OptimizerFactory, seeded
from fedring.train.pipelined import CREDITS, Pipeline
from fedring.train.plan import Plan
from fedring.train.tally import Tally, means_of_all
from fedring.workers.checkpoint import Copy, copy_out, gather, place_of
from fedring.workers.cutting import cut_model
from fedring.workers.replica import Progress, Replica, broadcast, digest_of, equal_on_all
from fedring.workers.shards import World, count_steps, epoch_order, micro_batches, shares
from fedring.workers.usage import Usage
from fedring.workers.watcher import Diverged, Watcher

log = logging.getLogger(__name__)

_MOST_SEED = (1 << 62) - 1
_CANDIDATES = (1, 2, 4, 8, 16, 32)  # micro-batches to choose from
_TURNS = 3  # steps with each of them


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """What a pipeline trains, and how; equal on all its members."""

    samples: Dataset[Any]
    plan: Plan
    table: Pipeline
    loss: Loss
    optimizer: OptimizerFactory
    device: torch.device
    trusted: Sequence[str] = ()
    counts: Sequence[int] = ()  # layers of each stage where they are to be even
    ran: Callable[[Report, int], None] = lambda report, in_flight: None  # hears of each run of the schedule


@dataclass(slots=True)
class Profile:
    """What one worker's stages did in a round."""

    stage: int = 0  # its first
    micro_batches: int = 0  # of the newest run
    in_flight: int = 0  # the most micro-batches that a stage kept activations of
    seconds: float = 0.0  # in runs of the schedule
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    update_seconds: float = 0.0
    checkpoint_seconds: float = 0.0

    @property
    def busy_seconds(self) -> float:
        """Seconds in which the worker computed."""
        return self.forward_seconds + self.backward_seconds + self.update_seconds

    @property
    def bubble_ratio(self) -> float:
        """The share of the runs' time in which it computed nothing."""
        return max(0.0, 1 - self.busy_seconds / self.seconds) if self.seconds else 0.0

    def add(self, report: Report) -> None:
        """One more run is counted."""
        self.seconds += report.seconds
        self.forward_seconds += report.seconds_of(Kind.FORWARD)
        self.backward_seconds += report.seconds_of(Kind.BACKWARD)
        self.update_seconds += report.seconds_of(Kind.UPDATE)

    @property
    def metrics(self) -> dict[str, float]:
        """All of it, by name."""
        return {
            "stage": self.stage,
            "micro_batches": self.micro_batches,
            "in_flight": self.in_flight,
            "bubble_ratio": round(self.bubble_ratio, 4),
            "forward_seconds": round(self.forward_seconds, 6),
            "backward_seconds": round(self.backward_seconds, 6),
            "update_seconds": round(self.update_seconds, 6),
            "checkpoint_seconds": round(self.checkpoint_seconds, 6),
        }


class PipelineTraining:
    """One member's part in the training; the replica is the newest checkpoint, where it begins, and where it ends."""

    def __init__(
        self, replica: Replica, course: Course, watcher: Watcher, *, profile: Profile, micro_batches: int = 0
    ) -> None:
        self.replica, self.course, self.watcher, self.profile = replica, course, watcher, profile
        self.usage = Usage()
        table, rank = course.table, dist.get_rank()
        self.micro_batches = table.micro_batches if table.micro_batches != "auto" else micro_batches  # 0 = not known
        self._place = World(rank // table.width, table.replicas)  # of its pipeline among the others
        self._index = rank % table.width
        self.steps = replica.progress.steps  # of the job, checkpoint or not
        self._tally = Tally(course.device)
        self._line, self._column = _groups(table)
        self._transport = GroupTransport(self._line, credits=CREDITS)
        self._workers: dict[int, Worker] = {}
        self._build(self._agree())

    def run(self) -> dict[str, float]:
        """The round is trained to its end, and every replica holds what came out; the means over the last epoch."""
        course, now = self.course, replace(self.replica.progress)
        seed = hash((course.plan.seed, now.steps, dist.get_rank())) >> 1 & _MOST_SEED
        with seeded(seed, course.device):
            while now.epoch < course.plan.epochs:
                self._tally.clear()
                self._epoch(now)
                now.epoch, now.taken = now.epoch + 1, 0
        if now != self.replica.progress:
            self._keep(now)
        return means_of_all(self._tally)

    def _agree(self) -> list[int]:
        """Rank 0's counts of layers, which may come from its clock, and its number of micro-batches, if it has one."""
        values = torch.tensor([self.micro_batches, *self.course.counts])
        broadcast(values, 0)
        self.micro_batches, *counts = values.tolist()
        return counts

    def _build(self, counts: Sequence[int]) -> None:
        """Every stage is cut, and this worker's own are ready to train from the checkpoint."""
        course, table, plan = self.course, self.course.table, self.course.plan
        cut = cut_model(self.replica.model, table, counts, course.trusted)
        self._places = [place_of(stage) for stage in cut]
        mine = range(self._index, table.stages, table.width)
        self._copies = {n: copy_out(cut[n], self.replica, plan, course.optimizer, course.device) for n in mine}
        self._stages = {number: self._stage(number, copy) for number, copy in self._copies.items()}
        self.profile.stage = mine[0]

    def _stage(self, number: int, copy: Copy) -> Stage:
        table = self.course.table
        dtype = getattr(torch, table.compute_dtype)
        stash = WeightStashing(
            copy.optimizer,
            bound=check(table.schedule_of(self.micro_batches or table.unit))[number].versions,
            compute_dtype=None if dtype is torch.float32 else dtype,
            loss_scale=table.loss_scale,
        )
        return Stage(
            copy.module,
            stash,
            loss=self._loss if number == table.stages - 1 else None,
            recompute=table.recompute,
            average=self._average if self._column is not None else None,
        )

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """The job's loss, and each forward's result counted: a recomputed one comes first without gradients."""
        loss = self.course.loss(outputs, labels)
        if torch.is_grad_enabled() != self.course.table.recompute:
            self._tally.add(loss, outputs, labels)
        return loss

    def _average(self, gradients: Sequence[Tensor]) -> None:
        """The gradients are the mean over the stage's replicas."""
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).cpu()
        dist.all_reduce(flat, group=self._column)
        flat.div_(self._place.size)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, mean in zip(gradients, torch.split(flat, sizes), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def _epoch(self, now: Progress) -> None:
        plan, every = self.course.plan, self.course.table.checkpoint_every
        order = epoch_order(size_of(self.course.samples), seed=plan.seed, epoch=now.epoch, wanted=plan.subset_size)
        if not self.micro_batches:
            self._search(order, now)
        while now.taken < len(order):
            self._run(order, now, self.micro_batches)
            if every and now.steps // every > self.replica.progress.steps // every:
                self._keep(now)

    def _run(self, order: Tensor, now: Progress, count: int) -> None:
        """The schedule has run once, with so many micro-batches or, at the end of the epoch, fewer."""
        self.watcher.check()
        course, table, began = self.course, self.course.table, time.perf_counter()
        interval = table.interval or count
        size = max(1, course.plan.batch_size // interval)
        steps = list(islice(shares(order, now.taken, self._place, course.plan.batch_size), max(1, count // interval)))
        cuts = [
            part for step in steps for part in micro_batches(step.indices, size=size, most=interval, unit=table.unit)
        ]
        first, last = 0 in self._stages, table.stages - 1 in self._stages
        with noted(f"in the samples of stage {0 if first else table.stages - 1}"):
            batches = list(fetch(course.samples, cuts, course.device)) if first or last else []
        sent = self.watcher.bytes_sent()
        report = self._worker(len(cuts)).run(
            [inputs for inputs, _ in batches] if first else None, [labels for _, labels in batches] if last else None
        )
        now.steps, now.round_steps, now.taken = now.steps + len(steps), now.round_steps + len(steps), steps[-1].taken
        self.steps = now.steps
        self.profile.add(report)
        self.profile.micro_batches = len(cuts)
        in_flight = max(stage.most_flying for stage in self._stages.values())
        self.profile.in_flight = max(self.profile.in_flight, in_flight)
        course.ran(report, in_flight)
        self.usage += Usage(
            steps=len(steps),
            samples=sum(len(step.indices) for step in steps),
            seconds=time.perf_counter() - began,
            bytes_sent=self.watcher.bytes_sent() - sent,
            wait_seconds=report.seconds - report.busy_seconds,
        )
        if not all(map(math.isfinite, report.losses)):
            raise Diverged(f"the loss is not finite: use a learning rate below {course.plan.lr:g}")
        self.watcher.progress((now.epoch + now.taken / len(order)) / course.plan.epochs)

    def _worker(self, count: int) -> Worker:
        if count not in self._workers:
            self._workers[count] = Worker(self._stages, self.course.table.schedule_of(count), self._transport)
        return self._workers[count]

    def _keep(self, now: Progress) -> None:
        """What the stages are now is every worker's newest checkpoint."""
        began, table, sent = time.perf_counter(), self.course.table, self.watcher.bytes_sent()
        if self._column is not None:
            digest = digest_of(parameter for copy in self._copies.values() for parameter in copy.module.parameters())
            if not equal_on_all(digest, self._column):
                raise Diverged(f"the replicas of a stage differ after step {now.steps} of the job")
        owners = [stage % table.width for stage in range(table.stages)]  # of the first pipeline
        gather(self.replica, self._places, owners, self._copies, now)
        seconds = time.perf_counter() - began
        self.profile.checkpoint_seconds += seconds
        self.usage += Usage(seconds=seconds, bytes_sent=self.watcher.bytes_sent() - sent)

    def _search(self, order: Tensor, now: Progress) -> None:
        """The number of micro-batches is found, in steps that train like any other."""
        plan, unit = self.course.plan, self.course.table.unit
        candidates = [unit * count for count in _CANDIDATES if 2 * unit * count <= plan.batch_size] or [unit]
        steps = count_steps(len(order) - now.taken, self._place.size, plan.batch_size)
        candidates = candidates[: steps // _TURNS]
        if not candidates:  # too few steps to measure anything
            self.micro_batches = unit
            return
        curve = search_micro_batches(lambda count: self._run(order, now, count), candidates, repeats=_TURNS - 1)
        self.micro_batches = curve.best
        text = ", ".join(f"{point.micro_batches}: {1e3 * point.seconds:.1f} ms" for point in curve.points)
        log.info("%d micro-batches are the fastest of %s", curve.best, text, extra={"micro_batches": curve.best})


def _groups(table: Pipeline) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """This worker's pipeline, None = all workers, and the workers with the same stages as it, None = it alone."""
    if table.replicas == 1:
        return None, None
    rank, width = dist.get_rank(), table.width
    lines = [dist.new_group(list(range(first, first + width))) for first in range(0, table.workers, width)]
    columns = [dist.new_group(list(range(index, table.workers, width))) for index in range(width)]
    line, column = lines[rank // width], columns[rank % width]
    if not isinstance(line, dist.ProcessGroup) or not isinstance(column, dist.ProcessGroup):
        raise RuntimeError("this rank is in these groups")
    return line, column
