"""Measure what secure aggregation costs in time, bytes and memory, beside plain rounds of the same fleet.

    python -m tests.bench.secure_round [--parameters 1200000] [--clients 8] [--rounds 5] [--turns 3]

The training takes almost no time, so that the seconds of a round are those of the system. Jobs without and with secure
aggregation take turns. The first round of each job is not counted.
"""

import argparse
import statistics
from collections import defaultdict
from typing import Any

from fedring.control.calls import Control
from fedring.ctl.fleet import Fleet
from fedring.ctl.local.runner import run_job
from tests.bench.lab.daemons import cpu_seconds, fleet_of, peak_bytes, print_line
from tests.bench.lab.trainers import vector_job

CASES: dict[str, dict[str, Any]] = {
    "fp32": {"encoding": "fp32"},
    "uniform": {"encoding": "uniform"},
    "secure": {"secure_aggregation": {}},
    "secure, 10 % of the blocks": {"secure_aggregation": {"keep_ratio": 0.1}},
}


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters", type=int, default=1_200_000, help="size of the model")
    parser.add_argument("--clients", type=int, default=8, help="client daemons to start")
    parser.add_argument("--rounds", type=int, default=5, help="rounds to count of each job")
    parser.add_argument("--turns", type=int, default=3, help="jobs of each kind")
    args = parser.parse_args()
    seconds: dict[str, list[float]] = defaultdict(list)
    rows: dict[str, dict[str, Any]] = {}
    for case, keys in CASES.items():  # a fleet of its own each, for the memory
        with fleet_of([{}] * args.clients) as (fleet, control):
            rows[case] = _measure(fleet, control, args.parameters, args.clients, keys)
    with fleet_of([{}] * args.clients) as (fleet, control):
        for _ in range(args.turns):
            for case, keys in CASES.items():
                job = _job(args.parameters, args.clients, keys)
                measured = run_job(fleet, control, {**job, "rounds": args.rounds + 1})[1:]
                seconds[case] += [round_.seconds for round_ in measured]
    plain = statistics.median(seconds["fp32"])
    for case, row in rows.items():
        middle = statistics.median(seconds[case])
        row |= {"round_seconds_median": round(middle, 3), "times_fp32": round(middle / plain, 2)}
        row |= {"beyond_fp32_seconds": round(middle - plain, 3), "round_seconds": [round(s, 3) for s in seconds[case]]}
    print_line({"bench": "secure_round", "parameters": args.parameters, "clients": args.clients, "cases": rows})


def _job(size: int, clients: int, keys: dict[str, Any]) -> dict[str, Any]:
    fixed = {"trainer": "tests.bench.lab.trainers:noisy", "weights": "uniform"}
    return vector_job(size, clients=clients, **{**fixed, **keys})


def _measure(fleet: Fleet, control: Control, size: int, clients: int, keys: dict[str, Any]) -> dict[str, Any]:
    run_job(fleet, control, {**_job(size, clients, keys), "rounds": 1})  # a warm-up of all clients
    pids = [[fleet.server.pid], [client.pid for client in fleet.clients]]
    used = [cpu_seconds(each) for each in pids]
    measured = run_job(fleet, control, {**_job(size, clients, keys), "rounds": 3})
    server, client = (cpu_seconds(each) - before for each, before in zip(pids, used, strict=True))
    uploaded = statistics.median(round_.upload_bytes for round_ in measured) / clients
    return {
        "upload_of_fp32": round(uploaded / (4 * size), 4),
        "server_cpu_seconds_per_round": round(server / 3, 3),
        "client_cpu_seconds_per_update": round(client / 3 / clients, 3),
        "server_peak_mb": round(peak_bytes(fleet.server.pid) / 1e6),
        "client_peak_mb": round(max(peak_bytes(each.pid) for each in fleet.clients) / 1e6),
    }


if __name__ == "__main__":
    main()
