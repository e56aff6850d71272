"""Measure what a round costs in addition to its slowest client's training, with real daemons on MNIST.

    python -m tests.bench.overhead --data-root DIR [--rounds 10] [--encoding fp32] [--clients 2]

The model is the CNN of 1.2 M parameters, with batches of 64 and one epoch of 6,000 samples. A round is measured from
the command to the published model, without evaluation. The first round, in which clients load their data, has a key
of its own.
"""

import argparse
import statistics
from pathlib import Path

from fedring.ctl.local.presets import Dataset, preset_job
from fedring.ctl.local.runner import run_job
from tests.bench.lab.daemons import fleet_of, peak_bytes, print_line


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data-root", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--rounds", type=int, default=10, help="rounds of the job")
    parser.add_argument("--encoding", default="fp32", help="encoding of updates")
    parser.add_argument("--clients", type=int, default=2, help="client daemons to start")
    args = parser.parse_args()
    everyone = {"min_clients": args.clients, "min_clients_to_aggregate": args.clients}
    job = {**preset_job(Dataset.MNIST), **everyone, "rounds": args.rounds, "encoding": args.encoding}
    parts = [
        {"data_root": str(args.data_root.absolute()), "partition_index": index, "partition_count": args.clients}
        for index in range(args.clients)
    ]
    with fleet_of([{**part, "clients_on_host": args.clients} for part in parts]) as (fleet, control):
        rounds = run_job(fleet, control, job)
        server, client = peak_bytes(fleet.server.pid), max(peak_bytes(process.pid) for process in fleet.clients)
    beyond = [round_.seconds - round_.train_seconds_max for round_ in rounds]
    last = rounds[-1]
    print_line(
        {
            "bench": "overhead",
            "encoding": args.encoding,
            "clients": args.clients,
            "beyond_training_seconds_median": round(statistics.median(beyond[1:]), 4),
            "beyond_training_seconds": [round(value, 4) for value in beyond[1:]],
            "first_round": round(beyond[0], 3),
            "train_seconds_max": round(statistics.median(round_.train_seconds_max for round_ in rounds), 3),
            "accuracy": round(last.eval_correct / max(last.eval_total, 1), 4),
            "server_peak_mb": round(server / 1e6),
            "client_peak_mb": round(client / 1e6),
        }
    )


if __name__ == "__main__":
    main()
