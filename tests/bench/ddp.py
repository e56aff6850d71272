"""Compare DGC over fedring's ring with Gloo and its hooks, for DistributedDataParallel on a slow network.

    python -m tests.bench.ddp --data-root DIR [--workers 2] [--rate 100mbit] [--steps 100]
    python -m tests.bench.ddp --data-root DIR --accuracy [--epochs 5] [--seeds 3]

The first form prints one JSON line for each method: the time of a step of the MNIST CNN, and the bytes that a worker's
host sends in a step, with all headers. --rate needs root. The second form trains without a slow network, with dense
gradients and with DGC, whose first epoch is its warm-up, and prints the accuracy for each seed.
"""

import argparse
import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import debugging_hooks, default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from fedring.ctl.bench.networks import network, sent_bytes
from fedring.ctl.bench.rank import Rank
from fedring.ctl.bench.ranks import run_ranks
from tests.bench.daemons import print_line

BATCH = 64
LR, MOMENTUM = 0.05, 0.9
RATIO = 0.001
_WARM_UP = 8  # steps that are not measured: DDP rebuilds its buckets, and torch chooses its kernels

Method = Callable[[nn.Module, dist.ProcessGroup], tuple[nn.Module, torch.optim.Optimizer, Any]]


def main() -> None:
    """Measure every method, and print its line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--workers", type=int, default=2, help="processes that train together")
    parser.add_argument("--rate", default="", help="rate of each worker's link, such as 100mbit")
    parser.add_argument("--steps", type=int, default=100, help="steps of each method to measure")
    parser.add_argument("--methods", default=",".join(METHODS), help="methods to compare, separated by commas")
    parser.add_argument("--accuracy", action="store_true", help="measure accuracy instead of speed")
    parser.add_argument("--epochs", type=int, default=5, help="epochs of each training, with --accuracy")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each method, with --accuracy")
    args = parser.parse_args()
    settings = vars(args) | {"data_root": str(args.data_root.absolute())}
    with network(args.workers, args.rate) as net:
        for facts in run_ranks("tests.bench.ddp:measure", {"settings": settings}, net.hosts):
            print_line(facts)


def measure(rank: Rank, settings: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the facts of each line."""
    args = argparse.Namespace(**settings, rank=rank.number)
    gloo, ring = rank.join_groups()
    if args.accuracy:
        lines = [
            _accuracy(args, name, seed, ring if name == "dgc" else gloo)
            for seed in range(args.seeds)
            for name in ("gloo", "dgc")
        ]
    else:
        lines = [_speed(args, name, ring if name == "dgc" else gloo) for name in args.methods.split(",")]
    rank.leave()
    return lines


def _speed(args: argparse.Namespace, name: str, group: dist.ProcessGroup) -> dict[str, Any]:
    model, optimizer, state = METHODS[name](_cnn(0), group)
    if name == "dgc":
        state.start_epoch(1)  # after the warm-up of DGC
    batches = _batches(args, 0, 0)
    interface = "eth0" if args.rate else "lo"
    for _ in range(_WARM_UP):
        _step(model, optimizer, *next(batches))
    dist.barrier()
    sent, began = sent_bytes(interface), time.perf_counter()
    for _ in range(args.steps):
        _step(model, optimizer, *next(batches))
    seconds = time.perf_counter() - began
    sent = sent_bytes(interface) - sent
    dist.barrier()
    facts = {"method": name, "workers": args.workers, "rate": args.rate or "loopback", "steps": args.steps}
    speed = {"ms_per_step": round(1e3 * seconds / args.steps, 1), "bytes_per_step": round(sent / args.steps)}
    samples = round(args.workers * BATCH * args.steps / seconds, 1)
    return {"bench": "ddp", **facts, **speed, "samples_per_second": samples}


def _accuracy(args: argparse.Namespace, name: str, seed: int, group: dist.ProcessGroup) -> dict[str, Any]:
    model, optimizer, state = METHODS[name](_cnn(seed), group)
    for epoch in range(args.epochs):
        if name == "dgc":
            state.start_epoch(epoch)
        for inputs, labels in _batches(args, seed, epoch):
            _step(model, optimizer, inputs, labels)
    from fedring.train.evaluation import evaluate
    from fedring.train.losses import cross_entropy

    counts = evaluate(model, _mnist(args).test, loss=cross_entropy, device=torch.device("cpu"))
    assert counts.accuracy is not None
    accuracy = round(counts.accuracy, 4)
    return {"bench": "ddp accuracy", "method": name, "workers": args.workers, "seed": seed, "accuracy": accuracy}


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, labels: Tensor) -> None:
    optimizer.zero_grad()
    torch.autograd.backward(nn.functional.cross_entropy(model(inputs), labels))
    optimizer.step()


def _batches(args: argparse.Namespace, seed: int, epoch: int) -> Iterator[tuple[Any, Tensor]]:
    """Return this rank's batches of one epoch."""
    from fedring.train.batches import fetch

    train = _mnist(args).train
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(1000 * seed + epoch))
    mine = order[args.rank :: args.workers]
    return iter(fetch(train, torch.split(mine[: len(mine) // BATCH * BATCH], BATCH), torch.device("cpu")))


def _mnist(args: argparse.Namespace) -> Any:
    from fedring.data import mnist

    if not _cache:
        _cache.append(mnist(args.data_root))
    return _cache[0]


_cache: list[Any] = []


def _cnn(seed: int) -> nn.Module:
    from fedring.train.models import mnist_cnn

    torch.manual_seed(seed)
    return mnist_cnn()


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)


def _with_hook(
    hook: Any, make_state: Callable[[dist.ProcessGroup], Any] = lambda group: group, **options: Any
) -> Method:
    def wrap(model: nn.Module, group: dist.ProcessGroup) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
        parallel = DistributedDataParallel(model, process_group=group, **options)
        state = make_state(group)
        if hook is not None:
            parallel.register_comm_hook(state, hook)
        return parallel, _sgd(model), state

    return wrap


def _dgc(model: nn.Module, group: dist.ProcessGroup) -> tuple[nn.Module, torch.optim.Optimizer, Any]:
    from fedring.ddp import DGCSGD
    from fedring.ddp.hooks import hook_by_name

    parallel = DistributedDataParallel(model, process_group=group)
    parameters = {"ratio": RATIO, "warmup_epochs": 1, "momentum": MOMENTUM}
    state, hook = hook_by_name("dgc", model.named_parameters(), group, **parameters)
    parallel.register_comm_hook(state, hook)
    return parallel, DGCSGD(model.parameters(), lr=LR), state


METHODS: dict[str, Method] = {
    "none": _with_hook(debugging_hooks.noop_hook),
    "gloo": _with_hook(None),
    "gloo fp16": _with_hook(default_hooks.fp16_compress_hook),
    "gloo powersgd": _with_hook(
        powerSGD_hook.powerSGD_hook,
        lambda group: powerSGD_hook.PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2),
        bucket_cap_mb=1000,
    ),
    "dgc": _dgc,
}

if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        main()
