"""Measure simulated clients a second, beside others' in-process simulations of the same work, by turns.

    python -m tests.bench.simulation --flower [--size cnn]

compares with Flower in its own environment, which it makes in a cache folder. A client does one step on 8 samples, of a
model with 9,910 parameters, which travels as fp32; `--size cnn` is the one below. All clients take part in each round,
and nothing is evaluated. Prints one JSON line. The seconds are those of the rounds, without the start of the processes.

    python -m tests.bench.simulation --pfl [--size cnn]

compares with pfl-research (PyPI `pfl` 0.6.0) in its own environment, which it makes in a cache folder: the exact engine
with one and two workers, and the batched one. All compute with one thread in each process. Rates are clients a second
by the clock, and clients a second of a process' own processor time for what runs in one process, since other programs
disturb these less. `--size cnn` has 1,199,882 parameters and one epoch of 100 samples in batches of 20.

    python -m tests.bench.simulation --workers 2 [--size cnn]

compares one worker, so many, and so many simulations of one worker at once, which share nothing but the machine: no
number of workers can be faster than these.

    python -m tests.bench.simulation --large

simulates 10,000 clients instead, of which 100 are drawn for each of 100 rounds, with Dirichlet 0.1 and `uniform`.
"""

import argparse
import json
import multiprocessing
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from fedring.data import Samples, Split
from fedring.simulation import simulate
from tests.bench.lab.daemons import peak_bytes, print_line
from tests.bench.lab.environments import FLOWER, PFL, environment
from tests.bench.lab.turns import alternate
from tests.processes import tree_of

WORK = {
    "model_args": {"hidden": 132},
    "subset_size": 8,
    "batch_size": 8,
    "encoding": "fp32",
    "evaluate": False,
}
CNN = {
    "model": "tests.bench.simulation:convolutional",
    "data": "tests.bench.simulation:hundred_each",
    "batch_size": 20,
    "encoding": "fp32",
    "evaluate": False,
}
SIZES: dict[str, tuple[dict[str, Any], int]] = {"tiny": (WORK, 100), "cnn": (CNN, 10)}
"""By name, a job and its clients, all of which take part in each round."""

LARGE = {
    "model_args": {"hidden": 132},
    "data": "tests.bench.simulation:sixty_thousand",
    "rounds": 100,
    "partition": "dirichlet",
    "alpha": 0.1,
}


def sixty_thousand(root: Path | None, download: bool) -> Split:
    """Return 60,000 training and 10,000 test samples of the digits' shape, as many as MNIST has."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(10, (70_000,), generator=generator)
    inputs = torch.randn(70_000, 1, 8, 8, generator=generator)
    inputs[torch.arange(70_000), 0, 0, labels % 8] += 3.0
    return Split(Samples(inputs[:60_000], labels[:60_000]), Samples(inputs[60_000:], labels[60_000:]), classes=10)


def convolutional() -> nn.Module:
    """Return a network for [batch, 1, 28, 28] with 1,199,882 parameters, without dropout."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(9216, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def hundred_each(root: Path | None, download: bool) -> Split:
    """Return 100 training samples for each of the clients of `--size cnn`."""
    generator, count = torch.Generator().manual_seed(0), 100 * SIZES["cnn"][1]
    inputs, labels = torch.randn(count, 1, 28, 28, generator=generator), torch.arange(count) % 10
    return Split(Samples(inputs, labels), Samples(inputs[:10], labels[:10]), classes=10)


def measure_pfl(python: str, size: str, clients: int, rounds: int) -> dict[str, Any]:
    """Simulate the same work with pfl, in one process."""
    command = [python, str(Path(__file__).with_name("pfl_simulation.py")), size, str(clients), str(rounds)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1200, env=env).stdout
    line = next(json.loads(line) for line in told.splitlines() if line.startswith('{"seconds"'))
    total = clients * rounds
    return {"by_clock": round(total / line["seconds"], 1), "by_processor": round(total / line["processor"], 1)}


def measure_engine(
    job: dict[str, Any], clients: int, engine: str, workers: int, begin: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    """Simulate, and return the clients a second of all rounds but the first one, after which it calls `begin`."""
    marks: list[tuple[float, float]] = []

    def show(share: float, row: dict[str, Any] | None) -> None:
        if row is not None and ((row["round"] == 1 and not marks) or share == 1.0):
            if not marks:
                begin()
            marks.append((time.perf_counter(), time.process_time()))

    simulate(job, clients=clients, workers=workers, threads=1, engine=engine, show=show)
    total = clients * (job["rounds"] - 1)
    (began, worked), (ended, done) = marks[0], marks[-1]
    own = {"by_processor": round(total / (done - worked), 1)} if workers == 1 else {}
    return {"by_clock": round(total / (ended - began), 1), **own}


def beside_pfl(size: str, rounds: int, turns: int) -> dict[str, Any]:
    """Compare the engines with pfl, by turns. The ratios are medians over the turns, each within one turn."""
    python, (work, clients) = environment(PFL), SIZES[size]
    job = {**work, "rounds": rounds + 1, "min_clients": clients}
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "pfl": lambda: measure_pfl(python, size, clients, rounds),
        "exact": lambda: measure_engine(job, clients, "local", 1),
        "exact, 2 workers": lambda: measure_engine(job, clients, "local", 2),
        "batched": lambda: measure_engine(job, clients, "batched", 1),
        "batched, 2 workers": lambda: measure_engine(job, clients, "batched", 2),
    }
    results = alternate(ways, turns)

    def ratio(one: str, other: str, by: str) -> float:
        pairs = zip(results[one], results[other], strict=True)
        return round(float(median(first[by] / second[by] for first, second in pairs)), 2)

    return {
        "size": size,
        "clients": clients,
        "rates": {name: {by: median(row[by] for row in rows) for by in rows[0]} for name, rows in results.items()},
        "exact/pfl by_processor": ratio("exact", "pfl", "by_processor"),
        "exact 2/1 workers by_clock": ratio("exact, 2 workers", "exact", "by_clock"),
        "batched/pfl by_processor": ratio("batched", "pfl", "by_processor"),
        "batched 2 workers/pfl by_clock": ratio("batched, 2 workers", "pfl", "by_clock"),
        "measurements": results,
    }


def measure_apart(job: dict[str, Any], clients: int, count: int) -> dict[str, Any]:
    """Run so many simulations of one worker at once, and return their clients a second together."""
    context = multiprocessing.get_context("spawn")
    rates, begin = context.SimpleQueue(), context.Barrier(count)
    processes = [context.Process(target=_tell_rate, args=(rates, begin, job, clients)) for _ in range(count)]
    for process in processes:
        process.start()
    total = sum(rates.get() for _ in processes)
    for process in processes:
        process.join()
    return {"by_clock": round(total, 1)}


def _tell_rate(rates: Any, begin: Any, job: dict[str, Any], clients: int) -> None:
    rates.put(measure_engine(job, clients, "local", 1, begin.wait)["by_clock"])


def beside_limit(size: str, rounds: int, turns: int, workers: int) -> dict[str, Any]:
    """Compare several workers with one, and with as many simulations at once, by turns. The ratios are medians."""
    work, clients = SIZES[size]
    job = {**work, "rounds": rounds + 1, "min_clients": clients}
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "one": lambda: measure_engine(job, clients, "local", 1),
        "workers": lambda: measure_engine(job, clients, "local", workers),
        "limit": lambda: measure_apart(job, clients, workers),
    }
    results = {name: [row["by_clock"] for row in rows] for name, rows in alternate(ways, turns).items()}
    pairs = [("workers", "one"), ("limit", "one"), ("workers", "limit")]
    ratios = {
        f"{first}/{second}": [one / other for one, other in zip(results[first], results[second], strict=True)]
        for first, second in pairs
    }
    return {
        "size": size,
        "clients": clients,
        "workers": workers,
        "rates": {name: median(rows) for name, rows in results.items()},
        **{name: round(median(rows), 2) for name, rows in ratios.items()},
        "measurements": results,
    }


def measure(job: dict[str, Any], clients: int, per_round: int) -> dict[str, Any]:
    """Simulate a job. Returns the updates a second, and the sum of all processes' peaks of resident memory."""
    peaks = [0]

    def show(share: float, row: dict[str, Any] | None) -> None:
        if share == 1.0:  # the workers still run
            peaks.append(sum(peak_bytes(pid) for pid in tree_of(os.getpid())))

    report = simulate(job, clients=clients, per_round=per_round, show=show)
    return {
        "updates_per_second": round(report["updates_per_second"], 1),
        "seconds": round(report["seconds"], 2),
        "workers": report["workers"],
        "accuracy": report["accuracy"],
        "clients_drawn": report["clients_drawn"],
        "peak_mb": round(max(peaks) / 1e6),
    }


def measure_flower(python: str, size: str, clients: int, rounds: int) -> dict[str, Any]:
    """Simulate the same work with Flower, and return its updates a second."""
    script = Path(__file__).with_name("flower_simulation.py")
    command = [python, str(script), size, str(clients), str(rounds)]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=1200).stdout
    line = next(json.loads(line) for line in told.splitlines() if line.startswith('{"seconds"'))
    return {"updates_per_second": round(clients * rounds / line["seconds"], 1), "version": line["version"]}


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--flower", action="store_true", help="compare with Flower, which is installed in a cache folder"
    )
    parser.add_argument("--clients", type=int, help="clients of each round; by default those of the size")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each measurement")
    parser.add_argument("--turns", type=int, default=3, help="measurements of each, of which the median counts")
    parser.add_argument("--pfl", action="store_true", help="compare with pfl, which is installed in a cache folder")
    parser.add_argument("--size", choices=sorted(SIZES), default="tiny", help="of the work beside a peer")
    parser.add_argument(
        "--workers", type=int, help="compare so many workers with one, and with what the machine can do"
    )
    parser.add_argument("--large", action="store_true", help="simulate 10,000 clients instead")
    options = parser.parse_args()
    if options.large:
        return print_line(measure(LARGE, 10_000, 100))
    if options.workers:
        return print_line(beside_limit(options.size, options.rounds, options.turns, options.workers))
    if options.pfl:
        return print_line(beside_pfl(options.size, options.rounds, options.turns))
    work, usual = SIZES[options.size]
    clients = options.clients or usual
    job = {**work, "rounds": options.rounds, "min_clients": clients}
    ways = {"fedring": lambda: measure(job, clients, clients)}
    if options.flower:
        python = environment(FLOWER)
        ways["flower"] = lambda: measure_flower(python, options.size, clients, options.rounds)
    results = alternate(ways, options.turns)
    rates = {name: median(row["updates_per_second"] for row in rows) for name, rows in results.items()}
    ratio = {"ratio": round(rates["fedring"] / rates["flower"], 2)} if "flower" in rates else {}
    print_line(
        {"size": options.size, "clients": clients, "rounds": options.rounds, **rates, **ratio, "measurements": results}
    )


if __name__ == "__main__":
    main()
