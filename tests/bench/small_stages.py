"""Compare pipelines of small stages with torch.distributed.pipelining over Gloo, by turns in one run.

    python -m tests.bench.small_stages [--stages 2,3] [--micro-batches 8] [--samples 16] [--width 256] [--crossed]

A stage is two linear layers with ReLU, on a process with one thread, so that a step costs little but its messages. Both
train 1F1B with SGD. Prints one JSON line for each number of stages: the median milliseconds of a step on the slowest
rank, the processor milliseconds of a step on all ranks together, and how many times as fast ours is. --crossed adds
both over the other's transport: our pipeline over Gloo, and torch's over our ring.
"""

import argparse
import time
from collections.abc import Mapping
from functools import partial
from statistics import fmean, median

import torch
import torch.distributed as dist
from torch import nn

from fedring.ctl.local.rank import Rank
from fedring.ctl.local.ranks import Host, run_ranks
from tests.bench.lab.daemons import print_line
from tests.bench.lab.groups import join_groups, largest
from tests.bench.lab.turns import alternate
from tests.bench.pipeline_steps import Step, our_steps, torch_steps

_WARM_UP = 2  # turns
_CLASSES = 10


def main() -> None:
    """Measure each number of stages, and print its line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", default="2,3", help="numbers of stages, separated by commas")
    parser.add_argument("--micro-batches", type=int, default=8, help="micro-batches of a step")
    parser.add_argument("--samples", type=int, default=16, help="samples of a micro-batch")
    parser.add_argument("--width", type=int, default=256, help="of the layers")
    parser.add_argument("--turns", type=int, default=30, help="turns of each way")
    parser.add_argument("--steps", type=int, default=20, help="steps of a turn")
    parser.add_argument("--crossed", action="store_true", help="also run each over the other's transport")
    args = parser.parse_args()
    given = vars(args)
    settings = {name: given[name] for name in ("micro_batches", "samples", "width", "turns", "steps", "crossed")}
    for stages in map(int, args.stages.split(",")):
        facts = run_ranks("tests.bench.small_stages:measure", settings, [Host(env={"OMP_NUM_THREADS": "1"})] * stages)
        print_line({"bench": "small_stages", "stages": stages, **settings, **facts})


def measure(
    rank: Rank, *, micro_batches: int, samples: int, width: int, turns: int, steps: int, crossed: bool
) -> Mapping[str, float]:
    """Return the milliseconds of a step in each way, and the ratio."""
    groups = join_groups(rank)
    torch.manual_seed(0)
    inputs, targets = torch.randn(micro_batches * samples, width), torch.randint(_CLASSES, (micro_batches * samples,))
    parts = torch.split(inputs, samples), torch.split(targets, samples)

    def stage() -> nn.Module:
        last = rank.number == rank.count - 1
        return nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, _CLASSES if last else width))

    ways: dict[str, Step] = {
        "fedring": our_steps(rank, stage(), groups.fedring)(*parts),
        "torch": torch_steps(rank, stage(), groups.gloo)(inputs, targets, micro_batches),
    }
    if crossed:
        ways["fedring_over_gloo"] = our_steps(rank, stage(), groups.gloo)(*parts)
        ways["torch_over_fedring"] = torch_steps(rank, stage(), groups.fedring)(inputs, targets, micro_batches)
    found = alternate({name: partial(_turn, step, steps) for name, step in ways.items()}, turns, warm_up=_WARM_UP)
    rank.leave()
    walls = {name: 1e3 * median(wall for wall, _ in pairs) for name, pairs in found.items()}
    ratios = [theirs / ours for (ours, _), (theirs, _) in zip(found["fedring"], found["torch"], strict=True)]
    return {
        **{f"{name}_ms": round(wall, 3) for name, wall in walls.items()},
        **{f"{name}_cpu_ms": round(1e3 * fmean(used for _, used in pairs), 3) for name, pairs in found.items()},
        "better": round(median(ratios), 3),
    }


def _turn(step: Step, steps: int) -> tuple[float, float]:
    """Return the seconds and, of all ranks together, the processor seconds of one of so many steps."""
    dist.barrier()
    used, began = time.process_time(), time.perf_counter()
    for _ in range(steps):
        step()
    spent = torch.tensor(time.process_time() - used, dtype=torch.float64)
    wall = largest(time.perf_counter() - began)
    dist.all_reduce(spent)
    return wall / steps, spent.item() / steps


if __name__ == "__main__":
    main()
