"""Repeat two cells of NIID-Bench on MNIST: FedAvg beside SCAFFOLD, with 10 simulated parties whose labels differ.

    python -m tests.bench.niid --data-root DIR [--rounds 50] [--seeds 1] [--cells dirichlet,labels] [--out DIR]

Everything is as in NIID-Bench (Li et al. 2022, github.com/Xtra-Computing/NIID-Bench, scripts and experiments.py): a
CNN of 44,426 parameters, 10 parties that all take part, 10 epochs in each round, batch 64, SGD with 0.01, momentum 0.9
and weight decay 1e-5, 50 rounds. The parties differ as there: the samples of each label are divided by Dirichlet 0.5
("dirichlet"), or each party has two labels ("labels"). The published figures are those of FedBench
(nechbamohammed.github.io/FLBenchmarkUI). Our SCAFFOLD takes plain steps, as its paper says, so it has no momentum, and
FedAvg is also run without. Shows progress on stderr, then a table, and writes niid.json after each job, since the full
setting takes hours.
"""

import argparse
import json
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from rich.progress import Progress, TaskID
from torch import nn

from fedring.ctl.local.progress import progress_bar
from fedring.ctl.output import print_table
from fedring.data import ClientPart, DataError, Samples, Split, mnist
from fedring.offers import offers
from fedring.simulation import simulate
from tests.bench.lab.parts import describe_run

PARTIES, ROUNDS, CONCENTRATION, LEAST = 10, 50, 0.5, 10
LABELS = 10

_NAME = "tests.bench.niid"

JOB: dict[str, Any] = {
    "model": f"{_NAME}:simple_cnn",
    "partition": "none",
    "epochs": 10,
    "batch_size": 64,
    "lr": 0.01,
    "momentum": 0.9,
    "optimizer_args": {"weight_decay": 1e-5},
    "encoding": "fp32",
}

CELLS = {"dirichlet": "Dirichlet 0.5", "labels": "two labels each"}

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("FedAvg", {}),
    "plain": ("FedAvg, no momentum, equal weights", {"momentum": 0.0, "weights": "uniform"}),
    "scaffold": ("SCAFFOLD", {"momentum": 0.0, "weights": "uniform", "scaffold": True}),
}
"""The label and the keys of the job of each way to train; `plain` is what differs from SCAFFOLD in that alone."""

PUBLISHED = {
    ("dirichlet", "fedavg"): 98.85,
    ("dirichlet", "scaffold"): 61.99,
    ("labels", "fedavg"): 97.53,
    ("labels", "scaffold"): 21.81,
}
"""FedBench's accuracies, in percent. Its SCAFFOLD is far below its FedAvg, which SCAFFOLD's is not."""

Indices = NDArray[np.int64]  # [n]


@offers("model")
def simple_cnn() -> nn.Module:
    """Return the CNN of NIID-Bench for MNIST, which maps [batch, 1, 28, 28] to logits [batch, 10]."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(256, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, LABELS)),
    )


@offers("data")
def dirichlet(root: Path | None, download: bool, part: ClientPart) -> Split:
    """Return the samples of a party under Dirichlet 0.5, and its share of the test samples."""
    return _party("dirichlet", root, download, part)


@offers("data")
def labels(root: Path | None, download: bool, part: ClientPart) -> Split:
    """Return the samples of a party with two labels, and its share of the test samples."""
    return _party("labels", root, download, part)


def divided(cell: str, held: NDArray[np.int64], count: int, random: np.random.RandomState) -> list[Indices]:
    """Return the indices of each party's samples.

    Args:
        cell: "dirichlet" or "labels".
        held: The label of each sample, [n].
        count: The parties.
        random: Draws the division.
    """
    return _by_shares(held, count, random) if cell == "dirichlet" else _by_labels(held, count, random)


def _by_shares(held: NDArray[np.int64], count: int, random: np.random.RandomState) -> list[Indices]:
    """Divide the samples of each label by shares from Dir(0.5), until each party has at least 10 samples.

    A party that has its n-th part of all samples gets no samples of further labels.
    """
    while True:
        parts: list[list[Indices]] = [[] for _ in range(count)]
        for label in range(LABELS):
            pool = random.permutation(np.flatnonzero(held == label))
            room = np.array([sum(map(len, part)) < len(held) / count for part in parts])
            shares = random.dirichlet(np.full(count, CONCENTRATION)) * room
            cuts = (np.cumsum(shares / shares.sum()) * len(pool)).astype(np.int64)[:-1]
            for part, more in zip(parts, np.split(pool, cuts), strict=True):
                part.append(more)
        found = [np.sort(np.concatenate(part)) for part in parts]
        if min(map(len, found)) >= LEAST:
            return found


def _by_labels(held: NDArray[np.int64], count: int, random: np.random.RandomState) -> list[Indices]:
    """Give party i the label i and one other; the parties of a label divide its samples evenly."""
    wanted = [(party % LABELS, (party + 1 + random.randint(LABELS - 1)) % LABELS) for party in range(count)]
    parts: list[list[Indices]] = [[] for _ in range(count)]
    for label in range(LABELS):
        owners = [party for party, own in enumerate(wanted) if label in own]
        pool = random.permutation(np.flatnonzero(held == label))
        for party, share in zip(owners, np.array_split(pool, len(owners)), strict=True):
            parts[party].append(share)
    return [np.sort(np.concatenate(part)) for part in parts]


def _party(cell: str, root: Path | None, download: bool, part: ClientPart) -> Split:
    split = mnist(root, download)
    if not isinstance(split.train, Samples) or not isinstance(split.test, Samples):
        raise DataError("no_data", "MNIST is not in memory.")
    # torch's generator is seeded with the job's seed before each call, so all parties draw the same division.
    random = np.random.RandomState(int(torch.randint(2**31, ()).item()))
    parts = divided(cell, split.train.labels.numpy(), part.count, random)
    train = split.train.subset(parts[part.index])
    return Split(train, split.test.subset(np.arange(part.index, len(split.test), part.count)), split.classes)


def main() -> None:
    """Print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True, help="folder with MNIST")
    parser.add_argument("--cells", type=lambda text: text.split(","), default=list(CELLS), help="dirichlet,labels")
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help="ways to train")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each job")
    parser.add_argument("--epochs", type=int, default=JOB["epochs"], help="passes of a party in each round")
    parser.add_argument("--seeds", type=int, default=1, help="seeds, from 0")
    parser.add_argument("--workers", type=int, help="processes that train; by default one for each core")
    parser.add_argument("--device", default="auto", help="where to train: auto, cpu or cuda")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for niid.json")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {}
    for results in measure(options):
        (options.out / "niid.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print_table("MNIST, 10 parties, accuracy in percent", columns(results), table_rows(results))


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Train each way in each cell, and yield the accuracies round by round after each job."""
    runs = [(cell, way, seed) for cell in options.cells for way in options.ways for seed in range(options.seeds)]
    found: dict[tuple[str, str], list[list[float]]] = {}
    full = (options.rounds, options.epochs) == (ROUNDS, JOB["epochs"])
    described = describe_run("niid", quick=False, chosen=not full)
    described |= {"job_rounds": options.rounds, "epochs": options.epochs}
    with progress_bar(speed_seconds=600) as bar:
        task = bar.add_task("niid", total=len(runs))
        for number, (cell, way, seed) in enumerate(runs):
            bar.update(task, description=f"niid: {WAYS[way][0]}, {CELLS[cell]}")
            report = simulate(
                {**JOB, **WAYS[way][1], "data": f"{_NAME}:{cell}", "rounds": options.rounds, "epochs": options.epochs},
                clients=PARTIES,
                per_round=PARTIES,
                seed=seed,
                workers=options.workers,
                device=options.device,
                data_root=options.data_root,
                show=partial(_show, bar, task, number),
            )
            found.setdefault((cell, way), []).append([100 * row["accuracy"] for row in report["rounds"]])
            rows = [{"cell": cell, "way": way, "by_seed": each} for (cell, way), each in found.items()]
            yield described | {"seeds": options.seeds, "rows": rows}


def columns(results: Mapping[str, Any]) -> Sequence[str]:
    """Return the heads of the table's columns."""
    rounds = results["job_rounds"]
    return ("parties", "algorithm", "FedBench>", f"ours, round {rounds}>", "ours, round by round>")


def table_rows(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of the table, for people."""
    found: list[tuple[str, ...]] = []
    for row in results["rows"]:
        last = [each[-1] for each in row["by_seed"]]
        spread = f" ± {pstdev(last):.2f}" if len(last) > 1 else ""
        theirs = PUBLISHED.get((row["cell"], row["way"]))
        way = [fmean(each) for each in zip(*row["by_seed"], strict=True)]
        step = -(-len(way) // 6)
        picked = way[::-step][::-1]
        found.append(
            (
                CELLS[row["cell"]],
                WAYS[row["way"]][0],
                f"{theirs:.2f}" if theirs else "-",
                f"{fmean(last):.2f}{spread}",
                " ".join(f"{value:.1f}" for value in picked),
            )
        )
    return found


def _show(bar: Progress, task: TaskID, before: int, share: float, _row: dict[str, Any] | None) -> None:
    bar.update(task, completed=before + share)


if __name__ == "__main__":
    main()
