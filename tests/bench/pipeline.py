"""Throughput of two stages against the number of micro-batches, beside the ideal of 1 - bubble.

    python -m tests.bench.pipeline [--counts 1,2,4,8,16,32] [--batch 2048] [--width 512] [--plot FILE]

    python -m tests.bench.pipeline --accuracy --data-root data [--stages 2,4] [--epochs 2] [--lr 0.05] [--subset 0]

The first prints one JSON line a way and count: our worker over Gloo and over our ring, and torch.distributed.pipelining
over Gloo, by turns in one run. Each stage has one thread; the ideal is twice one process's, times 1 - bubble.
The second trains MNIST by 1F1B and by PipeDream, and prints one JSON line with both accuracies a number of stages.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import FileStore
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from fedring.pipeline.cut import cut_evenly
from fedring.pipeline.search import search_micro_batches
from fedring.pipeline.stage import Stage
from fedring.pipeline.stash import WeightStashing
from fedring.pipeline.transport import GroupTransport
from fedring.pipeline.worker import Worker
from fedring.schedules.schedule import one_forward_one_backward
from fedring.schedules.simulation import simulate
from tests.bench.fleets import ROOT, print_line
from tests.bench.pipeline_accuracy import compare

STAGES = 2
_COLOURS = {"gloo": "#E69F00", "fedring": "#0072B2", "torch over gloo": "#B8BDC4"}

Step = Callable[[int], None]  # one step with this many micro-batches


def main() -> None:
    """Start the stages, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--counts", default="1,2,4,8,16,32")
    parser.add_argument("--batch", type=int, default=2048)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--accuracy", action="store_true")
    parser.add_argument("--data-root", type=Path)
    parser.add_argument("--stages", default="2,4")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--lr", type=float, default=0.05, help="of both, with momentum 0.9")
    parser.add_argument("--subset", type=int, default=0, help="samples of an epoch; 0 = all")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.accuracy:
        for stages in args.stages.split(","):
            print_line(compare(args.data_root, int(stages), args.epochs, lr=args.lr, subset=args.subset))
        return
    if args.rank >= 0:
        _measure(args)
        return
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "tests.bench.pipeline", *sys.argv[1:], f"--store={folder}/store"]
        environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "FEDRING_RING_LISTEN": "127.0.0.1:0"}
        processes = [subprocess.Popen([*command, f"--rank={r}"], cwd=ROOT, env=environment) for r in range(STAGES)]
        if any(process.wait() for process in processes):
            raise SystemExit(1)


def _measure(args: argparse.Namespace) -> None:
    import fedring.ring  # noqa: F401  # registers the backend

    torch.set_num_threads(1)
    store = FileStore(args.store, STAGES)
    dist.init_process_group("gloo", store=store, rank=args.rank, world_size=STAGES)
    ring = dist.new_group(backend="fedring")
    if not isinstance(ring, dist.ProcessGroup):
        raise RuntimeError("this rank is in every group")
    counts = [int(count) for count in args.counts.split(",")]
    ways = {
        "gloo": (_ours(args, dist.group.WORLD), counts),
        "fedring": (_ours(args, ring), counts),
        "torch over gloo": (_torch(args), [count for count in counts if count >= STAGES]),  # it takes no fewer
    }
    alone = _alone(args)
    lonely: list[float] = []
    spent: defaultdict[tuple[str, int], list[float]] = defaultdict(list)
    for _ in range(args.repeats):  # by turns: a passing load hits all of them
        lonely.append(alone())
        for way, (step, possible) in ways.items():
            for point in search_micro_batches(step, possible, repeats=1).points:
                spent[way, point.micro_batches].append(point.seconds)
    medians = {place: statistics.median(seconds) for place, seconds in spent.items()}
    lines = [_line(args, place, seconds, statistics.median(lonely)) for place, seconds in medians.items()]
    dist.barrier()
    if args.rank == 0:
        for line in lines:
            print_line(line)
        if args.plot:
            _plot(lines, args.plot)
    dist.destroy_process_group()


def _line(args: argparse.Namespace, place: tuple[str, int], seconds: float, alone: float) -> dict[str, Any]:
    way, count = place
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


def _alone(args: argparse.Namespace) -> Callable[[], float]:
    """Measures the seconds of a step of the whole model on rank 0, while the other ranks wait."""
    model, (inputs, targets) = _model(args), _data(args)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        nn.functional.cross_entropy(model(inputs), targets).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        optimizer.zero_grad()

    def measure() -> float:
        seconds = torch.zeros(1, dtype=torch.float64)
        if args.rank == 0:
            step()
            began = time.perf_counter()
            step()
            seconds += time.perf_counter() - began
        dist.broadcast(seconds, 0)
        return seconds.item()

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
    axes.set_title("Two stages: share of twice one process's throughput, %", loc="left", fontsize=11)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3, linewidth=0.6)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=160)


if __name__ == "__main__":
    main()
