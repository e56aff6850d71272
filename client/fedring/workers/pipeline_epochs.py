"""The epochs of one round as a pipeline: each member of a process group trains its stages of the model.

Rank r is worker r modulo the pipeline's width, in pipeline r // width. All members hold the same samples and draw the
same order. The first stage reads the inputs, and the last stage reads the labels.
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

from fedring.pipeline.errors import add_note
from fedring.pipeline.run import Report
from fedring.pipeline.search import search_micro_batches
from fedring.pipeline.stage import Stage
from fedring.pipeline.stash import WeightStashing
from fedring.pipeline.transport import GroupTransport
from fedring.pipeline.worker import Worker
from fedring.schedules.schedule import Kind
from fedring.schedules.simulation import check
from fedring.train.batches import fetch, size_of
from fedring.train.loop import Loss, OptimizerFactory, seeded
from fedring.train.pipeline_table import CREDITS, Pipeline
from fedring.train.plan import Plan
from fedring.train.tally import Tally
from fedring.workers.checkpoint import StageCopy, copy_stage, make_checkpoint, stage_tensors
from fedring.workers.cutting import cut_model
from fedring.workers.replica import Progress, Replica, broadcast, digest_of, equal_on_all
from fedring.workers.shards import World, count_steps, epoch_order, micro_batches, shares
from fedring.workers.training import Diverged, Watcher, means_over_workers, worker_seed
from fedring.workers.usage import Usage

log = logging.getLogger(__name__)

_CANDIDATES = (1, 2, 4, 8, 16, 32)  # numbers of micro-batches that "auto" tries
_STEPS_PER_CANDIDATE = 3


@dataclass(frozen=True, slots=True, eq=False)
class PipelineSetup:
    """What a pipeline trains and how; the samples, the plan and the table are equal on all members."""

    samples: Dataset[Any]
    plan: Plan
    table: Pipeline
    loss: Loss
    optimizer: OptimizerFactory
    device: torch.device
    trusted: Sequence[str] = ()  # the modules that a job may name
    counts: Sequence[int] = ()  # the layers of each stage, as count_layers() returns them
    on_run: Callable[[Report, int], None] = lambda report, in_flight: None  # called after each run of the schedule


@dataclass(slots=True)
class PipelineProfile:
    """What one worker's stages did in a round, and how long it took."""

    stage: int = 0  # the worker's first stage
    micro_batches: int = 0  # in the newest run
    in_flight: int = 0  # the largest number of micro-batches whose activations a stage kept
    seconds: float = 0.0  # the time in runs of the schedule
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    update_seconds: float = 0.0
    checkpoint_seconds: float = 0.0

    @property
    def busy_seconds(self) -> float:
        """The seconds in which the worker computed."""
        return self.forward_seconds + self.backward_seconds + self.update_seconds

    @property
    def bubble_ratio(self) -> float:
        """The share of the runs' time in which the worker computed nothing."""
        return max(0.0, 1 - self.busy_seconds / self.seconds) if self.seconds else 0.0

    def add(self, report: Report) -> None:
        """Add the times of one more run."""
        self.seconds += report.seconds
        self.forward_seconds += report.seconds_of(Kind.FORWARD)
        self.backward_seconds += report.seconds_of(Kind.BACKWARD)
        self.update_seconds += report.seconds_of(Kind.UPDATE)

    @property
    def metrics(self) -> dict[str, float]:
        """All figures by name, as the client sends them to the server."""
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
    """One member's part in a round.

    The replica is the newest checkpoint. Training starts from it, replaces it every `checkpoint_every` steps, and
    leaves the round's result in it. In between, the stages are trained as copies.

    Attributes:
        usage: What the training has taken so far.
        micro_batches: The micro-batches of a run; 0 until "auto" has found the fastest number.
        steps: The steps of the job that are done, including those after the newest checkpoint.
    """

    def __init__(
        self,
        replica: Replica,
        setup: PipelineSetup,
        watcher: Watcher,
        *,
        profile: PipelineProfile,
        micro_batches: int = 0,
    ) -> None:
        self.replica, self.setup, self.watcher, self.profile = replica, setup, watcher, profile
        self.usage = Usage()
        table, rank = setup.table, dist.get_rank()
        self.micro_batches = table.micro_batches if table.micro_batches != "auto" else micro_batches
        self._place = World(rank // table.width, table.pipelines)  # the place of its pipeline among all pipelines
        self._index = rank % table.width
        self.steps = replica.progress.steps
        self._tally = Tally(setup.device)
        self._pipeline_group, self._stage_group = _groups(table)
        self._transport = GroupTransport(self._pipeline_group, credits=CREDITS)
        self._workers: dict[int, Worker] = {}  # by the micro-batches of a run
        self._build(self._agree_with_rank_0())

    def run(self) -> dict[str, float]:
        """Train the rest of the round, together with all other members, and leave the result in every replica.

        Returns:
            Loss and accuracy over the last epoch, as `means_over_workers` returns them.

        Raises:
            Diverged: If the loss is no longer finite, or the replicas of a stage differ.
            PipelineError: If a stage cannot go on.
        """
        setup, now = self.setup, replace(self.replica.progress)
        with seeded(worker_seed(setup.plan.seed, now.steps), setup.device):
            while now.epoch < setup.plan.epochs:
                self._tally.clear()
                self._epoch(now)
                now.epoch, now.taken = now.epoch + 1, 0
        if now != self.replica.progress:
            self._make_checkpoint(now)
        return means_over_workers(self._tally)

    def _agree_with_rank_0(self) -> list[int]:
        """Take over rank 0's number of micro-batches, and return its counts of layers, which it may have measured."""
        values = torch.tensor([self.micro_batches, *self.setup.counts])
        broadcast(values, 0)
        self.micro_batches, *counts = values.tolist()
        return counts

    def _build(self, counts: Sequence[int]) -> None:
        """Cut the model, and make this worker's own stages ready to train from the checkpoint."""
        setup, table, plan = self.setup, self.setup.table, self.setup.plan
        cut = cut_model(self.replica.model, table, counts, setup.trusted)
        self._stage_tensors = [stage_tensors(stage) for stage in cut]
        mine = range(self._index, table.stages, table.width)
        self._copies = {n: copy_stage(cut[n], self.replica, plan, setup.optimizer, setup.device) for n in mine}
        self._stages = {number: self._stage(number, copy) for number, copy in self._copies.items()}
        self.profile.stage = mine[0]

    def _stage(self, number: int, copy: StageCopy) -> Stage:
        table = self.setup.table
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
            average=self._average if self._stage_group is not None else None,
        )

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the job's loss, and count each micro-batch once: with recomputation, in its first forward only."""
        loss = self.setup.loss(outputs, labels)
        if torch.is_grad_enabled() != self.setup.table.recompute:
            self._tally.add(loss, outputs, labels)
        return loss

    def _average(self, gradients: Sequence[Tensor]) -> None:
        """Replace the gradients by their means over the replicas of the stage."""
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients]).cpu()
        dist.all_reduce(flat, group=self._stage_group)
        flat.div_(self._place.size)
        sizes = [gradient.numel() for gradient in gradients]
        for gradient, mean in zip(gradients, torch.split(flat, sizes), strict=True):
            gradient.copy_(mean.view_as(gradient))

    def _epoch(self, now: Progress) -> None:
        plan, every = self.setup.plan, self.setup.table.checkpoint_every
        order = epoch_order(size_of(self.setup.samples), seed=plan.seed, epoch=now.epoch, wanted=plan.subset_size)
        if not self.micro_batches:
            self._search(order, now)
        while now.taken < len(order):
            self._run(order, now, self.micro_batches)
            if every and now.steps // every > self.replica.progress.steps // every:
                self._make_checkpoint(now)

    def _run(self, order: Tensor, now: Progress, count: int) -> None:
        """Run the schedule once, with `count` micro-batches, or with fewer if the epoch ends before."""
        self.watcher.check()
        setup, table, began = self.setup, self.setup.table, time.perf_counter()
        interval = table.interval or count
        size = max(1, setup.plan.batch_size // interval)
        steps = list(islice(shares(order, now.taken, self._place, setup.plan.batch_size), max(1, count // interval)))
        cuts = [
            part for step in steps for part in micro_batches(step.indices, size=size, most=interval, unit=table.unit)
        ]
        first, last = 0 in self._stages, table.stages - 1 in self._stages
        with add_note(f"in the samples of stage {0 if first else table.stages - 1}"):
            batches = list(fetch(setup.samples, cuts, setup.device)) if first or last else []
        sent = self.watcher.bytes_sent()
        report = self._worker(len(cuts)).run(
            [inputs for inputs, _ in batches] if first else None, [labels for _, labels in batches] if last else None
        )
        now.steps, now.round_steps, now.taken = now.steps + len(steps), now.round_steps + len(steps), steps[-1].taken
        self.steps = now.steps
        self.profile.add(report)
        self.profile.micro_batches = len(cuts)
        in_flight = max(stage.most_in_flight for stage in self._stages.values())
        self.profile.in_flight = max(self.profile.in_flight, in_flight)
        setup.on_run(report, in_flight)
        self.usage += Usage(
            steps=len(steps),
            samples=sum(len(step.indices) for step in steps),
            seconds=time.perf_counter() - began,
            bytes_sent=self.watcher.bytes_sent() - sent,
            wait_seconds=report.seconds - report.busy_seconds,
        )
        if not all(map(math.isfinite, report.losses)):
            raise Diverged(f"the loss is not finite: use a learning rate below {setup.plan.lr:g}")
        self.watcher.progress((now.epoch + now.taken / len(order)) / setup.plan.epochs)

    def _worker(self, count: int) -> Worker:
        if count not in self._workers:
            self._workers[count] = Worker(self._stages, self.setup.table.schedule_of(count), self._transport)
        return self._workers[count]

    def _make_checkpoint(self, now: Progress) -> None:
        """Make the present stages the newest checkpoint, on every worker."""
        began, table, sent = time.perf_counter(), self.setup.table, self.watcher.bytes_sent()
        if self._stage_group is not None:
            digest = digest_of(parameter for copy in self._copies.values() for parameter in copy.module.parameters())
            if not equal_on_all(digest, self._stage_group):
                raise Diverged(f"the replicas of a stage differ after step {now.steps} of the job")
        owners = [stage % table.width for stage in range(table.stages)]  # the ranks of the first pipeline
        make_checkpoint(self.replica, self._stage_tensors, owners, self._copies, now)
        seconds = time.perf_counter() - began
        self.profile.checkpoint_seconds += seconds
        self.usage += Usage(seconds=seconds, bytes_sent=self.watcher.bytes_sent() - sent)

    def _search(self, order: Tensor, now: Progress) -> None:
        """Find the fastest number of micro-batches, in steps that train like any other."""
        plan, unit = self.setup.plan, self.setup.table.unit
        candidates = [unit * count for count in _CANDIDATES if 2 * unit * count <= plan.batch_size] or [unit]
        steps = count_steps(len(order) - now.taken, self._place.size, plan.batch_size)
        candidates = candidates[: steps // _STEPS_PER_CANDIDATE]
        if not candidates:  # the epoch has too few steps to measure anything
            self.micro_batches = unit
            return
        repeats = _STEPS_PER_CANDIDATE - 1  # after one step each that is not measured
        curve = search_micro_batches(lambda count: self._run(order, now, count), candidates, repeats=repeats)
        self.micro_batches = curve.best
        text = ", ".join(f"{point.micro_batches}: {1e3 * point.seconds:.1f} ms" for point in curve.points)
        log.info("%d micro-batches are the fastest of %s", curve.best, text, extra={"micro_batches": curve.best})


def _groups(table: Pipeline) -> tuple[dist.ProcessGroup | None, dist.ProcessGroup | None]:
    """Return the group of this worker's pipeline, and that of the workers with the same stages.

    Without replicas, both are None: the pipeline is the default group, and no other worker has the same stages.
    """
    if table.pipelines == 1:
        return None, None
    rank, width = dist.get_rank(), table.width
    # Every rank must make every group, in the same order.
    pipelines = [dist.new_group(list(range(first, first + width))) for first in range(0, table.workers, width)]
    same_stages = [dist.new_group(list(range(index, table.workers, width))) for index in range(width)]
    pipeline, stage = pipelines[rank // width], same_stages[rank % width]
    if not isinstance(pipeline, dist.ProcessGroup) or not isinstance(stage, dist.ProcessGroup):
        raise RuntimeError(f"rank {rank} is not a member of the groups that were made for it")
    return pipeline, stage
