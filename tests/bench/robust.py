"""Measure what attackers do to each aggregation rule, on MNIST.

    python -m tests.bench.robust --data-root DIR [--cnn] [--quick] [--output FILE] [--markdown FILE]

20 clients with 300 samples each, of which 4 are malicious, train a perceptron for 30 rounds. Each rule, with and
without buckets of 2, meets each attack, with IID samples and with Dirichlet 0.5. The Dirichlet parts are those of the
honest clients: attackers hold IID samples, and without an attack ("none") they are honest. The adaptive attacks, which
are tuned to what the honest clients send, are done with three seeds. With --cnn, a convolutional network meets three of
the attacks, with three seeds. The updates are combined by the server's own code.
"""

import argparse
import json
import multiprocessing
import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, fields
from functools import cache
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import torch
from torch import nn

from fedring.ctl.local.progress import progress_bar
from fedring.data import Samples, Split, mnist
from fedring.data.partition import parts
from fedring.offers import named
from fedring.server.config import ServerConfig
from fedring.train.jobs.job import Job
from tests.attacks.attacker import ADAPTIVE, ATTACKS, Attack
from tests.attacks.rounds import Result, Study, run

CLIENTS, MALICIOUS, SAMPLES = 20, 4, 300
HONEST = CLIENTS - MALICIOUS
ROUNDS = 30
RULES = ("mean", "centered_clip", "geometric_median", "multi_krum", "trimmed_mean", "fltrust")
ALPHA = 0.5
SEEDS = range(3)
Z = (0.5, 1.0, 2.0, 4.0)
"""Of the attack "tuned_little". The attacker takes the one that harms a rule most with the first seed."""
CNN_RULES = ("centered_clip",)
CNN_ATTACKS: tuple[Attack, ...] = ("none", "label_flip", "little_is_enough", "backdoor")
_BRIGHT = 255.0
_OWN_SEED = 1_000
"""Draws the server's own samples, apart from those of the clients."""


@dataclass(frozen=True, slots=True)
class Setting:
    """One training."""

    rule: str
    bucketing: int
    attack: Attack
    partition: str  # iid or dirichlet
    seed: int = 0
    cnn: bool = False
    rounds: int = ROUNDS
    z: float = 0.0  # of the attack "tuned_little"


def mlp() -> nn.Module:
    """Return the perceptron of the study: [batch, 1, 28, 28] to logits [batch, 10], 79,510 parameters."""
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 100), nn.ReLU(), nn.Linear(100, 10))


def own_samples(root: Path | None, download: bool, seed: int = 0) -> Split:
    """Return the server's own samples for fltrust: as many as a client has, of which no client has one."""
    split = mnist(root, download)
    return Split(_drawn(split, seed)[1], split.test, split.classes)


def settings(options: argparse.Namespace) -> Iterator[Setting]:
    """Yield the trainings of a run.

    Inflation is only for the mean: the other rules count each client once, so it would be `label_flip` again.
    """
    cnn, rounds = options.cnn, options.rounds
    seeds, zs = options.seeds or SEEDS, options.z or Z
    attacks: Sequence[Attack] = options.attacks or (CNN_ATTACKS if cnn else ATTACKS)
    names = options.rules or (CNN_RULES if cnn else RULES)
    rules = [("mean", 1)] if cnn or "mean" in names else []
    rules += [
        (rule, size) for size, rule in product(options.bucketing or ((2,) if cnn else (2, 1)), names) if rule != "mean"
    ]
    for (rule, size), partition, attack in product(rules, ("iid",) if cnn else options.partitions, attacks):
        if rule == "mean" or attack != "inflation":
            several = cnn or attack in ADAPTIVE
            for seed, z in product(seeds if several else [0], zs if attack == "tuned_little" else [0.0]):
                yield Setting(rule, size, attack, partition, seed, cnn, rounds, z)
    if not cnn and "none" in attacks:
        for seed, (rule, size) in product((1, 2), (("mean", 1), ("centered_clip", 2))):
            yield Setting(rule, size, "none", "iid", seed, cnn, rounds)


def measure(setting: Setting, data_root: Path) -> Result:
    """Do one training; called in a process of its own."""
    torch.set_num_threads(1)
    study = _study(setting.partition, setting.seed, data_root)
    return run(_job(setting), study, setting.attack, _config(data_root), z=setting.z)


def _job(setting: Setting) -> Job:
    table: dict[str, Any] = {"rule": setting.rule, "bucketing": setting.bucketing}
    if setting.rule == "multi_krum":
        # 10 buckets are too few for 4: Krum needs more than 2 f + 2.
        table["malicious"] = MALICIOUS if setting.bucketing == 1 else 3
    if setting.rule == "trimmed_mean":
        # Each of the attackers may lie in a bucket of its own.
        table["beta"] = MALICIOUS * setting.bucketing / CLIENTS
    if setting.rule == "fltrust":
        table |= {"data": f"{__spec__.name}:own_samples", "args": {"seed": setting.seed}}
    return Job.model_validate(
        {
            "model": "fedring.train.models:mnist_cnn" if setting.cnn else f"{__spec__.name}:mlp",
            "data": "fedring.data:mnist",
            "rounds": setting.rounds,
            "min_clients": CLIENTS,
            "lr": 0.1,
            "momentum": 0.9,
            "seed": setting.seed,
            "aggregation": table,
        }
    )


def _config(data_root: Path) -> ServerConfig:
    own = named(model=f"{__spec__.name}:mlp", data=f"{__spec__.name}:own_samples")
    return ServerConfig.model_construct(trusted=["fedring", *own], data_root=data_root)


@cache
def _study(partition: str, seed: int, data_root: Path) -> Study:
    split = mnist(data_root)
    train, test = _drawn(split, seed)[0], split.test
    if not isinstance(test, Samples):
        raise TypeError("MNIST is not in memory")
    first = HONEST * SAMPLES
    honest, others = train.subset(np.arange(first)), train.subset(np.arange(first, len(train)))
    held = parts(partition, honest.labels.numpy(), count=HONEST, alpha=ALPHA, seed=seed)
    clients = [honest.subset(part) for part in held]
    # Attackers hold no data that only they have, so that what is lost is what the attack does.
    attackers = [others.subset(part) for part in parts("iid", others.labels.numpy(), count=MALICIOUS, alpha=1, seed=0)]
    return Study(clients, attackers, test, split.classes, _BRIGHT)


def _drawn(split: Split, seed: int) -> tuple[Samples, Samples]:
    """Return the samples of all clients, and those of the server."""
    if not isinstance(split.train, Samples):
        raise TypeError("MNIST is not in memory")
    order = np.random.RandomState(seed).permutation(len(split.train))
    every = CLIENTS * SAMPLES
    return split.train.subset(order[:every]), split.train.subset(order[every : every + SAMPLES])


def main() -> None:
    """Run all trainings, write their results, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, default=Path(), help="folder of the data set")
    parser.add_argument("--cnn", action="store_true", help="train the convolutional network")
    parser.add_argument("--quick", action="store_true", help="only 3 rounds, to see that everything runs")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="rounds of each training")
    parser.add_argument("--rules", type=lambda text: text.split(","), help="names, with commas between")
    parser.add_argument("--bucketing", type=int, nargs="*", help="sizes of buckets, 1 = none")
    parser.add_argument("--attacks", type=lambda text: text.split(","), help="names, with commas between")
    parser.add_argument("--partitions", nargs="*", default=["iid", "dirichlet"], help="how samples are divided")
    parser.add_argument("--seeds", type=int, nargs="*", help="of the adaptive attacks and of --cnn")
    parser.add_argument("--z", type=float, nargs="*", help="of the attack tuned_little")
    parser.add_argument("--workers", type=int, default=2, help="trainings at a time")
    parser.add_argument("--output", type=Path, help="file for the results as JSON")
    parser.add_argument("--read", type=Path, nargs="*", help="files of earlier results, to print instead of training")
    parser.add_argument("--markdown", type=Path, help="file for the table")
    options = parser.parse_args()
    if options.quick:
        options.rounds = 3
    if options.read:
        found = [row for path in options.read for row in json.loads(path.read_text(encoding="utf-8"))]
        rows = list(
            {tuple(row.get(field.name, field.default) for field in fields(Setting)): row for row in found}.values()
        )
    else:
        rows = train_all(list(settings(options)), options.data_root, options.workers, options.output)
    table = tables(rows)
    if options.markdown:
        options.markdown.write_text(table, encoding="utf-8")
    sys.stdout.write(table)


def train_all(wanted: Sequence[Setting], data_root: Path, workers: int, output: Path | None) -> list[dict[str, Any]]:
    """Do all trainings, several at a time, and return their settings and results."""
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of the workers, which are as many as there are cores
    rows: list[dict[str, Any]] = []
    context = multiprocessing.get_context("forkserver")
    with ProcessPoolExecutor(workers, context) as pool, progress_bar(speed_seconds=600) as bar:
        task = bar.add_task("trainings", total=len(wanted))
        futures = {pool.submit(measure, setting, data_root): setting for setting in wanted}
        for future in as_completed(futures):
            rows.append(asdict(futures[future]) | asdict(future.result()))
            bar.advance(task)
            if output:  # after each, so that a run that is stopped has not been in vain
                output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return rows


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Return the results for people, as Markdown: tables for each partition, and the means over seeds.

    Cells have the accuracy of the last model in percent, and for backdoors their success behind a slash. Those of the
    adaptive attacks are means over seeds, those of "tuned_little" with the z in parentheses.
    """
    parts = []
    for partition, adaptive in product(("iid", "dirichlet"), (False, True)):
        some = [row for row in rows if row["partition"] == partition and (row["attack"] in ADAPTIVE) == adaptive]
        parts += [_table(some, partition)] if some else []
    for rule in dict.fromkeys(row["rule"] for row in rows if row["seed"]):
        clean = [row for row in rows if (row["rule"], row["partition"], row["attack"]) == (rule, "iid", "none")]
        several = {row["bucketing"] for row in clean if row["seed"]}
        figures = [100 * row["accuracy"] for row in clean if row["bucketing"] in several]
        if figures:
            parts.append(f"{rule} without attackers, {len(figures)} seeds: {mean(figures):.2f}\n")
    return "\n".join(parts)


def _table(rows: Sequence[dict[str, Any]], partition: str) -> str:
    attacks = [attack for attack in ATTACKS if attack in {row["attack"] for row in rows}]
    rules = {(row["rule"], row["bucketing"]) for row in rows}
    lines = [f"| {partition} | {' | '.join(attacks)} |", f"|---{'|---:' * len(attacks)}|"]
    for rule, size in sorted(rules, key=lambda each: (RULES.index(each[0]), each[1])):
        name = f"`{rule}`" + (f", bucketing {size}" if size > 1 else "")
        mine = [row for row in rows if (row["rule"], row["bucketing"]) == (rule, size)]
        cells = (_cell([row for row in mine if row["attack"] == attack]) for attack in attacks)
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(rows: Sequence[dict[str, Any]]) -> str:
    # Other seeds without attackers are told beside the tables.
    same = [row for row in rows if row["cnn"] or not row["seed"] or row["attack"] != "none"]
    if not same:
        return "-"
    first = [row for row in same if not row["seed"]]
    z = min(first, key=lambda row: row["accuracy"]).get("z", 0.0) if first else 0.0
    same = [row for row in same if row.get("z", 0.0) == z]
    accuracy = f"{100 * mean(row['accuracy'] for row in same):.1f}"
    if z:
        return f"{accuracy} ({z:g})"
    if not rows[0]["attack"].endswith("backdoor"):
        return accuracy
    return f"{accuracy} / {100 * mean(row['backdoor'] for row in same):.0f}"


if __name__ == "__main__":
    main()
