"""A study: how much unequal data costs, with and without FedProx. Usage: python study.py [FOLDER] [ROUNDS]

Three settings are simulated with three seeds each. FOLDER gets study.json, and study.png with the mean accuracy of each
setting over the rounds, within the range of its seeds.
"""

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from fedring.simulation import simulate

JOB = {"lr": 0.1, "momentum": 0.0, "epochs": 5, "batch_size": 8}  # the model and the data are those of the digits
SETTINGS = {
    "equal parts": {"partition": "iid"},
    "Dirichlet 0.1": {"partition": "dirichlet", "alpha": 0.1},
    "Dirichlet 0.1, FedProx": {"partition": "dirichlet", "alpha": 0.1, "mu": 0.1},
}
SEEDS = (0, 1, 2)


def accuracies(keys: dict[str, object], rounds: int, seed: int) -> list[float]:
    """Return the accuracy after each round, with 10 of 100 clients in a round."""
    report = simulate({**JOB, **keys, "rounds": rounds}, clients=100, per_round=10, seed=seed)
    return [row["accuracy"] for row in report["rounds"]]


def main(folder: Path, rounds: int) -> None:
    """Run the study, and write its figures and its plot into the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    results = {name: [accuracies(keys, rounds, seed) for seed in SEEDS] for name, keys in SETTINGS.items()}
    (folder / "study.json").write_text(json.dumps(results))
    numbers = range(1, rounds + 1)
    for name, runs in results.items():
        curves = 100 * np.array(runs)  # [seeds, rounds]
        (line,) = plt.plot(numbers, curves.mean(axis=0), label=name)
        plt.fill_between(numbers, curves.min(axis=0), curves.max(axis=0), color=line.get_color(), alpha=0.2)
    plt.xlabel("round")
    plt.ylabel("accuracy, %")
    plt.legend()
    plt.savefig(folder / "study.png")


if __name__ == "__main__":  # the workers are processes, which import this script
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "study"), int(sys.argv[2]) if len(sys.argv) > 2 else 30)
