"""Compare communication hooks over fedring's ring with torch's own over Gloo, by turns in one run.

    python -m tests.bench.torch_hooks [--ranks 2] [--rate 100mbit] [--hooks none,fp16,powersgd]

DistributedDataParallel trains the MNIST CNN (1.2 M parameters) on random images, one thread a rank. Prints one JSON
line for each hook: the median milliseconds of a step on the slowest rank, and how many times as fast ours is. Without
--rate all ranks share one host. With it each rank has a network namespace behind a link of that rate, which needs root.
Each model has a single bucket, because torch's PowerSGD hangs over Gloo with several.
"""

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import (
    allreduce_hook,
    bf16_compress_hook,
    fp16_compress_hook,
)
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from fedring.ctl.local.rank import Rank
from fedring.ctl.local.ranks import run_ranks
from fedring.ddp.hooks import hook_by_name
from fedring.ddp.state import HookState
from fedring.train.losses import cross_entropy
from fedring.train.models import mnist_cnn
from tests.bench.lab.daemons import print_line
from tests.bench.lab.groups import join_groups, largest
from tests.bench.lab.networks import network
from tests.bench.lab.turns import alternate

_BATCH = 64  # of a rank
_BUCKET_MIB = 100  # more than the model has
_WARM_UP = 2  # turns: DDP rebuilds its buckets, and PowerSGD begins


def _powersgd(group: dist.ProcessGroup) -> PowerSGDState:
    return PowerSGDState(group, matrix_approximation_rank=1, start_powerSGD_iter=2)


HOOKS: Mapping[str, tuple[str, Callable[[dist.ProcessGroup], Any], Any]] = {
    "none": ("none", lambda group: group, allreduce_hook),
    "fp16": ("fp16", lambda group: group, fp16_compress_hook),
    "bf16": ("bf16", lambda group: group, bf16_compress_hook),
    "powersgd": ("powersgd(matrix_approximation_rank=1)", _powersgd, powerSGD_hook),
}
"""By name, our hook with its parameters, and the state and the function of torch's."""


def main() -> None:
    """Measure each hook, and print its line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes that train together")
    parser.add_argument("--rate", default="", help="rate of each rank's link, such as 100mbit")
    parser.add_argument("--hooks", default="none,fp16,powersgd", help=f"hooks to compare, of {','.join(HOOKS)}")
    parser.add_argument("--turns", type=int, default=15, help="turns of each way")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    args = parser.parse_args()
    settings = {"hooks": args.hooks.split(","), "turns": args.turns, "steps": args.steps}
    with network(args.ranks, args.rate, shared_memory=True) as net:
        for facts in run_ranks("tests.bench.torch_hooks:measure", settings, net.hosts):
            print_line({"bench": "torch_hooks", "ranks": args.ranks, **net.facts(), **facts})


def measure(rank: Rank, hooks: Sequence[str], turns: int, steps: int) -> list[dict[str, Any]]:
    """Return the milliseconds of a step with each hook in both ways."""
    groups = join_groups(rank)
    lines = []
    for name in hooks:
        ours, state_of, theirs = HOOKS[name]
        model, other = mnist_cnn(), mnist_cnn()
        state, hook = hook_by_name(ours, model.named_parameters(), groups.fedring)
        ways = {
            "fedring": _trained(model, groups.fedring, state, hook),
            "torch": _trained(other, groups.gloo, state_of(groups.gloo), theirs),
        }
        found = alternate({way: partial(_turn, step, steps) for way, step in ways.items()}, turns, warm_up=_WARM_UP)
        ratios = [torch_s / our_s for our_s, torch_s in zip(found["fedring"], found["torch"], strict=True)]
        times = {f"{way}_ms": round(1e3 * median(seconds), 3) for way, seconds in found.items()}
        lines.append({"hook": name, **times, "better": round(median(ratios), 3)})
    rank.leave()
    return lines


def _trained(model: nn.Module, group: dist.ProcessGroup, state: Any, hook: Any) -> Callable[[], None]:
    """Return a step of a model that exchanges its gradients over the group with a hook."""
    parallel = DistributedDataParallel(model, process_group=group, bucket_cap_mb=_BUCKET_MIB)
    parallel.register_comm_hook(state, hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    inputs, labels = torch.randn(_BATCH, 1, 28, 28), torch.randint(10, (_BATCH,))

    def step() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(cross_entropy(parallel(inputs), labels))
        if isinstance(state, HookState):
            state.end_step()
        optimizer.step()

    return step


def _turn(step: Callable[[], None], steps: int) -> float:
    """Return the seconds of one of so many steps, on the slowest rank."""
    dist.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    return largest((time.perf_counter() - began) / steps)


if __name__ == "__main__":
    main()
