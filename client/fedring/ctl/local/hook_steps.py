"""The steps of `flctl profile` and of `tests.bench.hooks`, on one rank.

Their time and their bytes are measured with each hook. Hooks take turns, so that other work on the machine slows all of
them down alike.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

import fedring.ring
from fedring.ctl.local.rank import Rank
from fedring.ddp import DGCSGD, DGCState, Profile
from fedring.ddp.hooks import hook_by_name
from fedring.ddp.state import HookState
from fedring.offers import named
from fedring.train.batches import Inputs, apply, fetch, size_of
from fedring.train.losses import cross_entropy
from fedring.train.names.offered import collect
from fedring.train.names.seam import build_model

_WARM = 5  # steps before measuring: DDP rebuilds its buckets, PowerSGD begins, kernels are chosen
_LR = 0.001
_PAST_WARM_UP = 1000  # epoch
_METER = ("wait_seconds", "compress_seconds", "decompress_seconds")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a measurement; equal on all ranks."""

    backend: str
    threads: int
    hooks: list[str]
    turns: int
    steps: int  # of each turn
    batch_size: int
    model: str
    data: str
    data_root: str | None


class Subject:
    """A model trained with one hook, and its steps' cost."""

    def __init__(self, hook: str, settings: Settings) -> None:
        self.hook = hook
        self.seconds: list[float] = []  # of a step, in each turn
        self.bytes_sent = 0.0  # of a step, by this worker, summed over the turns
        self.meter = Profile()  # of all turns
        model = build_model(settings.model, {}, 0, collect(named(model=settings.model)))
        self._state, function = hook_by_name(hook, model.named_parameters())
        self._model = DistributedDataParallel(model)
        self._model.register_comm_hook(self._state, function)
        self._state.start_epoch(_PAST_WARM_UP)
        self._optimizer = optimizer_for(self._state, model.parameters(), _LR)

    def train(self, batches: Iterator[tuple[Inputs, Tensor]]) -> None:
        """Take a step on each of the batches."""
        for inputs, labels in batches:
            self._optimizer.zero_grad()
            loss: Tensor = cross_entropy(apply(self._model, inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
            self._state.end_step()
            self._optimizer.step()

    def measure(self, batches: Iterator[tuple[Inputs, Tensor]], steps: int) -> None:
        """Take one turn of `steps` steps, and note its cost."""
        dist.barrier()
        self._state.meter.end_window()
        sent, began = sent_bytes(), time.perf_counter()
        self.train(batches)
        seconds, sent = time.perf_counter() - began, sent_bytes() - sent
        self.seconds.append(seconds / steps)
        self.bytes_sent += sent / steps
        self.meter.add(self._state.meter.end_window())


def measure(rank: Rank, **settings: Any) -> list[dict[str, Any]]:
    """Measure every hook.

    Args:
        rank: Which rank this process is.
        **settings: Those of Settings.

    Returns:
        For each hook, its name, the seconds of a step in each turn (`step_seconds`), the bytes that a rank sends in a
        step (`bytes_per_step`, None over Gloo, which does not count them), and the seconds of a step that the hook
        waited, compressed and decompressed; all in the mean over the ranks.
    """
    chosen = Settings(**settings)
    torch.set_num_threads(chosen.threads)
    rank.join(chosen.backend)
    load = collect(named(data=chosen.data)).get("data", chosen.data)
    samples = load(Path(chosen.data_root) if chosen.data_root else None, False).train
    subjects = [Subject(hook, chosen) for hook in chosen.hooks]
    for subject in subjects:
        subject.train(_batches(samples, chosen, rank.number, _WARM))
    for turn in range(chosen.turns):
        for number, subject in enumerate(subjects[turn % len(subjects) :] + subjects[: turn % len(subjects)]):
            subject.measure(_batches(samples, chosen, rank.number, chosen.steps), chosen.steps)
            rank.report(turn * len(subjects) + number + 1, chosen.turns * len(subjects))
    figures = [_figures(subject, chosen, rank) for subject in subjects]
    rank.leave()
    return figures


def _figures(subject: Subject, settings: Settings, rank: Rank) -> dict[str, Any]:
    metered = subject.meter.means()
    sent = rank.mean(subject.bytes_sent / settings.turns)
    return {
        "hook": subject.hook,
        "step_seconds": [rank.mean(seconds) for seconds in subject.seconds],
        "bytes_per_step": round(sent) if settings.backend == "fedring" else None,
        **{name: rank.mean(metered[name]) for name in _METER},
    }


def _batches(samples: Any, settings: Settings, rank: int, steps: int) -> Iterator[tuple[Inputs, Tensor]]:
    """Return `steps` batches, equal for all hooks and different on each worker."""
    generator = torch.Generator().manual_seed(rank)
    cuts = [torch.randint(size_of(samples), (settings.batch_size,), generator=generator) for _ in range(steps)]
    return fetch(samples, cuts, torch.device("cpu"))


def optimizer_for(
    state: HookState | None, parameters: Iterable[torch.nn.Parameter], lr: float, momentum: float = 0.9
) -> torch.optim.Optimizer:
    """Return SGD with momentum, or DGC's optimizer without.

    DGC has the momentum in its hook.
    """
    if isinstance(state, DGCState):
        return DGCSGD(parameters, lr=lr)
    return torch.optim.SGD(parameters, lr=lr, momentum=momentum)


def sent_bytes() -> int:
    """Return the bytes sent over the ring by this rank.

    Bytes through shared memory count, too.
    """
    traffic = fedring.ring.traffic()
    return traffic.sent_bytes + traffic.shared_bytes
