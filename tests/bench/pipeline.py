"""Measure the throughput of two stages for several numbers of micro-batches, and compare it with 1 - bubble.

    python -m tests.bench.pipeline [--counts 1,2,4,8,16,32] [--batch 2048] [--width 512] [--plot FILE]

    python -m tests.bench.pipeline --accuracy --data-root data [--stages 2,4] [--epochs 2] [--lr 0.05] [--subset 0]

The first form prints one JSON line for each way and number of micro-batches: fedring's worker over Gloo and over the
ring, and torch.distributed.pipelining over Gloo, by turns in one run. Each stage has one thread. The ideal is twice the
throughput of one process, times 1 - bubble. The second form trains MNIST by 1F1B and by PipeDream, and prints one JSON
line with both accuracies for each number of stages.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from fedring.ctl.bench.runner import alternate
from fedring.pipeline.cut import cut_evenly
from fedring.pipeline.search import search_micro_batches
from fedring.pipeline.stage import Stage
from fedring.pipeline.stash import WeightStashing
from fedring.pipeline.transport import GroupTransport
from fedring.pipeline.worker import Worker
from fedring.schedules.schedule import one_forward_one_backward
from fedring.schedules.simulation import simulate
from tests.bench.daemons import print_line
from tests.bench.networks import network
from tests.bench.pipeline_accuracy import compare
from tests.bench.ranks import add_rank_options, join_groups, leave_groups, run_ranks

STAGES = 2
_ALONE = "one process"
_COLOURS = {"gloo": "#E69F00", "fedring": "#0072B2", "torch over gloo": "#B8BDC4"}

Step = Callable[[int], None]  # one step with that number of micro-batches


def main() -> None:
    """Start the stages, or run as one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="1,2,4,8,16,32", help="numbers of micro-batches, separated by commas")
    parser.add_argument("--batch", type=int, default=2048, help="samples of a step")
    parser.add_argument("--width", type=int, default=512, help="inputs and outputs of each layer")
    parser.add_argument("--repeats", type=int, default=5, help="turns to measure")
    parser.add_argument("--plot", type=Path, help="PNG to draw the efficiencies into")
    parser.add_argument("--accuracy", action="store_true", help="measure accuracy instead of throughput")
    parser.add_argument("--data-root", type=Path, help="folder of the data sets, for --accuracy")
    parser.add_argument("--stages", default="2,4", help="numbers of stages, with --accuracy")
    parser.add_argument("--epochs", type=int, default=2, help="epochs of each training, with --accuracy")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate of both, with momentum 0.9")
    parser.add_argument("--subset", type=int, default=0, help="samples of an epoch; 0 = all")
    add_rank_options(parser)
    args = parser.parse_args()
    if args.accuracy:
        for stages in args.stages.split(","):
            print_line(compare(args.data_root, int(stages), args.epochs, lr=args.lr, subset=args.subset))
        return
    if args.rank >= 0:
        _measure(args)
        return
    with network(STAGES) as hosts:
        run_ranks("tests.bench.pipeline", hosts, {})


def _measure(args: argparse.Namespace) -> None:
    gloo, ring = join_groups(args, STAGES)
    counts = [int(count) for count in args.counts.split(",")]
    ways: dict[str, Callable[[], dict[int, float]]] = {
        _ALONE: _alone(args),
        "gloo": partial(_seconds_by_count, _ours(args, gloo), counts),
        "fedring": partial(_seconds_by_count, _ours(args, ring), counts),
        # torch's schedule needs at least as many micro-batches as stages.
        "torch over gloo": partial(_seconds_by_count, _torch(args), [count for count in counts if count >= STAGES]),
    }
    turns = alternate(ways, args.repeats)
    medians = {
        (way, count): statistics.median(turn[count] for turn in measured)
        for way, measured in turns.items()
        for count in measured[0]
    }
    alone = medians.pop((_ALONE, 1))
    if args.rank == 0:
        lines = [_line(args, way, count, seconds, alone) for (way, count), seconds in medians.items()]
        for line in lines:
            print_line(line)
        if args.plot:
            _plot(lines, args.plot)
    leave_groups()


def _seconds_by_count(step: Step, counts: Sequence[int]) -> dict[int, float]:
    """Return the seconds of one step for each number of micro-batches."""
    return {point.micro_batches: point.seconds for point in search_micro_batches(step, counts, repeats=1).points}


def _line(args: argparse.Namespace, way: str, count: int, seconds: float, alone: float) -> dict[str, Any]:
    return {
        "bench": "pipeline",
        "way": way,
        "micro_batches": count,
        "ms_per_step": round(1e3 * seconds, 1),
        "samples_per_second": round(args.batch / seconds),
        "efficiency": round(alone / (STAGES * seconds), 3),
        "ideal": round(1 - simulate(one_forward_one_backward(STAGES, count)).bubble, 3),
    }


def _model(args: argparse.Namespace) -> nn.Sequential:
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Linear(args.width, args.width), nn.ReLU())]
    return nn.Sequential(*layers)


def _data(args: argparse.Namespace) -> tuple[Tensor, Tensor]:
    return torch.randn(args.batch, args.width), torch.randint(args.width, (args.batch,))


def _alone(args: argparse.Namespace) -> Callable[[], dict[int, float]]:
    """Return a function that measures a step of the whole model on rank 0, while the other ranks wait."""
    model, (inputs, targets) = _model(args), _data(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        optimizer.zero_grad()

    def measure() -> dict[int, float]:
        seconds = torch.zeros(1, dtype=torch.float64)
        if args.rank == 0:
            step()
            began = time.perf_counter()
            step()
            seconds += time.perf_counter() - began
        dist.broadcast(seconds, 0)
        return {1: seconds.item()}

    return measure


def _ours(args: argparse.Namespace, group: dist.ProcessGroup | None) -> Step:
    module = cut_evenly(_model(args), STAGES)[args.rank]
    stash = WeightStashing(torch.optim.SGD(module.parameters(), lr=0.01))
    stage = Stage(module, stash, loss=nn.functional.cross_entropy if args.rank == STAGES - 1 else None)
    transport = GroupTransport(group)
    inputs, targets = _data(args)
    workers: dict[int, Worker] = {}

    def step(count: int) -> None:
        if count not in workers:
            workers[count] = Worker({args.rank: stage}, one_forward_one_backward(STAGES, count), transport)
        workers[count].run(inputs.chunk(count), targets.chunk(count))

    return step


def _torch(args: argparse.Namespace) -> Step:
    module = cut_evenly(_model(args), STAGES)[args.rank]
    optimizer = torch.optim.SGD(module.parameters(), lr=0.01)
    inputs, targets = _data(args)
    schedules: dict[int, Any] = {}

    def step(count: int) -> None:
        if count not in schedules:
            stage = PipelineStage(module, args.rank, STAGES, torch.device("cpu"))
            schedules[count] = Schedule1F1B(stage, count, nn.functional.cross_entropy)
        schedules[count].step(*([inputs] if args.rank == 0 else []), **({"target": targets} if args.rank else {}))
        optimizer.step()
        optimizer.zero_grad()

    return step


def _plot(lines: list[dict[str, Any]], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    counts = sorted({line["micro_batches"] for line in lines})
    ideals = {line["micro_batches"]: 100 * line["ideal"] for line in lines}
    axes.plot(counts, [ideals[n] for n in counts], "--", color="#24292F", label="ideal: 1 - bubble")
    for way, colour in _COLOURS.items():
        mine = [line for line in lines if line["way"] == way]
        values = [100 * line["efficiency"] for line in mine]
        axes.plot([line["micro_batches"] for line in mine], values, marker="o", color=colour, label=way)
    axes.set_xscale("log", base=2)
    axes.set_xticks(counts, [str(count) for count in counts])
    axes.set_ylim(0, 110)
    axes.set_xlabel("micro-batches")
    axes.set_title("Throughput of two stages, % of twice that of one process", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3, linewidth=0.6)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    main()
