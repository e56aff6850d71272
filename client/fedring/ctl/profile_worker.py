"""One worker of `flctl profile`: python -m fedring.ctl.profile_worker SETTINGS RANK; rank 0 prints what it measured.

Hooks take turns, so that other work on the machine slows all of them down alike.
"""

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

import fedring.ring
from fedring.ddp import DGCSGD, DGCState, Profile
from fedring.ddp.hooks import hook_by_name
from fedring.train.batches import Inputs, apply, fetch, size_of
from fedring.train.losses import cross_entropy
from fedring.train.seam import build_model, resolve

_TRUSTED = ("fedring", "torchvision")
_WARM = 5  # steps before measuring: DDP rebuilds its buckets, PowerSGD begins, kernels are chosen
_LR = 0.001
_PAST_WARM_UP = 1000  # epoch
_METER = ("wait_seconds", "compress_seconds", "decompress_seconds")


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a measurement; equal on all workers."""

    store: str
    backend: str
    workers: int
    threads: int
    hooks: list[str]
    turns: int
    steps: int  # of each turn
    batch_size: int
    model: str
    data: str
    data_root: str | None

    def text(self) -> str:
        """Return the settings as one argument of a command."""
        return json.dumps(asdict(self))


class Subject:
    """A model that is trained with one hook, and what its steps took."""

    def __init__(self, hook: str, settings: Settings) -> None:
        self.hook = hook
        self.seconds: list[float] = []  # of a step, in each turn
        self.bytes_sent = 0.0  # of a step, by this worker, summed over the turns
        self.meter = Profile()  # of all turns
        model = build_model(settings.model, {}, 0, _TRUSTED)
        self._state, function = hook_by_name(hook, model.named_parameters())
        self._model = DistributedDataParallel(model)
        self._model.register_comm_hook(self._state, function)
        self._state.start_epoch(_PAST_WARM_UP)
        self._optimizer: torch.optim.Optimizer
        if isinstance(self._state, DGCState):
            self._optimizer = DGCSGD(model.parameters(), lr=_LR)
        else:
            self._optimizer = torch.optim.SGD(model.parameters(), lr=_LR, momentum=0.9)

    def train(self, batches: Iterator[tuple[Inputs, Tensor]]) -> None:
        """Take a step on each of the batches."""
        for inputs, labels in batches:
            self._optimizer.zero_grad()
            loss: Tensor = cross_entropy(apply(self._model, inputs), labels)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
            self._state.end_step()
            self._optimizer.step()

    def measure(self, batches: Iterator[tuple[Inputs, Tensor]], steps: int) -> None:
        """Take one turn of so many steps, and note its time and bytes."""
        dist.barrier()
        self._state.meter.end_window()
        sent, began = _sent_bytes(), time.perf_counter()
        self.train(batches)
        seconds, sent = time.perf_counter() - began, _sent_bytes() - sent
        self.seconds.append(seconds / steps)
        self.bytes_sent += sent / steps
        self.meter.add(self._state.meter.end_window())


def main() -> None:
    """Measure every hook, as the worker of that rank."""
    settings, rank = Settings(**json.loads(sys.argv[1])), int(sys.argv[2])
    torch.set_num_threads(settings.threads)
    store = FileStore(settings.store, settings.workers)
    dist.init_process_group(settings.backend, store=store, rank=rank, world_size=settings.workers)
    samples = resolve(settings.data, _TRUSTED)(Path(settings.data_root) if settings.data_root else None, False).train
    subjects = [Subject(hook, settings) for hook in settings.hooks]
    for subject in subjects:
        subject.train(_batches(samples, settings, rank, _WARM))
    for turn in range(settings.turns):
        for subject in subjects[turn % len(subjects) :] + subjects[: turn % len(subjects)]:
            subject.measure(_batches(samples, settings, rank, settings.steps), settings.steps)
    figures = [_figures(subject, settings) for subject in subjects]
    if rank == 0:
        print(json.dumps(figures), flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _figures(subject: Subject, settings: Settings) -> dict[str, Any]:
    """Return the subject's figures, in the mean over all workers."""
    metered = subject.meter.means()
    sums = torch.tensor(
        [*subject.seconds, subject.bytes_sent / settings.turns, *(metered[name] for name in _METER)],
        dtype=torch.float64,
    )
    dist.all_reduce(sums)
    means = (sums / settings.workers).tolist()
    seconds, (sent, *spent) = means[: settings.turns], means[settings.turns :]
    known = settings.backend == "fedring"  # Gloo does not count its bytes
    return {
        "hook": subject.hook,
        "step_seconds": seconds,
        "bytes_per_step": round(sent) if known else None,
        **dict(zip(_METER, spent, strict=True)),
    }


def _batches(samples: Any, settings: Settings, rank: int, steps: int) -> Iterator[tuple[Inputs, Tensor]]:
    """Return `steps` batches, equal for all hooks and different on each worker."""
    generator = torch.Generator().manual_seed(rank)
    cuts = [torch.randint(size_of(samples), (settings.batch_size,), generator=generator) for _ in range(steps)]
    return fetch(samples, cuts, torch.device("cpu"))


def _sent_bytes() -> int:
    traffic = fedring.ring.traffic()
    return traffic.sent_bytes + traffic.shared_bytes


if __name__ == "__main__":
    main()
