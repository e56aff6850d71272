"""Measure the costs of rounds with a large model, of which clients change one value, beside a bare server.

    python -m tests.bench.big_model [--megabytes 100] [--clients 2 8] [--rounds 4] [--turns 3]
    python -m tests.bench.big_model --shared [--turns 3] [--clients 2]

In every round the model goes to the clients in full (4 bytes per parameter), and comes back as fp32 updates, each of
which is synced to the disk before it is accepted. The first round, in which clients import torch and load their data,
is not counted.

Fedring takes turns with a bare server of grpc.aio that takes in, digests and syncs the same bytes and does nothing
else, and with one that also makes the mean (`tests.bench.lab.bare` says what each leaves out). The memory copy is one
of all bytes that a round moves over the network, in one thread.

With --shared, the server has its state by turns in a folder, and in PostgreSQL and an S3 server, all on the same disk.
"""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedring.ctl.local.runner import run_job
from tests import postgres
from tests.bench.lab.bare import bare_rounds
from tests.bench.lab.daemons import cpu_seconds, fleet_of, peak_bytes, print_line, resident_bytes
from tests.bench.lab.trainers import vector_job
from tests.bench.lab.turns import alternate
from tests.s3 import s3_server

_COPIED = 100_000_000
"""Bytes that are copied at a time: too many for a processor's cache."""


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100, help="size of the model")
    parser.add_argument("--clients", type=int, nargs="+", default=[2, 8], help="numbers of clients to measure")
    parser.add_argument("--rounds", type=int, default=4, help="rounds to count")
    parser.add_argument("--shared", action="store_true", help="compare a folder with a state that servers share")
    parser.add_argument("--turns", type=int, default=3, help="turns of each side of a comparison")
    args = parser.parse_args()
    size = int(args.megabytes * 1e6 / 4)
    measure = _compare if args.shared else _beside_bare
    rows = {str(count): measure(count, size, args.rounds, turns=args.turns) for count in args.clients}
    print_line({"bench": "big_model", "megabytes": args.megabytes, "clients": rows})


def _beside_bare(clients: int, size: int, rounds: int, *, turns: int) -> dict[str, Any]:
    """Return the costs of rounds of fedring and of bare servers, by turns, and how many times a bare one's they are."""
    ways: dict[str, Callable[[], dict[str, Any]]] = {
        "fedring": partial(_measure, clients, size, rounds),
        "bare": partial(_bare, clients, size, rounds, mean=False),
        "bare_with_mean": partial(_bare, clients, size, rounds, mean=True),
        "memory_copy": lambda: {"cpu_seconds": round(_copy_seconds(2 * clients * 4 * size), 3)},
    }
    found = alternate(ways, turns)
    cost = {
        way: round(statistics.median(turn["server_cpu_seconds_per_round"] for turn in found[way]), 3)
        for way in ("fedring", "bare", "bare_with_mean")
    }
    return {
        "server_cpu_seconds_per_round": cost,
        "by_bare": round(cost["fedring"] / cost["bare"], 2) if cost["bare"] else None,
        "by_bare_with_mean": round(cost["fedring"] / cost["bare_with_mean"], 2) if cost["bare_with_mean"] else None,
        **found,
    }


def _bare(clients: int, size: int, rounds: int, *, mean: bool) -> dict[str, Any]:
    # On the same disk as the state of fl-server.
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-bare-") as folder:
        found = bare_rounds(clients, 4 * size, rounds, Path(folder), mean=mean)
    return {
        "round_seconds_median": round(statistics.median(found.round_seconds), 3),
        "round_seconds": [round(value, 3) for value in found.round_seconds],
        "server_cpu_seconds_per_round": round(found.server_cpu_seconds_per_round, 3),
        "server_peak_mb": round(found.server_peak_bytes / 1e6),
    }


def _copy_seconds(size: int) -> float:
    """Return the processor seconds of a copy of so many bytes, a chunk after the other, between pages in use."""
    source = np.ones(min(size, _COPIED), np.uint8)
    target = np.zeros_like(source)
    began = time.process_time()
    for _ in range(0, size, _COPIED):
        np.copyto(target, source)
    return time.process_time() - began


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
