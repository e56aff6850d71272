"""Measure what SCAFFOLD gains over FedAvg after equal rounds on MNIST, with clients whose data differ.

    python -m tests.bench.scaffold --data-root DIR [--seeds 3] [--partitions shards,dirichlet] [--encoding int8]

All settings but `scaffold` are the same for both. Shows a bar on stderr, then a table, and prints one JSON line. The
accuracy is that of all test samples, in percent, as the mean over the last LAST rounds and over the seeds.
"""

import argparse
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

from rich.progress import Progress, TaskID
from torch import nn

from fedring.ctl.local.progress import progress_bar
from fedring.ctl.output import print_table
from fedring.simulation import simulate
from tests.bench.lab.daemons import print_line

LAST = 5
"""Rounds whose mean is the result: with few clients in a round, the accuracy jumps from round to round."""

JOB: dict[str, Any] = {
    "model": "tests.bench.scaffold:mlp",
    "data": "fedring.data:mnist",
    "alpha": 0.1,
    "momentum": 0.0,
    "weights": "uniform",
    "batch_size": 50,
}


def mlp() -> nn.Module:
    """Return a perceptron with one hidden layer, which maps [batch, 1, 28, 28] to logits [batch, 10]."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


def main() -> None:
    """Print a table and one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True, help="folder with MNIST")
    parser.add_argument("--partitions", default="shards,dirichlet", help="how samples are divided")
    parser.add_argument("--encoding", default="int8", help="of the updates")
    parser.add_argument("--seeds", type=int, default=3, help="seeds, from 0")
    parser.add_argument("--clients", type=int, default=50, help="clients among whom MNIST is divided")
    parser.add_argument("--per-round", type=int, default=10, help="clients of a round")
    parser.add_argument("--rounds", type=int, default=30, help="rounds of each job")
    parser.add_argument("--epochs", type=int, default=5, help="passes over a client's samples in each round")
    parser.add_argument("--lr", type=float, default=0.05, help="learning rate")
    args = parser.parse_args()
    keys = {key: getattr(args, key) for key in ("rounds", "epochs", "lr", "encoding")}
    cases = [(partition, scaffold) for partition in args.partitions.split(",") for scaffold in (False, True)]
    reports: dict[tuple[str, bool], list[dict[str, Any]]] = {case: [] for case in cases}
    with progress_bar() as bar:
        task = bar.add_task("simulating", total=len(cases) * args.seeds)
        for seed in range(args.seeds):
            for number, (partition, scaffold) in enumerate(cases, start=seed * len(cases)):
                report = simulate(
                    {**JOB, **keys, "partition": partition, "scaffold": scaffold},
                    clients=args.clients,
                    per_round=args.per_round,
                    seed=seed,
                    workers=1,
                    data_root=args.data_root,
                    show=partial(_show, bar, task, number),
                )
                reports[partition, scaffold].append(report)
    rows = [_row(partition, scaffold, found) for (partition, scaffold), found in reports.items()]
    print_table("SCAFFOLD beside FedAvg", list(rows[0]), [[str(value) for value in row.values()] for row in rows])
    print_line({"clients": args.clients, "per_round": args.per_round, **keys, "rows": rows})


def _show(bar: Progress, task: TaskID, before: int, share: float, _row: dict[str, Any] | None) -> None:
    bar.update(task, completed=before + share)


def _row(partition: str, scaffold: bool, reports: list[dict[str, Any]]) -> dict[str, Any]:
    each = [100 * mean(row["accuracy"] for row in report["rounds"][-LAST:]) for report in reports]
    rounds = [row for report in reports for row in report["rounds"]]
    return {
        "partition": partition,
        "algorithm": "SCAFFOLD" if scaffold else "FedAvg",
        "accuracy": round(mean(each), 2),
        "seeds": [round(value, 2) for value in each],
        "upload_bytes": round(mean(row["upload_bytes"] for row in rounds)),
        "download_bytes": round(mean(row["download_bytes"] for row in rounds)),
    }


if __name__ == "__main__":
    main()
