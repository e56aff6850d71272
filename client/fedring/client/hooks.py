"""The communication hooks that a job names."""

from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future

from fedring.ddp import DGC, Profile
from fedring.ddp.hooks.by_name import Options, Ready
from fedring.ddp.hooks.by_name import make_hook as ready_hook
from fedring.train.data_parallel_table import HOOKS, DataParallel
from fedring.train.plan import Plan
from fedring.train.seam import resolve
from fedring.workers.usage import Hook, TimedHook, Usage

Parameters = Iterable[tuple[str, Tensor]]
_DGC_RATIO = 0.001


class Lasting(Protocol):
    """The state of a hook that lasts while groups come and go: see fedring.ddp.hooks.state."""

    @property
    def profile(self) -> Profile:
        """The sums over all steps so far."""
        ...

    @property
    def ratio(self) -> float:
        """The share of a gradient's entries that is sent now."""
        ...

    @property
    def residual_norm(self) -> float:
        """The L2 norm of what is owed."""
        ...

    def start_epoch(self, epoch: int) -> None:
        """The next step is in that epoch of the job."""

    def end_step(self) -> None:
        """The step counts."""

    def undo(self) -> None:
        """What was sent since the newest step that counts is owed again."""

    def shared(self) -> dict[str, Tensor]:
        """What must be equal on all workers, as it was after the newest step that counts; copies."""
        ...

    def regroup(self, shared: dict[str, Tensor], *, steps: int) -> None:
        """The state goes on after `steps` steps of the default group, whose workers all hold `shared`."""

    def rescale(self, old_world: int, new_world: int) -> None:
        """What is owed counts in a mean over `new_world` workers as it would have in one over `old_world`."""


class Compressed:
    """A hook that owes something; what it owes outlives the group."""

    def __init__(self, ready: Ready) -> None:
        self.state: Lasting = ready.state
        self.shared = self.state.shared()  # what all workers must hold equally, while no group trains
        self._function = ready.hook
        self._steps = 0  # of the job, as far as they count here

    def function(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """What the hook does."""
        return self._function(state, bucket)

    def leave(self) -> None:
        """`shared` holds what a new group begins with, without what a step that broke has done to it."""
        self.shared.clear()
        self.shared.update(self.state.shared())

    def enter(self, workers_before: int, steps: int) -> None:
        """The state is one of the default group's, which has taken `steps` steps and holds `shared`.

        A step that broke here is undone, unless a worker had all it needed to complete it, for then it had all that
        this one sent.
        """
        if steps == self._steps:
            self.state.undo()
        self.state.regroup(self.shared, steps=steps)
        if workers_before:
            self.state.rescale(workers_before, dist.get_world_size())
        self.state.end_step()
        self._steps = steps

    def start_epoch(self, epoch: int) -> None:
        """What is sent may depend on the epoch."""
        self.state.start_epoch(epoch)

    def end_step(self) -> None:
        """The step counts."""
        self.state.end_step()
        self._steps += 1

    def sparsity(self) -> float:
        """The share of the entries that is sent now."""
        return self.state.ratio

    def residual_norm(self) -> float:
        """The L2 norm of what is owed."""
        return self.state.residual_norm

    def usage(self) -> Usage:
        """The state's own sums."""
        profile = self.state.profile
        return Usage(
            wait_seconds=profile.wait_seconds,
            compress_seconds=profile.compress_seconds,
            decompress_seconds=profile.decompress_seconds,
            longest_wait_seconds=profile.longest_wait_seconds,
        )


def make_hook(table: DataParallel, plan: Plan, parameters: Parameters, trusted: Sequence[str]) -> Hook:
    """The hook that the table names; a user's must be importable from a trusted module."""
    if table.hook not in HOOKS:
        return TimedHook(resolve(table.hook, trusted))
    ready = ready_hook(table.hook, parameters, options=_options(table, plan))
    return TimedHook(ready.hook) if ready.state is None else Compressed(ready)


def _options(table: DataParallel, plan: Plan) -> Options:
    dgc = DGC(
        ratio=_DGC_RATIO if table.ratio is None else table.ratio,
        warmup_epochs=table.warmup_epochs,
        momentum=plan.momentum,
        clip=table.clip,
        clip_norm=table.clip_norm,
    )
    return Options(
        ratio=table.ratio,
        rank=table.rank,
        start_iteration=table.start_iteration,
        feedback=table.feedback,
        dgc=dgc,
    )
