"""Measure the seconds of a round and the server's memory with a large model, of which clients change one value.

    python -m tests.bench.big_model [--megabytes 100] [--clients 2 8] [--rounds 4]
    python -m tests.bench.big_model --shared [--turns 3] [--clients 2]

In every round the model goes to the clients in full (4 bytes per parameter), and comes back as fp32 updates, each of
which is synced to the disk before it is accepted. The first round, in which clients import torch and load their data,
is not counted.

With --shared, the server has its state by turns in a folder, and in PostgreSQL and an S3 server, all on the same disk.
"""

import argparse
import os
import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from fedring.ctl.local.runner import run_job
from tests import postgres
from tests.bench.lab.daemons import cpu_seconds, fleet_of, peak_bytes, print_line, resident_bytes
from tests.bench.lab.trainers import vector_job
from tests.s3 import s3_server


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100, help="size of the model")
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 8], help="numbers of clients to measure")
    parser.add_argument("--rounds", type=int, default=4, help="rounds to count")
    parser.add_argument("--shared", action="store_true", help="compare a folder with a state that servers share")
    parser.add_argument("--turns", type=int, default=3, help="turns of each, with --shared")
    args = parser.parse_args()
    size = int(args.megabytes * 1e6 / 4)
    measure = partial(_compare, turns=args.turns) if args.shared else _measure
    rows = {str(count): measure(count, size, args.rounds) for count in args.clients}
    print_line({"bench": "big_model", "megabytes": args.megabytes, "clients": rows})


def _compare(clients: int, size: int, rounds: int, *, turns: int) -> dict[str, Any]:
    """Return what a folder and a shared state need, by turns, and their ratio."""
    found: dict[str, list[dict[str, Any]]] = {"folder": [], "shared": []}
    with (
        tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-s3-") as place,
        s3_server(Path(place), "bench") as env,
    ):
        os.environ.update(env)  # of the servers, too
        for turn in range(turns):
            shared = {"state_url": postgres.shared().new_database(), "blob_url": f"s3://bench/{clients}-{turn}"}
            found["folder"].append(_measure(clients, size, rounds))
            found["shared"].append(_measure(clients, size, rounds, **shared))
    each = {kind: [turn["round_seconds_median"] for turn in measured] for kind, measured in found.items()}
    ratio = statistics.median(each["shared"]) / statistics.median(each["folder"])
    return {"shared_by_folder": round(ratio, 2), "round_seconds_medians": each, **found}


def _measure(clients: int, size: int, rounds: int, **settings: Any) -> dict[str, Any]:
    job = vector_job(size, clients=clients)
    with fleet_of([{}] * clients, **settings) as (fleet, control):
        idle = resident_bytes(fleet.server.pid)
        run_job(fleet, control, {**job, "rounds": 1})  # a warm-up of all clients
        pids = [[fleet.server.pid], [client.pid for client in fleet.clients]]
        used = [cpu_seconds(each) for each in pids]
        measured = run_job(fleet, control, {**job, "rounds": rounds})
        server, client = (cpu_seconds(each) - before for each, before in zip(pids, used, strict=True))
        peak = peak_bytes(fleet.server.pid)
        client_peak = max(peak_bytes(client.pid) for client in fleet.clients)
    seconds = [round_.seconds for round_ in measured]
    return {
        "round_seconds_median": round(statistics.median(seconds), 3),
        "round_seconds": [round(value, 3) for value in seconds],
        "server_cpu_seconds_per_round": round(server / rounds, 3),
        "client_cpu_seconds_per_update": round(client / rounds / clients, 3),
        "upload_bytes": measured[-1].upload_bytes,
        "download_bytes": measured[-1].download_bytes,
        "server_idle_mb": round(idle / 1e6),
        "server_peak_mb": round(peak / 1e6),
        "server_growth_models": round((peak - idle) / (4 * size), 2),
        "client_peak_mb": round(client_peak / 1e6),
    }


if __name__ == "__main__":
    main()
