"""Three rules for slow clients, over virtual time. Usage: python over_time.py [FOLDER] [ROUNDS]

The same job is simulated with speeds of 1:10. Each round waits for all 10 clients, or goes on after 1.5 times the
median time, or draws 13 clients and takes the first 10. FOLDER gets over-time.png: accuracies over virtual seconds.
"""

import sys
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt

from fedring.simulation import simulate

JOB = {"partition": "dirichlet", "alpha": 1.0, "lr": 0.1, "batch_size": 8, "encoding": "fp32", "seed": 1}
TIMING = {"seconds_per_step": 0.05, "speed": {"spread": 10}, "bandwidth": {"median": 20}}
RULES: dict[str, dict[str, Any]] = {
    "waiting for all": {"sample_clients": 10},
    "straggler_factor": {"sample_clients": 10, "straggler_factor": 1.5},
    "over-selection": {"sample_clients": 10, "select_factor": 1.3},
}


def main(folder: Path, rounds: int) -> None:
    """Simulate the job under each rule, print a line for it, and draw all of them into one plot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, keys in RULES.items():
        report = simulate({**JOB, **keys, "rounds": rounds}, clients=50, timing=TIMING, workers=1, threads=1)
        rows = report["rounds"]
        left_out = sum(len(row["virtual"]["left_out"]) for row in rows)
        print(
            f"{name}: {len(rows)} rounds, {report['updates']} updates, {left_out} left out, "
            f"{report['virtual_seconds']:.1f} virtual seconds"
        )
        plt.plot([row["virtual"]["ended"] for row in rows], [100 * row["accuracy"] for row in rows], label=name)
    plt.xlabel("virtual seconds")
    plt.ylabel("accuracy, %")
    plt.legend()
    plt.savefig(folder / "over-time.png")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "over-time"), int(sys.argv[2]) if len(sys.argv) > 2 else 20)
