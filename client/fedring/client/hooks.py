"""The communication hooks that a job names."""

from collections.abc import Iterable, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.futures import Future

from fedring.ddp import DGC, DGCState, Profile, dgc_hook
from fedring.ddp.profile import Meter
from fedring.train.parallel import DataParallel
from fedring.train.plan import Plan
from fedring.train.seam import resolve
from fedring.train.usage import Hook, TimedHook, Usage

Parameters = Iterable[tuple[str, Tensor]]


class Compressed:
    """Deep gradient compression; what it owes outlives the group."""

    def __init__(self, config: DGC, parameters: Parameters) -> None:
        self.state = DGCState(None, config, named_parameters=parameters)
        self._whole: dict[str, Tensor] = {}  # the state that all workers share, after the newest whole step

    def function(self, state: Any, bucket: GradBucket) -> Future[Tensor]:
        """The compressed exchange."""
        return dgc_hook(state, bucket)

    def leave(self) -> None:
        """What a step that broke has done to the state that all workers share is undone."""
        for name, tensor in self.state.shared().items():
            if name in self._whole:
                tensor.copy_(self._whole[name])

    def enter(self, workers_before: int, steps: int) -> None:
        """The default group is the one to exchange with, and what is owed is scaled to its size."""
        self.state.group = dist.group.WORLD
        self.state.step = steps
        meter = Meter()  # messages of a broken step are never answered
        meter.total.add(self.state.profile)
        self.state.meter = meter
        if workers_before:
            self.state.rescale(workers_before, dist.get_world_size())
        self.end_step()

    def start_epoch(self, epoch: int) -> None:
        """The share that is sent falls with the epochs of the warm-up."""
        self.state.start_epoch(epoch)

    def end_step(self) -> None:
        """The state measures its own waits; what it shares is remembered as it is now."""
        self._whole = {name: tensor.clone() for name, tensor in self.state.shared().items()}

    def sparsity(self) -> float:
        """The share of the entries that are sent in this epoch."""
        return self.state.ratio

    def residual_norm(self) -> float:
        """The L2 norm of what is owed."""
        return self.state.residual_norm

    def usage(self) -> Usage:
        """The state's own sums."""
        profile: Profile = self.state.profile
        return Usage(
            wait_seconds=profile.wait_seconds,
            compress_seconds=profile.compress_seconds,
            decompress_seconds=profile.decompress_seconds,
            longest_wait_seconds=profile.longest_wait_seconds,
        )


def make_hook(table: DataParallel, plan: Plan, parameters: Parameters, trusted: Sequence[str]) -> Hook:
    """The hook that the table names; a user's must be importable from a trusted module."""
    match table.hook:
        case "none":
            return TimedHook(default_hooks.allreduce_hook)
        case "fp16":
            return TimedHook(default_hooks.fp16_compress_hook)
        case "bf16":
            return TimedHook(default_hooks.bf16_compress_hook)
        case "dgc":
            config = DGC(ratio=table.ratio, warmup_epochs=table.warmup_epochs, momentum=plan.momentum, clip=table.clip)
            return Compressed(config, parameters)
    return TimedHook(resolve(table.hook, trusted))
