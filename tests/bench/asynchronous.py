"""Compare five ways with slow clients on MNIST, in virtual time: who is waited for, and what is learned of whom.

    python -m tests.bench.asynchronous --data-root DIR [--seconds 400] [--seeds 1] [--out DIR] [--cells NAMES]

20 simulated clients train an MLP of 50,890 parameters, with speeds from 1 to 1/10, evenly on a logarithmic scale; the
cell "log-normal" draws them from a log-normal distribution with sigma 0.75, whatever samples a client has. Each way has
the same virtual seconds: a round waits for all ("all"), goes on after twice the median time ("straggler"), draws 20 and
takes the first 15 ("over-selection"), or is a buffer of 5 ("asynchronous") or 10. All clients have samples of all
labels, except in the cell "apart", where the six slowest ones own the labels 7 to 9. Shows the virtual seconds to
97 % on the test samples ("apart": 90 %), and the accuracies at the end, of all labels and of 7 to 9; asynchronous.png
has the errors over virtual time with the first seed.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import nn

from fedring.ctl.local.charts import Series, plot_panels
from fedring.ctl.output import print_table
from fedring.data import ClientPart, DataError, Samples, Split, mnist
from fedring.offers import offers
from fedring.simulation import simulate
from tests.bench.lab.curves import Curves

CLIENTS, SLOW, SPREAD = 20, 6, 10.0
LATE = (7, 8, 9)
_NAME = "tests.bench.asynchronous"

JOB: dict[str, Any] = {
    "model": f"{_NAME}:mlp",
    "evaluator": f"{_NAME}:with_late_labels",
    "partition": "none",
    "subset_size": 640,
    "batch_size": 32,
    "lr": 0.1,
    "momentum": 0.5,
    "weights": "uniform",
    "evaluate": False,
    "evaluate_on_server": True,
    "encoding": "fp32",
    "min_clients": 2,
}

WAYS: dict[str, dict[str, Any]] = {
    "all": {},
    "straggler": {"straggler_factor": 2.0},
    "over-selection": {"sample_clients": 15, "select_factor": 1.3},
    "asynchronous": {"asynchronous": {"concurrency": CLIENTS, "buffer": 5, "max_staleness": 30, "evaluate_every": 2}},
    "buffer of 10": {"asynchronous": {"concurrency": CLIENTS, "buffer": 10, "max_staleness": 30, "evaluate_every": 2}},
}

WANTED = {"alike": 0.97, "log-normal": 0.97, "apart": 0.90}
"""The accuracy to which the time is measured."""

SPEEDS = {f"client-{number}": SPREAD ** (-number / (CLIENTS - 1)) for number in range(CLIENTS)}
TIMING: dict[str, Any] = {"seconds_per_step": 0.05, "speed": {"clients": SPEEDS}}
DRAWN: dict[str, Any] = {**TIMING, "speed": {"sigma": 0.75}}


@offers("model")
def mlp() -> nn.Module:
    """Return an MLP that maps [batch, 1, 28, 28] to logits [batch, 10]."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 64), nn.ReLU(), nn.Linear(64, 10))


@offers("data")
def alike(root: Path | None, download: bool, part: ClientPart) -> Split:
    """Return a client's share of all samples."""
    return _share(root, download, part, apart=False)


@offers("data")
def apart(root: Path | None, download: bool, part: ClientPart) -> Split:
    """Return a client's share of its labels: the slowest ones own 7 to 9."""
    return _share(root, download, part, apart=True)


def _share(root: Path | None, download: bool, part: ClientPart, *, apart: bool) -> Split:
    split = mnist(root, download)
    train, test = split.train, split.test
    if not isinstance(train, Samples) or not isinstance(test, Samples):
        raise DataError("no_data", "MNIST is not in memory.")
    if part.count == 1:  # the server's
        return split
    mine, owners, number = torch.arange(len(train.labels)), part.count, part.index
    if apart:
        slow = part.index >= part.count - SLOW
        late = torch.isin(train.labels, torch.tensor(LATE))
        mine = torch.nonzero(late if slow else ~late).flatten()
        owners, number = (SLOW, part.index - (part.count - SLOW)) if slow else (part.count - SLOW, part.index)
    return Split(train.subset(mine[number::owners].numpy()), test.subset(np.arange(0)), split.classes)


@offers("evaluator")
def with_late_labels(model: nn.Module, samples: Any) -> dict[str, float]:
    """Return the loss and the accuracy, and the accuracy on the labels 7 to 9."""
    inputs, labels = samples.batch(torch.arange(len(samples)))
    with torch.no_grad():
        outputs = model(inputs)
    right = outputs.argmax(1) == labels
    late = torch.isin(labels, torch.tensor(LATE))
    loss = nn.functional.cross_entropy(outputs, labels).item()
    return {
        "num_samples": len(labels),
        "loss": loss,
        "accuracy": right.double().mean().item(),
        "late": right[late].double().mean().item(),
    }


def run(cell: str, way: str, root: Path, seconds: float, seed: int) -> dict[str, Any]:
    """Run one way until its virtual time is over, and return its figures."""
    slowest = TIMING["seconds_per_step"] * SPREAD * (JOB["subset_size"] // JOB["batch_size"])
    much = {"all": 1, "straggler": 2, "over-selection": 2, "asynchronous": 16, "buffer of 10": 8}
    rounds = much[way] * int(seconds / slowest * 1.1 + 2)
    rounds *= 3 if cell == "log-normal" else 1  # its slowest client may be less slow
    report = simulate(
        {
            **JOB,
            **WAYS[way],
            "data": f"{_NAME}:{'apart' if cell == 'apart' else 'alike'}",
            "rounds": rounds,
            "seed": seed,
        },
        clients=CLIENTS,
        timing=DRAWN if cell == "log-normal" else TIMING,
        data_root=root,
        workers=1,
        threads=1,
        engine="local",
    )
    rows = [row for row in report["rounds"] if row["accuracy"] is not None and row["virtual"]["ended"] <= seconds]
    first = next((row["virtual"]["ended"] for row in rows if row["accuracy"] >= WANTED[cell]), None)
    tail = rows[-3:]
    return {
        "cell": cell,
        "way": way,
        "seed": seed,
        "versions": len(rows),
        "to_wanted": first,
        "accuracy": median(row["accuracy"] for row in tail),
        "late": median(row["metrics"]["server/late"] for row in tail),
        "ends": report["virtual_seconds"],
        "curve": [(row["virtual"]["ended"], row["accuracy"]) for row in rows],
    }


def _panel(cell: str, found: Sequence[Mapping[str, Any]]) -> Curves:
    """Return the errors of a cell over virtual time, with the first seed."""
    mine = [each for each in found if each["cell"] == cell and each["seed"] == 0]
    series = [
        Series(each["way"], [100 - 100 * accuracy for _, accuracy in each["curve"]], xs=[at for at, _ in each["curve"]])
        for each in mine
    ]
    return Curves(cell, "virtual seconds", "wrong of the test samples, %", series, log_y=True)


def main(words: Sequence[str] | None = None) -> None:
    """Run all cells, show a table, and write asynchronous.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True, help="the folder of MNIST")
    parser.add_argument("--seconds", type=float, default=400.0, help="virtual seconds (default: 400)")
    parser.add_argument("--seeds", type=int, default=1, help="how many seeds (default: 1)")
    parser.add_argument("--cells", type=lambda text: text.split(","), default=list(WANTED), help=",".join(WANTED))
    parser.add_argument("--out", type=Path, default=Path(), help="folder for asynchronous.json and asynchronous.png")
    args = parser.parse_args(words)
    found = []
    for cell in args.cells:
        for way in WAYS:
            for seed in range(args.seeds):
                found.append(run(cell, way, args.data_root, args.seconds, seed))
                print(json.dumps({key: each for key, each in found[-1].items() if key != "curve"}), flush=True)
    (args.out / "asynchronous.json").write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    plot_panels([_panel(cell, found) for cell in args.cells], args.out / "asynchronous.png", columns=len(args.cells))
    rows = []
    for cell, wanted in ((cell, WANTED[cell]) for cell in args.cells):
        for way in WAYS:
            mine = [each for each in found if (each["cell"], each["way"]) == (cell, way)]
            times = [each["to_wanted"] for each in mine if each["to_wanted"] is not None]
            shown = f"{median(times):.1f} s to {100 * wanted:.0f} %" if len(times) == len(mine) else "not reached"
            rows.append(
                (
                    cell,
                    way,
                    f"{median(each['versions'] for each in mine):.0f}",
                    shown,
                    f"{100 * median(each['accuracy'] for each in mine):.1f} %",
                    f"{100 * median(each['late'] for each in mine):.1f} %",
                )
            )
    print_table("MNIST, speeds 1:10", ("cell", "way", "versions>", "time", "accuracy>", "labels 7 to 9>"), rows)


if __name__ == "__main__":
    main()
