"""The epochs of one round with DistributedDataParallel.

All members of a process group train one model together.
"""

import inspect
import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset

from fedring.c10d import GradBucket
from fedring.train.batches import Inputs, apply, cut, diverged, fetch, size_of
from fedring.train.errors import SeamError, TrainError
from fedring.train.jobs.data_parallel_table import DataParallel
from fedring.train.loop import Loss, random_state, seeded, set_random_state
from fedring.train.plan import Plan
from fedring.train.tally import Tally
from fedring.workers.replica import Replica, all_equal, share_buffers
from fedring.workers.replica_checkpoints import Content
from fedring.workers.shards import GroupRank, epoch_order, shares
from fedring.workers.training import Diverged, Watcher, means_over_workers, worker_seed
from fedring.workers.usage import Hook, Usage

log = logging.getLogger(__name__)

_CHECKS_PER_EPOCH = 100  # how often an epoch checks that the loss is finite, and reports its progress
_WINDOW = 50  # steps between two lines of usage in the log

_ARGUMENTS = inspect.signature(DistributedDataParallel.__init__).parameters
_BUFFERS_KEY = next(  # torch 2.13 has renamed the argument, and warns of the old name
    key for key in ("forward_sync_buffers", "broadcast_buffers") if key in _ARGUMENTS
)


@dataclass(frozen=True, slots=True, eq=False)
class DataParallelSetup:
    """The configuration of a group's training.

    The samples, the plan and the table are equal on all members.
    """

    samples: Dataset[Any]
    plan: Plan
    table: DataParallel
    loss: Loss
    device: torch.device
    total_epochs: int  # of the job
    first_epoch: int = 0  # the number of the round's first epoch within the job, from 0


@dataclass(slots=True, eq=False)
class DataParallelTraining:
    """One member's part in a round.

    The replica's progress says where it starts and how far it has come.
    """

    replica: Replica
    setup: DataParallelSetup
    hook: Hook
    watcher: Watcher = field(default_factory=Watcher)
    usage: Usage = field(default_factory=Usage)
    keep: Callable[[Content], None] = lambda random: None  # takes a checkpoint, with this state of random numbers
    random: Content | None = None  # with which the round goes on from a checkpoint; None = its own seed
    _logged: Usage = field(default_factory=Usage)
    _rehearsing: bool = False

    def run(self) -> dict[str, float]:
        """Train the rest of the round, together with all other members.

        Returns:
            Loss and accuracy over the last epoch, as `means_over_workers` returns them.

        Raises:
            SeamError: With the reason old_torch, if torch is older than 2.5.
            TrainError: With the reason no_data, if there are no samples, or diverged, if the loss is no longer finite.
            Diverged: If the workers' parameters differ.
        """
        setup, progress = self.setup, self.replica.progress
        if not size_of(setup.samples):
            raise TrainError("no_data", "This worker has no samples to train on: give it those of all workers.")
        place = GroupRank(dist.get_rank(), dist.get_world_size())
        ddp = self._wrap()
        tally = Tally()
        with seeded(worker_seed(setup.plan.seed, progress.steps), setup.device):
            if self.random is not None:
                if progress.round_steps:
                    self._rehearse(ddp)
                set_random_state(self.random, setup.device)
            if setup.table.checkpoint_every and not progress.steps:
                self.keep(random_state(setup.device))  # so that all workers have one, whenever they are killed
            while progress.epoch < setup.plan.epochs:
                self.hook.start_epoch(setup.first_epoch + progress.epoch)
                tally.clear()
                self._epoch(ddp, place, tally)
                progress.epoch, progress.taken = progress.epoch + 1, 0
            if setup.table.checkpoint_every:
                self.keep(random_state(setup.device))
        self.replica.optimizer.zero_grad()
        return means_over_workers(tally)

    def _wrap(self) -> DistributedDataParallel:
        setup = self.setup
        if "init_sync" not in _ARGUMENTS:
            raise SeamError(
                "old_torch", f"Data-parallel training needs torch 2.5 or newer; this is {torch.__version__}."
            )
        buffers: dict[str, Any] = {_BUFFERS_KEY: setup.table.buffers == "every_step"}
        ddp = DistributedDataParallel(
            self.replica.model.train(),
            device_ids=[setup.device] if setup.device.type == "cuda" else None,
            bucket_cap_mb=setup.table.bucket_mb,
            find_unused_parameters=setup.table.find_unused_parameters,
            init_sync=False,  # synchronize() has made the workers equal, including their optimizers
            **buffers,
        )
        ddp.register_comm_hook(self.hook.state, self._exchange)
        return ddp

    def _exchange(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        if not self._rehearsing:
            return self.hook.function(state, bucket)
        unchanged: Future[Tensor] = Future()
        unchanged.set_result(bucket.buffer())
        return unchanged

    def _rehearse(self, ddp: DistributedDataParallel) -> None:
        """Compute unused gradients, so that DDP rebuilds its buckets.

        It did so after the first step of the training.

        An all-reduce adds in an order that depends on the places in buckets. So that a round goes on from a checkpoint
        with the same bits, its next step needs the buckets that it would have had.
        """
        setup, model = self.setup, self.replica.model
        buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
        indices = torch.arange(min(setup.plan.batch_size, size_of(setup.samples)))
        ((inputs, labels),) = fetch(setup.samples, [indices], setup.device)
        self._rehearsing = True
        try:
            setup.loss(apply(ddp, inputs), labels).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        finally:
            self._rehearsing = False
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)

    def _epoch(self, ddp: DistributedDataParallel, place: GroupRank, tally: Tally) -> None:
        setup, progress = self.setup, self.replica.progress
        plan, per_step = setup.plan, setup.plan.batch_size * setup.table.accumulation_steps
        order = epoch_order(size_of(setup.samples), seed=plan.seed, epoch=progress.epoch, wanted=plan.subset_size)
        steps = list(shares(order, progress.taken, place, per_step))
        cuts = [cut(share.indices, plan.batch_size) for share in steps]
        batches = fetch(setup.samples, [indices for step in cuts for indices in step], setup.device)
        every = max(1, len(steps) // _CHECKS_PER_EPOCH)
        for number, (share, step) in enumerate(zip(steps, cuts, strict=True), start=1):
            self.watcher.check()
            with self._measured(len(share.indices)):
                self._step(ddp, [next(batches) for _ in step], tally)
            progress.steps, progress.round_steps = progress.steps + 1, progress.round_steps + 1
            progress.taken = share.taken
            if number % every == 0 or number == len(steps):
                if not math.isfinite(tally.loss_sum):
                    raise diverged(setup.samples, [indices for step in cuts[:number] for indices in step], plan.lr)
                self.watcher.progress((progress.epoch + share.taken / len(order)) / plan.epochs)
            self._after_step()

    def _step(self, ddp: DistributedDataParallel, batches: list[tuple[Inputs, Tensor]], tally: Tally) -> None:
        """Do one optimizer step on the mean gradient of all workers."""
        optimizer = self.replica.optimizer
        self._set_lr()
        optimizer.zero_grad()
        samples = sum(len(labels) for _, labels in batches)
        for number, (inputs, labels) in enumerate(batches, start=1):
            # Of several backward passes, only the last one sends gradients: the sum of all of them.
            with nullcontext() if number == len(batches) else ddp.no_sync():
                outputs = apply(ddp, inputs)
                loss = self.setup.loss(outputs, labels)
                (loss * (len(labels) / samples)).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            tally.add(loss, outputs, labels)
        self.hook.end_step()
        if self.setup.table.clip is not None and self.setup.table.hook_name != "dgc":  # dgc clips before it sends
            nn.utils.clip_grad_norm_(self.replica.model.parameters(), self.setup.table.clip)
        optimizer.step()

    @contextmanager
    def _measured(self, samples: int) -> Iterator[None]:
        """Add the step inside the context to the usage."""
        began, sent, before = time.perf_counter(), self.watcher.bytes_sent(), self.hook.usage()
        yield
        seconds, bytes_sent = time.perf_counter() - began, self.watcher.bytes_sent() - sent
        step = Usage(steps=1, samples=samples, seconds=seconds, bytes_sent=bytes_sent)
        self.usage += step + (self.hook.usage() - before)

    def _set_lr(self) -> None:
        setup, progress = self.setup, self.replica.progress
        size = size_of(setup.samples)
        size = min(size, setup.plan.subset_size or size)
        done = setup.first_epoch + progress.epoch + progress.taken / max(size, 1)
        factor = lr_factor(setup.table, done, setup.total_epochs)
        for group in self.replica.optimizer.param_groups:
            group["lr"] = group.setdefault("initial_lr", group["lr"]) * factor

    def _after_step(self) -> None:
        """Do all tasks that are due after this step.

        These are sharing buffers, comparing parameters, taking a checkpoint and logging the usage.
        """
        table, steps = self.setup.table, self.replica.progress.steps
        if isinstance(table.buffers, int) and steps % table.buffers == 0:
            share_buffers(self.replica.model)
        if table.hash_every and steps % table.hash_every == 0 and not all_equal(self.replica):
            raise Diverged(f"the parameters of the workers differ after step {steps} of the job")
        if table.checkpoint_every and steps % table.checkpoint_every == 0:
            self.keep(random_state(self.setup.device))
        if steps % _WINDOW == 0:
            window, self._logged = self.usage - self._logged, self.usage
            log.info("step %d of the job", steps, extra={"step": steps, **window.metrics})


def lr_factor(table: DataParallel, done: float, total: float) -> float:
    """Return the factor of the job's learning rate.

    It depends on samples, not on the number of workers.

    Args:
        table: Names the schedule: constant, step, or cosine (Loshchilov and Hutter 2017, eq. 5, without restarts and
            with a minimum of 0). Before it, the factor rises from 0.001 to 1 over `lr_warmup_epochs`.
        done: The epochs of the job that are done, with their fraction.
        total: The epochs of the job.
    """
    warmup = table.lr_warmup_epochs
    if done < warmup:
        return max(done / warmup, 1e-3)
    match table.lr_schedule:
        case "cosine":
            share = (done - warmup) / max(total - warmup, 1e-9)
            return 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
        case "step":
            return table.lr_gamma ** math.floor(done / table.lr_step_epochs)
    return 1.0
