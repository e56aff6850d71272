"""The epochs of one round as a pipeline.

Each member of a process group trains its stages of the model.

Rank r is worker r modulo the pipeline's width, in pipeline r // width. All members hold the same samples and draw the
same order. The first stage reads the inputs, and the last stage reads the labels. A member holds its own stages only.
Replicas of a stage are either in parallel pipelines, each with batches of its own, or share the micro-batches of one.
"""

import logging
import math
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedring.codec.schema import Schema
from fedring.daemon.memory import trim
from fedring.ddp.hooks.by_name import make_hook
from fedring.ddp.hooks.summing import HookedSum
from fedring.pipeline.errors import add_note
from fedring.pipeline.replicas import add_up, share_buffers
from fedring.pipeline.run import Report
from fedring.pipeline.search import search_micro_batches
from fedring.pipeline.stage import Average, Stage
from fedring.pipeline.stash import WeightStashing
from fedring.pipeline.transport import GroupTransport
from fedring.pipeline.worker import Worker
from fedring.schedules.simulation import check
from fedring.train.batches import by_name, diverged, fetch, size_of
from fedring.train.errors import TrainError
from fedring.train.evaluation import Counts
from fedring.train.jobs.pipeline_table import CREDITS, Pipeline
from fedring.train.loop import Loss, OptimizerFactory, seeded
from fedring.train.names.hooks import choose_hook
from fedring.train.names.offered import Offered
from fedring.train.plan import Plan
from fedring.train.tally import Tally
from fedring.workers.assembly import AssembledModel, agree_on_digest, assemble
from fedring.workers.exchange import gather_integers
from fedring.workers.pipeline_groups import groups_of
from fedring.workers.pipeline_profile import PipelineProfile
from fedring.workers.replica import Progress, digest_of, equal_on_all
from fedring.workers.shards import GroupRank, count_steps, epoch_order, micro_batches, shares
from fedring.workers.stage_checkpoints import Checkpoint, Layout, StageCheckpoints, share_copies
from fedring.workers.stage_state import CheckpointFacts, Sink, StagedModel, StageState, read_facts
from fedring.workers.training import Diverged, Watcher, means_over_workers, worker_seed
from fedring.workers.usage import Usage

log = logging.getLogger(__name__)

MicroBatches = list[Tensor | None]
"""The micro-batches of a run, [batch, ...] each; None for those that other workers do."""

_CANDIDATES = (1, 2, 4, 8, 16, 32)  # numbers of micro-batches that "auto" tries
_STEPS_PER_CANDIDATE = 3
_GROUP_BITS = 62  # of a group's number
_EVALUATION_BATCH = 64  # samples of a micro-batch
_EVALUATION_BATCHES = 8  # micro-batches whose outputs the last stage keeps at a time


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PipelineSetup:
    """The configuration of a pipeline's training.

    All but the device, the folder and the callbacks is equal on all members.
    """

    model: nn.Module  # without values
    base_digest: str  # the name of the model that the round starts from
    fetch: Callable[[Schema, Collection[str], Sink], None]  # passes the values of some of its tensors to a function
    checkpoints: StageCheckpoints
    update_file: Path  # where a member that can deliver the update puts it
    samples: Dataset[Any]
    plan: Plan
    table: Pipeline
    loss: Loss
    optimizer: OptimizerFactory
    device: torch.device
    offered: Offered  # the code that jobs may name here
    held_out: Dataset[Any] | None = None  # the samples to evaluate the trained model on; None = it is not evaluated
    counts: Sequence[int] = ()  # the layers of each stage, as count_layers() returns them
    on_run: Callable[[Report, int], None] = lambda report, in_flight: None  # called after each run of the schedule


class PipelineTraining:
    """One member's part in a round.

    Training starts from the newest checkpoint, or from the model that the server has published, and makes a checkpoint
    every `checkpoint_every` steps and at the end of the round.

    Attributes:
        usage: The time and bytes of the training so far.
        micro_batches: The micro-batches of a run; 0 until "auto" has found the fastest number.
        steps: The steps of the job that are done, including those after the newest checkpoint.
        samples: The samples that the stages were trained on in the round, without steps that were repeated.
        model_digest: The name of the model that was trained; empty until run() has ended.
        evaluation: This member's counts in the evaluation of the trained model; zeros without the last stage.
        update: The whole model as a file, if this member can deliver it and run() has ended.
    """

    def __init__(
        self,
        setup: PipelineSetup,
        checkpoint: Checkpoint | None,
        watcher: Watcher,
        *,
        profile: PipelineProfile,
        micro_batches: int = 0,
    ) -> None:
        """Make the stages of this member ready to train.

        Args:
            setup: The configuration of the training.
            checkpoint: The checkpoint to start from, as recover() returned it.
            watcher: Is told the progress.
            profile: Takes the figures of the training.
            micro_batches: The number that "auto" has found before; 0 = none.

        Raises:
            TrainError: With the reason other_samples, if the workers have found other numbers of samples, no_data, if
                there are none, bad_checkpoint, if the checkpoint does not fit, or bad_peer, if rank 0 names what
                does not fit the job.
        """
        self.setup, self.watcher, self.profile = setup, watcher, profile
        self.usage = Usage()
        self.model_digest = ""
        self.evaluation = Counts()
        self.update: AssembledModel | None = None
        table, rank = setup.table, dist.get_rank()
        if table.micro_batches != "auto":
            micro_batches = table.micro_batches
        elif micro_batches not in _candidates(table.unit, setup.plan.batch_size):  # the others would refuse it
            micro_batches = 0
        self.micro_batches = micro_batches
        self._layout = layout_of(table)
        self._place = GroupRank(rank // table.width, table.pipelines)  # the place of its pipeline among all pipelines
        self._index = rank % table.width
        self._tally = Tally()
        self._schedule = table.schedule_of(self.micro_batches or table.unit)  # of any run: which worker has which stage
        self._pipeline_group, self._stage_group = groups_of(table, self._schedule)
        self._transport = GroupTransport(self._pipeline_group, credits=CREDITS)
        self._workers: dict[int, Worker] = {}  # by the micro-batches of a run
        self._build(checkpoint)

    def run(self) -> dict[str, float]:
        """Train the rest of the round, and assemble the update.

        All members do this together.

        Returns:
            Loss and accuracy over the last epoch, as `means_over_workers` returns them.

        Raises:
            Diverged: If the loss is no longer finite, or the replicas of a stage differ.
            PipelineError: If a stage cannot go on.
            TrainError: If a checkpoint cannot be made, or a trained value is not finite.
        """
        setup, now = self.setup, replace(self._start)
        with seeded(worker_seed(setup.plan.seed, now.steps), setup.device):
            while now.epoch < setup.plan.epochs:
                self._tally.clear()
                self._epoch(now)
                now.epoch, now.taken = now.epoch + 1, 0
        # The last checkpoint comes before the assembly, so that a worker killed during it need not train again.
        if now != self._saved:
            self._make_checkpoint(now)
        if setup.held_out is not None:
            self.evaluation = self._evaluate(setup.held_out)
        self._assemble()
        return means_over_workers(self._tally)

    def _build(self, checkpoint: Checkpoint | None) -> None:
        """Cut the model, and fill this worker's stages with values.

        They are the values that the group starts from.
        """
        setup, table = self.setup, self.setup.table
        mine = self._layout.stages_of(dist.get_rank())
        files = {} if checkpoint is None else {n: setup.checkpoints.path(checkpoint, n) for n in mine}
        fresh = CheckpointFacts(setup.plan.round, setup.base_digest, Progress(), counts=tuple(setup.counts))
        facts = read_facts(files[mine[0]]) if files else fresh
        counts = self._agree_with_rank_0(facts.counts)
        self._facts = replace(fresh, counts=tuple(counts))
        self._model = StagedModel(setup.model, table, counts, setup.offered)
        self._states = {n: self._model.make(n, setup.plan, setup.optimizer, setup.device) for n in mine}
        # The end of the previous round is where this one begins, if the server has published just that model.
        is_base = checkpoint is not None and setup.checkpoints.is_result(checkpoint, setup.base_digest)
        held_out = 0 if setup.held_out is None else size_of(setup.held_out)
        rows = gather_integers([is_base, size_of(setup.samples), held_out])
        _check_sizes([row[1:] for row in rows])
        somebody_knows = any(row[0] for row in rows)
        resumed = bool(files) and (facts.round, facts.base) == (fresh.round, fresh.base)
        for number, path in files.items():
            self._states[number].load(path, values=resumed or somebody_knows)
        if not (resumed or somebody_knows):
            owners = {name: state for state in self._states.values() for name in state.tensors}
            setup.fetch(
                self._model.schema, owners.keys(), lambda e, start, values: owners[e.name].put(e, start, values)
            )
        self._start = facts.progress if resumed else Progress(facts.progress.steps)
        self._saved = facts.progress if resumed else None
        self._checkpoint = checkpoint  # the newest one
        self.samples = facts.samples if resumed else 0
        self.steps = self._start.steps
        self._last_steps = self.steps  # of the newest checkpoint
        self._stages = {number: self._stage(number, state) for number, state in self._states.items()}
        self.profile.stage = mine[0]
        trim()  # memory that the download has left behind

    def _agree_with_rank_0(self, counts: Sequence[int]) -> list[int]:
        """Agree with rank 0 on micro-batches, group number and layers.

        Returns rank 0's counts of layers.

        It may have measured the counts.
        """
        told = gather_integers([self.micro_batches, secrets.randbits(_GROUP_BITS), *counts])[0]
        _check_told(told, self.setup.table, self.setup.plan.batch_size, wanted=2 + len(counts))
        self.micro_batches, self._group, *agreed = told
        return agreed

    def _stage(self, number: int, state: StageState) -> Stage:
        table = self.setup.table
        dtype = getattr(torch, table.compute_dtype)
        stash = WeightStashing(
            state.optimizer,
            bound=check(table.schedule_of(self.micro_batches or table.unit))[number].versions,
            compute_dtype=None if dtype is torch.float32 else dtype,
            loss_scale=table.loss_scale,
        )
        return Stage(
            state.module,
            stash,
            loss=self._loss if number == table.stages - 1 else None,
            recompute=table.recompute,
            average=None if self._stage_group is None else self._average_with(stash, state),
        )

    def _loss(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the job's loss, and count each micro-batch once.

        With recomputation, it is counted in its first forward only.
        """
        loss = self.setup.loss(outputs, labels)
        if torch.is_grad_enabled() != self.setup.table.recompute:
            self._tally.add(loss, outputs, labels)
        return loss

    def _average_with(self, stash: WeightStashing, state: StageState) -> Average:
        """Return a function that combines gradients of a stage's replicas.

        It makes sums of shares of a batch, or means of batches.
        """
        table, group = self.setup.table, self._stage_group
        choice = choose_hook(table.hook)
        ready = make_hook(choice, state.module.named_parameters(), group)
        total: Average = partial(add_up, group=group) if choice.is_plain else HookedSum(ready, stash.parameters)

        def average(gradients: Sequence[Tensor]) -> None:
            total(gradients)
            for gradient in gradients:
                gradient.div_(self._place.size)

        return average

    def _epoch(self, now: Progress) -> None:
        plan, every = self.setup.plan, self.setup.table.checkpoint_every
        order = epoch_order(size_of(self.setup.samples), seed=plan.seed, epoch=now.epoch, wanted=plan.subset_size)
        if not self.micro_batches:
            self._search(order, now)
        while now.taken < len(order):
            self._run(order, now, self.micro_batches)
            ends = now.taken >= len(order) and now.epoch + 1 == plan.epochs  # run() makes a checkpoint then
            if every and now.steps // every > self._last_steps // every and not ends:
                self._make_checkpoint(now)

    def _run(self, order: Tensor, now: Progress, count: int) -> None:
        """Run the schedule once.

        It has `count` micro-batches, or fewer if the epoch ends before.
        """
        self.watcher.check()
        setup, table, began = self.setup, self.setup.table, time.perf_counter()
        interval = table.interval or count
        size = max(1, setup.plan.batch_size // interval)
        steps = list(islice(shares(order, now.taken, self._place, setup.plan.batch_size), max(1, count // interval)))
        cuts = [
            part for step in steps for part in micro_batches(step.indices, size=size, most=interval, unit=table.unit)
        ]
        inputs, labels = self._read(setup.samples, cuts)
        sent = self.watcher.bytes_sent()
        report = self._worker(len(cuts)).run(inputs, labels, weights=[len(part) for part in cuts])
        now.steps, now.round_steps, now.taken = now.steps + len(steps), now.round_steps + len(steps), steps[-1].taken
        samples = sum(len(step.indices) for step in steps)
        self.steps, self.samples = now.steps, self.samples + samples
        self.profile.add(report)
        self.profile.micro_batches = len(cuts)
        in_flight = max(stage.most_in_flight for stage in self._stages.values())
        self.profile.in_flight = max(self.profile.in_flight, in_flight)
        setup.on_run(report, in_flight)
        self.usage += Usage(
            steps=len(steps),
            samples=samples,
            seconds=time.perf_counter() - began,
            bytes_sent=self.watcher.bytes_sent() - sent,
            wait_seconds=report.seconds - report.busy_seconds,
        )
        # Only the last stage sees losses; its error ends the group, and with it the other stages.
        if not all(map(math.isfinite, report.losses)):
            raise Diverged(str(diverged(setup.samples, cuts, setup.plan.lr)))
        self.watcher.progress((now.epoch + now.taken / len(order)) / setup.plan.epochs)

    def _read(self, samples: Dataset[Any], cuts: Sequence[Tensor]) -> tuple[dict[str, MicroBatches], MicroBatches]:
        """Read the inputs or labels of this worker's micro-batches.

        Only stages that use tensors of the batch have inputs, and only the last one has labels.

        Returns:
            The inputs by name, and the labels, with None for the micro-batches that other workers do.
        """
        used = {stage: self._model.stages.routes.from_batch(stage) for stage in self._stages}
        readers = [stage for stage, names in used.items() if names or stage == self.setup.table.stages - 1]
        mine = [m for m in range(len(cuts)) if any(self._schedule.owner(stage, m) == self._index for stage in readers)]
        with add_note(f"in the samples of stage {min(readers, default=0)}"):
            batches = list(fetch(samples, [cuts[m] for m in mine], self.setup.device))
            inputs = by_name([given for given, _ in batches], {name for names in used.values() for name in names})
        labels = _spread([labels for _, labels in batches], mine, len(cuts))
        return {name: _spread(tensors, mine, len(cuts)) for name, tensors in inputs.items()}, labels

    @torch.no_grad()
    def _evaluate(self, samples: Dataset[Any]) -> Counts:
        """Evaluate the stages on a share of the samples.

        Each pipeline takes every so many batches.
        """
        setup, table, tally = self.setup, self.setup.table, Tally()
        batches = [cut for cut in torch.split(torch.arange(size_of(samples)), _EVALUATION_BATCH) if len(cut)]
        cuts = batches[self._place.rank :: self._place.size]
        for start in range(0, len(cuts), _EVALUATION_BATCHES):
            self.watcher.check()
            inputs, labels = self._read(samples, cuts[start : start + _EVALUATION_BATCHES])
            worker = self._worker(self.micro_batches or table.unit)
            outputs = worker.evaluate(inputs, micro_batches=len(labels)) or ()
            mine = [m for m in range(len(labels)) if self._schedule.owner(table.stages - 1, m) == self._index]
            for micro_batch, output in zip(mine, outputs, strict=bool(outputs)):
                target = labels[micro_batch]
                exact = output if table.compute_dtype == "float32" else output.float()
                if target is not None:
                    tally.add(setup.loss(exact, target), exact, target)
        return Counts(tally.correct if tally.classified else None, tally.total, tally.loss_sum)

    def _worker(self, count: int) -> Worker:
        if count not in self._workers:
            table = self.setup.table
            self._workers[count] = Worker(
                self._stages,
                table.schedule_of(count),
                self._transport,
                routes=self._model.stages.routes,
                index=self._index,
                replicas=self._stage_group if table.stage_workers else None,
            )
        return self._workers[count]

    def _make_checkpoint(self, now: Progress) -> None:
        """Write the present stages to the disks of their keepers.

        These are this worker, and the workers that keep copies.
        """
        began, sent, folder = time.perf_counter(), self.watcher.bytes_sent(), self.setup.checkpoints
        if self._stage_group is not None:
            parameters = (p for state in self._states.values() for p in state.module.parameters())
            if not equal_on_all(digest_of(parameters), self._stage_group):
                raise Diverged(f"the replicas of a stage differ after step {now.steps} of the job")
            for state in self._states.values():
                share_buffers(state.module, self._stage_group)
        facts = replace(self._facts, progress=replace(now), samples=self.samples)
        self._checkpoint = Checkpoint(now.steps, self._group)
        for number, state in self._states.items():
            state.save(folder.path(self._checkpoint, number), facts)
        share_copies(folder, self._layout, self._checkpoint)
        self._saved, self._last_steps = facts.progress, now.steps
        self._count_checkpoint(began, sent)

    def _assemble(self) -> None:
        """Assemble the whole model on the members that can deliver it."""
        began, sent, layout, staged = time.perf_counter(), self.watcher.bytes_sent(), self._layout, self._model
        tensors = {name: tensor for state in self._states.values() for name, tensor in state.tensors.items()}
        for target in layout.deliverers:
            ranks = [target if n in layout.stages_of(target) else layout.owner(n) for n in range(layout.stages)]
            owners = {name: ranks[stage] for name, stage in staged.stage_of.items()}
            made = assemble(self.setup.update_file, staged.schema, tensors, owners, target=target)
            self.update = made or self.update
        self.model_digest = agree_on_digest(self.update)
        if self._checkpoint is not None:  # run() has made one
            self.setup.checkpoints.note_result(self._checkpoint, self.model_digest)
        self._count_checkpoint(began, sent)

    def _count_checkpoint(self, began: float, sent: int) -> None:
        trim()  # memory that many small messages have left behind
        seconds = time.perf_counter() - began
        self.profile.checkpoint_seconds += seconds
        self.usage += Usage(seconds=seconds, bytes_sent=self.watcher.bytes_sent() - sent)

    def _search(self, order: Tensor, now: Progress) -> None:
        """Find the fastest number of micro-batches.

        The measured steps train like any other.
        """
        plan, unit = self.setup.plan, self.setup.table.unit
        candidates = _candidates(unit, plan.batch_size)
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


def _candidates(unit: int, batch_size: int) -> list[int]:
    """Return the numbers of micro-batches from which "auto" chooses."""
    return [unit * count for count in _CANDIDATES if 2 * unit * count <= batch_size] or [unit]


def _check_told(told: Sequence[int], table: Pipeline, batch_size: int, *, wanted: int) -> None:
    """Check the numbers that rank 0 tells its group, before their use.

    A schedule lists all micro-batches, and files are named by the group's number.

    Args:
        told: The micro-batches of a run, the number of the group, and the layers of each stage.
        table: Says how many micro-batches a run may have.
        batch_size: The samples of a step.
        wanted: How many numbers belong there.

    Raises:
        TrainError: With the reason bad_peer, if a number cannot be.
    """
    may_be = [table.micro_batches]
    if table.micro_batches == "auto":
        may_be = [0, *_candidates(table.unit, batch_size)]  # 0 = the fastest number is not found yet
    if len(told) != wanted or told[0] not in may_be or not 0 <= told[1] < 1 << _GROUP_BITS:
        raise TrainError(
            "bad_peer",
            f"The worker of rank 0 tells its group {str(list(told))[:200]} as micro-batches, group and layers, which "
            "do not fit the job: see what is wrong with the first client, in the order of their names.",
        )


def _check_sizes(sizes: Sequence[Sequence[int]]) -> None:
    """Check that all workers have found equally many samples.

    Otherwise the first stage would read the inputs of other samples than those whose labels the last one reads.

    Args:
        sizes: The numbers of training samples and of held-out samples, by rank. Workers of fedring 1.0.0 tell none.

    Raises:
        TrainError: With the reason other_samples, if they differ, or no_data, if there are no training samples.
    """
    for what, *found in zip(("training", "held-out"), *(row for row in sizes if len(row) == 2), strict=True):
        if len(set(found)) > 1:
            raise TrainError(
                "other_samples",
                f"The workers have found {', '.join(map(str, found))} {what} samples, in the order of the clients' "
                "names, and all must find the same: mend the data of those that differ.",
            )
        if what == "training" and not all(found):
            raise TrainError("no_data", "The workers have found no samples to train on: give them some.")


def _spread(tensors: Sequence[Tensor], micro_batches: Sequence[int], count: int) -> MicroBatches:
    """Return the tensors of some micro-batches in their places.

    All other places are None.
    """
    found = dict(zip(micro_batches, tensors, strict=True))
    return [found.get(micro_batch) for micro_batch in range(count)]


def layout_of(table: Pipeline) -> Layout:
    """Return the layout of a job's stages over the ranks."""
    return Layout(table.stages, table.width, table.pipelines, table.stage_workers)
