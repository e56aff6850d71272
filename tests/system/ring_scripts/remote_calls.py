"""Ranks that call each other. Each function is the body of one rank and returns what JSON can hold."""

import io
import json
import os
import runpy
import signal
import threading
import time
from contextlib import redirect_stdout
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fedring import remote
from tests.remote_functions import Scaled
from tests.system.ring_scripts.ranks import error_of

KINDS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adagrad": {"lr": 0.1},
    "Adam": {"lr": 0.02},
}
STEPS = 6
CALLERS, TURNS = 4, 10


def batch(seed: int) -> Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(seed))


def flat(module: nn.Module) -> list[float]:
    return torch.cat([parameter.detach().flatten() for parameter in module.parameters()]).tolist()


def stages() -> dict[str, list[nn.Module]]:
    """Return the two stages of a model for each optimizer."""
    return {kind: [Scaled(1), Scaled(2)] for kind in KINDS}


def train_stages(rank: int, size: int) -> Any:
    """Rank 0 trains the stages of ranks 1 and 2, with each optimizer. Owners return their parameters."""
    mine = {kind: both[rank - 1] for kind, both in stages().items()} if rank else {}
    losses: dict[str, list[float]] = {}
    with remote.serve(mine) as owners:
        if rank == 0:
            for kind, options in KINDS.items():
                first, second = owners[1].module(kind), owners[2].module(kind)
                optimizer = remote.DistributedOptimizer(
                    getattr(torch.optim, kind), remote.parameters(first, second), **options
                )
                losses[kind] = []
                for seed in range(STEPS):
                    with remote.context() as step:
                        loss = (second(first(batch(seed))) - 1).square().mean()
                        step.backward(loss)
                        optimizer.step(step)
                    losses[kind].append(loss.item())
    return losses if rank == 0 else {kind: flat(module) for kind, module in mine.items()}


class Summand(nn.Module):
    """Adds a parameter to its input, so that its gradient is what flows back to it."""

    def __init__(self) -> None:
        super().__init__()
        self.sum = nn.Parameter(torch.zeros(1000))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.sum


def step_one_owner(rank: int, size: int) -> Any:
    """All ranks but the first step its parameter, at once; they return what was wrong with their gradients."""
    mine = Summand()
    wrong: list[Any] = []
    with remote.serve({"summand": mine} if rank == 0 else {}) as owners:
        if rank > 0:
            summand = owners[0].module("summand")
            optimizer = remote.DistributedOptimizer(torch.optim.SGD, remote.parameters(summand), lr=1.0)
            for turn in range(TURNS):
                with remote.context() as step:
                    factor = float(rank * 100 + turn)
                    step.backward((factor * summand(torch.zeros(1000))).sum())
                    found = remote.gradients(step, summand)["sum"]
                    if not torch.equal(found, torch.full((1000,), factor)):
                        wrong.append([factor, found.tolist()])
                    optimizer.step(step)
    return [mine.sum[0].item(), mine.sum[999].item()] if rank == 0 else wrong


class Deadly(nn.Module):
    """A module whose process is killed in the middle of the backward passes of several callers."""

    def __init__(self, callers: int, killed: Path) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self._all = threading.Barrier(callers, timeout=60)
        self._killed = killed

    def forward(self, x: Tensor) -> Tensor:
        output = x * self.weight
        output.register_hook(self._die)  # type: ignore[no-untyped-call]  # torch's
        return output

    def _die(self, gradient: Tensor) -> None:
        if self._all.wait() == 0:
            self._killed.write_text(str(time.monotonic()))
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait()  # until then


def lose_an_owner(rank: int, size: int, folder: Path, *, owner: int) -> None:
    """Write the error that this rank gets when the owner is killed in the middle of all others' backward passes."""
    store = f"file://{folder / 'store'}"
    dist.init_process_group("fedring", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))

    def body() -> None:
        with remote.serve({"deadly": Deadly(size - 1, folder / "killed")}) as owners:
            if rank != owner:
                with remote.context() as step:
                    step.backward(owners[owner].module("deadly")(torch.ones(4)).sum())

    found = error_of(body) | {"at": time.monotonic()}
    (folder / f"{rank}.json").write_text(json.dumps(found))


def lose_a_caller(rank: int, size: int, folder: Path) -> None:
    """Rank 0 is killed within a context. Rank 1 writes what it kept for rank 0 before and after."""
    store = f"file://{folder / 'store'}"
    dist.init_process_group("fedring", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=120))
    sizes: list[int] = []

    def body() -> None:
        layer = Watched()
        with remote.serve({"layer": layer}, trusted=["tests.remote_functions"]) as owners:
            contexts, holdings = owners[rank].agent.service.contexts, owners[rank].agent.service.holdings
            if rank == 0:
                held = owners[1].remote("tests.remote_functions:random_tensor", 1)
                with remote.context() as step:
                    step.backward(owners[1].module("layer")(held.fetch() @ torch.ones(3, 4)).sum(), retain_graph=True)
                    os.kill(os.getpid(), signal.SIGKILL)
            layer.backward_done.wait(60)
            sizes.extend([len(contexts), len(holdings)])
            try:
                owners[1].agent.wait_for_all()
            finally:
                owners[1].agent._listener.join(60)
                sizes.extend([len(contexts), len(holdings)])

    found = error_of(body) | {"sizes": sizes}
    (folder / f"{rank}.json").write_text(json.dumps(found))


class Watched(Scaled):
    """A layer that tells when a backward pass has come to its end."""

    def __init__(self) -> None:
        super().__init__(1)
        self.backward_done = threading.Event()
        self.linear.weight.register_hook(lambda _: self.backward_done.set())  # type: ignore[no-untyped-call]  # torch's


def run_example(rank: int, size: int, *, path: Path, port: int) -> str:
    """Run a script as torchrun would, and return what it prints."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK=str(rank), WORLD_SIZE=str(size))
    with redirect_stdout(io.StringIO()) as output:
        runpy.run_path(str(path), run_name="__main__")
    return output.getvalue()
