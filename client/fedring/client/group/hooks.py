"""The communication hook of a data-parallel job.

Its state outlives the groups that train.
"""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fedring.c10d import GradBucket
from fedring.ddp import HookState
from fedring.ddp.hooks.by_name import ReadyHook
from fedring.ddp.hooks.by_name import make_hook as ready_hook
from fedring.ddp.hooks.own import BadHook, own_hook
from fedring.train.errors import SeamError
from fedring.train.jobs.data_parallel_table import DataParallel
from fedring.train.names.offered import Offered
from fedring.train.plan import Plan
from fedring.workers.usage import Usage

Parameters = Iterable[tuple[str, Tensor]]


class JobHook:
    """A job's communication hook on one worker.

    It moves its state from group to group, and counts its cost.

    Args:
        ready: The state and the hook.

    Attributes:
        state: The hook's state.
        shared: What all workers must hold equally, while no group trains.
    """

    def __init__(self, ready: ReadyHook) -> None:
        self.state: HookState = ready.state
        self.shared = self.state.shared()
        self._function = ready.hook
        self._steps = 0  # of the job, as far as they count here
        self._all_left = False  # whether all that this worker sends in the step after them may have reached others

    def function(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """Exchange a bucket, as the hook does it.

        Raises:
            SeamError: With the reason bad_job, if it is a hook of the user's own that needs a state and has none.
        """
        self._all_left = bucket.is_last()
        try:
            return self._function(state, bucket)
        except BadHook as error:
            raise SeamError("bad_job", f"{error}.") from error

    def leave(self) -> None:
        """Fill `shared` with the state for the next group.

        Effects of a step that broke are not part of it.
        """
        self.shared.clear()
        self.shared.update(self.state.shared())

    def enter(self, workers_before: int, steps: int) -> None:
        """Move the state to the default group, whose workers hold `shared`.

        A step that broke here is undone, unless another worker completed it: then that worker had all that this one
        sent, and the state is completed. If this worker has missed a group since, nobody can tell any more; but few
        steps are completed by some workers only.

        Args:
            workers_before: The size of this worker's previous group; 0 if there was none.
            steps: The steps of the job that the group has taken.
        """
        if self._all_left and steps == self._steps + 1:
            self.state.complete(self.shared)
        else:
            self.state.undo()
        self.state.regroup(self.shared, steps=steps)
        if workers_before:
            self.state.rescale(workers_before, dist.get_world_size())
        self._count(steps)

    def saved(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        return self.state.state_dict()

    def restore(self, saved: dict[str, Any], steps: int) -> None:
        """Restore the state from a checkpoint.

        It is scaled to the size of the default group.

        Args:
            saved: What saved() returned.
            steps: The steps of the job that were taken before the checkpoint.

        Raises:
            ValueError: If the checkpoint is of another hook or model.
        """
        self.state.load_state_dict(saved)
        self._count(steps)

    def start_epoch(self, epoch: int) -> None:
        """Begin an epoch of the job, counted from 0.

        The share of the gradient that is sent may depend on it.
        """
        self.state.start_epoch(epoch)

    def end_step(self) -> None:
        """Note that the step counts."""
        self._count(self._steps + 1)

    def sparsity(self) -> float:
        """Return the share of the entries that is sent now."""
        return self.state.ratio

    def residual_norm(self) -> float:
        """Return the L2 norm of the residual."""
        return self.state.residual_norm

    def usage(self) -> Usage:
        """Return the sums of the state's meter."""
        profile = self.state.profile
        return Usage(
            wait_seconds=profile.wait_seconds,
            compress_seconds=profile.compress_seconds,
            decompress_seconds=profile.decompress_seconds,
            longest_wait_seconds=profile.longest_wait_seconds,
        )

    def _count(self, steps: int) -> None:
        self.state.end_step()
        self._steps, self._all_left = steps, False


def make_hook(table: DataParallel, plan: Plan, parameters: Parameters, offered: Offered) -> JobHook:
    """Make the hook that a job names.

    Args:
        table: The job's table [data_parallel].
        plan: The job's plan, which has the momentum.
        parameters: As from `model.named_parameters()`.
        offered: What jobs may name here.

    Raises:
        SeamError: If the job's parameters do not fit together, or if a user's hook is not offered.
    """
    try:
        choice = table.chosen_hook(plan.momentum)
        if choice is None:
            return JobHook(own_hook(table.hook, offered.get("hook", table.hook), list(parameters)))
        return JobHook(ready_hook(choice, parameters))
    except ValueError as error:
        raise SeamError("bad_job", f"{error}.") from error
