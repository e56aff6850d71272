"""Measure simulated clients a second, beside Flower's in-process simulation of the same work, by turns.

    python -m tests.bench.simulation --flower PYTHON

PYTHON is the interpreter of an environment with `flwr[simulation]` and torch. A client does one step on 8 samples, of a
model with 9,910 parameters, which travels as fp32. All clients take part in each round, and nothing is evaluated.
Prints one JSON line. The seconds are those of the rounds, without the start of the processes.

    python -m tests.bench.simulation --large

simulates 10,000 clients instead, of which 100 are drawn for each of 100 rounds, with Dirichlet 0.1 and `uniform`.
"""

import argparse
import json
import os
import subprocess
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fedring.data import Samples, Split
from fedring.simulation import simulate
from tests.bench.lab.daemons import peak_bytes, print_line
from tests.bench.lab.turns import alternate

WORK = {
    "model_args": {"hidden": 132},
    "subset_size": 8,
    "batch_size": 8,
    "encoding": "fp32",
    "evaluate": False,
}
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


def measure(job: dict[str, Any], clients: int, per_round: int) -> dict[str, Any]:
    """Simulate a job. Returns the updates a second, and the sum of all processes' peaks of resident memory."""
    peaks = [0]

    def show(share: float, row: dict[str, Any] | None) -> None:
        if share == 1.0:  # the workers still run
            peaks.append(sum(peak_bytes(pid) for pid in _tree(os.getpid())))

    report = simulate(job, clients=clients, per_round=per_round, show=show)
    return {
        "updates_per_second": round(report["updates_per_second"], 1),
        "seconds": round(report["seconds"], 2),
        "workers": report["workers"],
        "accuracy": report["accuracy"],
        "clients_drawn": report["clients_drawn"],
        "peak_mb": round(max(peaks) / 1e6),
    }


def measure_flower(python: str, clients: int, rounds: int) -> dict[str, Any]:
    """Simulate the same work with Flower, and return its updates a second."""
    script = Path(__file__).with_name("flower_simulation.py")
    command = [python, str(script), str(clients), str(rounds)]
    told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, timeout=600).stdout
    line = next(json.loads(line) for line in told.splitlines() if line.startswith('{"seconds"'))
    return {"updates_per_second": round(clients * rounds / line["seconds"], 1), "version": line["version"]}


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flower", metavar="PYTHON", default="", help="interpreter with flwr[simulation]")
    parser.add_argument("--clients", type=int, default=100, help="clients of each round")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of each measurement")
    parser.add_argument("--turns", type=int, default=3, help="measurements of each, of which the median counts")
    parser.add_argument("--large", action="store_true", help="simulate 10,000 clients instead")
    options = parser.parse_args()
    if options.large:
        return print_line(measure(LARGE, 10_000, 100))
    job = {**WORK, "rounds": options.rounds, "min_clients": options.clients}
    ways = {"fedring": lambda: measure(job, options.clients, options.clients)}
    if options.flower:
        ways["flower"] = lambda: measure_flower(options.flower, options.clients, options.rounds)
    results = alternate(ways, options.turns)
    rates = {name: median(row["updates_per_second"] for row in rows) for name, rows in results.items()}
    ratio = {"ratio": round(rates["fedring"] / rates["flower"], 2)} if "flower" in rates else {}
    print_line({"clients": options.clients, "rounds": options.rounds, **rates, **ratio, "measurements": results})


def _tree(pid: int) -> list[int]:
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [pid, *(other for child in children for other in _tree(child))]


if __name__ == "__main__":
    main()
