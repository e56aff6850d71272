"""The epochs of one round, trained by all members of a process group together with DistributedDataParallel."""

import inspect
import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from fedring.train.batches import cut, fetch, size_of
from fedring.train.errors import TrainError
from fedring.train.loop import Loss, seeded
from fedring.train.parallel import DataParallel
from fedring.train.plan import Plan
from fedring.train.tally import Tally, means_of_all
from fedring.workers.learning_rate import lr_factor
from fedring.workers.replica import Replica, all_equal, share_buffers
from fedring.workers.shards import World, epoch_order, shares
from fedring.workers.usage import Hook, Usage
from fedring.workers.watcher import Diverged, Watcher

log = logging.getLogger(__name__)

_REPORTS = 100  # looks an epoch at whether the loss is still finite
_MOST_SEED = (1 << 62) - 1
_WINDOW = 50  # steps between two lines of the profile in the log


_BUFFERS_KEY = next(  # torch 2.13 has renamed it, and warns
    key
    for key in ("forward_sync_buffers", "broadcast_buffers")
    if key in inspect.signature(DistributedDataParallel.__init__).parameters
)


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """What a group trains, and how; equal on all its members."""

    samples: Dataset[Any]
    plan: Plan
    table: DataParallel
    loss: Loss
    device: torch.device
    total_epochs: int  # of the job
    first_epoch: int = 0  # of the round, in the job


@dataclass(slots=True, eq=False)
class GroupTraining:
    """One member's part in the training; the replica's progress says where it begins, and how far it came."""

    replica: Replica
    course: Course
    hook: Hook
    watcher: Watcher = field(default_factory=Watcher)
    usage: Usage = field(default_factory=Usage)
    _told: Usage = field(default_factory=Usage)

    def run(self) -> dict[str, float]:
        """The round is trained to its end on all members; the means over the last epoch, of all of them."""
        course, progress = self.course, self.replica.progress
        world = World(dist.get_rank(), dist.get_world_size())
        ddp = self._wrap()
        tally = Tally(course.device)
        with seeded(hash((course.plan.seed, progress.steps, world.rank)) >> 1 & _MOST_SEED, course.device):
            while progress.epoch < course.plan.epochs:
                self.hook.start_epoch(course.first_epoch + progress.epoch)
                tally.clear()
                self._epoch(ddp, world, tally)
                progress.epoch, progress.taken = progress.epoch + 1, 0
        self.replica.optimizer.zero_grad()
        return means_of_all(tally)

    def _wrap(self) -> DistributedDataParallel:
        course = self.course
        buffers: dict[str, Any] = {_BUFFERS_KEY: course.table.buffers == "every_step"}
        ddp = DistributedDataParallel(
            self.replica.model.train(),
            device_ids=[course.device] if course.device.type == "cuda" else None,
            bucket_cap_mb=course.table.bucket_mb,
            find_unused_parameters=course.table.find_unused_parameters,
            init_sync=False,  # synchronize() has made the workers equal, optimizer included
            **buffers,
        )
        ddp.register_comm_hook(self.hook.state, self.hook.function)
        return ddp

    def _epoch(self, ddp: DistributedDataParallel, world: World, tally: Tally) -> None:
        course, progress = self.course, self.replica.progress
        plan, each = course.plan, course.plan.batch_size * course.table.accumulation_steps
        order = epoch_order(size_of(course.samples), seed=plan.seed, epoch=progress.epoch, wanted=plan.subset_size)
        steps = list(shares(order, progress.taken, world, each))
        cuts = [cut(share.indices, plan.batch_size) for share in steps]
        batches = fetch(course.samples, [indices for step in cuts for indices in step], course.device)
        every = max(1, len(steps) // _REPORTS)
        for number, (share, step) in enumerate(zip(steps, cuts, strict=True), start=1):
            self.watcher.check()
            with self._used(len(share.indices)):
                self._step(ddp, [next(batches) for _ in step], tally)
            progress.steps, progress.round_steps = progress.steps + 1, progress.round_steps + 1
            progress.taken = share.taken
            if number % every == 0 or number == len(steps):
                self._report(tally, (progress.epoch + share.taken / len(order)) / plan.epochs)
            self._look_at_peers()

    def _step(self, ddp: DistributedDataParallel, batches: list[tuple[Tensor, Tensor]], tally: Tally) -> None:
        """One step of the optimizer, on the mean gradient of all workers' batches."""
        optimizer = self.replica.optimizer
        self._set_lr()
        optimizer.zero_grad()
        samples = sum(len(labels) for _, labels in batches)
        for number, (inputs, labels) in enumerate(batches, start=1):
            # Only the last of several backward passes sends what all have added up.
            with nullcontext() if number == len(batches) else ddp.no_sync():
                outputs: Tensor = ddp(inputs)
                loss = self.course.loss(outputs, labels)
                (loss * (len(labels) / samples)).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            tally.add(loss, outputs, labels)
        self.hook.end_step()
        if self.course.table.clip is not None and self.course.table.hook != "dgc":  # which clips before it sends
            nn.utils.clip_grad_norm_(self.replica.model.parameters(), self.course.table.clip)
        optimizer.step()

    @contextmanager
    def _used(self, samples: int) -> Iterator[None]:
        """What the step inside takes is added up."""
        began, sent, before = time.perf_counter(), self.watcher.bytes_sent(), self.hook.usage()
        yield
        seconds, bytes_sent = time.perf_counter() - began, self.watcher.bytes_sent() - sent
        step = Usage(steps=1, samples=samples, seconds=seconds, bytes_sent=bytes_sent)
        self.usage += step + (self.hook.usage() - before)

    def _set_lr(self) -> None:
        course, progress = self.course, self.replica.progress
        size = course.plan.subset_size or size_of(course.samples)
        done = course.first_epoch + progress.epoch + progress.taken / max(size, 1)
        factor = lr_factor(course.table, done, course.total_epochs)
        for group in self.replica.optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def _report(self, tally: Tally, share: float) -> None:
        if not math.isfinite(tally.loss_sum):
            lr = self.course.plan.lr
            raise TrainError("diverged", f"The loss is not finite: use a learning rate below {lr:g}.")
        self.watcher.progress(share)

    def _look_at_peers(self) -> None:
        """Compare parameters and share buffers where it is time to, and tell the profile."""
        table, steps = self.course.table, self.replica.progress.steps
        if isinstance(table.buffers, int) and steps % table.buffers == 0:
            share_buffers(self.replica.model)
        if table.hash_every and steps % table.hash_every == 0 and not all_equal(self.replica):
            raise Diverged(f"the workers' parameters differ after step {steps} of the job")
        if steps % _WINDOW == 0:
            window, self._told = self.usage - self._told, self.usage
            log.info("step %d of the job", steps, extra={"step": steps, **window.metrics})
