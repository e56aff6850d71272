"""Measure what mutual TLS costs: uploads, downloads and all-reduces with TLS and in plaintext, by turns, as ratios.

    python -m tests.bench.tls [--megabytes 100] [--rounds 5] [--repeats 3]

Prints one JSON line for the federated mode and one for the ring. A ratio is the share of plaintext's throughput that
mutual TLS reaches. The ring sends everything through its streams, as between hosts, and nothing through shared memory.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

from fedring.control.calls import Control
from fedring.ctl.fleet import Fleet
from fedring.ctl.local.runner import run_job
from tests.bench.lab.daemons import ROOT, fleet_of, print_line
from tests.bench.lab.trainers import vector_job
from tests.bench.lab.turns import alternate
from tests.pki import Pki

_WAYS = ("plaintext", "tls")
_RING_BYTES = 26_214_400


def main() -> None:
    """Measure both modes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100, help="size of the model that goes down and up")
    parser.add_argument("--rounds", type=int, default=5, help="rounds with TLS, and as many without")
    parser.add_argument("--repeats", type=int, default=3, help="runs of the ring with TLS, and as many without")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.redirect_stdout(sys.stderr):
            pki = Pki(Path(folder) / "pki")
            pki.issue("client-0")
        print_line(_federated(pki, args))
    print_line(_ring(args.repeats))


def _federated(pki: Pki, args: argparse.Namespace) -> dict[str, Any]:
    size = int(args.megabytes * 1e6 / 4)
    job = vector_job(size, rounds=1)
    with contextlib.ExitStack() as stack:
        fleets = {
            "plaintext": stack.enter_context(fleet_of([{}])),
            "tls": stack.enter_context(
                fleet_of([{"tls": pki.table("client-0")}], operator=pki.tls("operator"), tls=pki.table("server"))
            ),
        }
        seconds = alternate({way: partial(_round, *fleets[way], job) for way in _WAYS}, args.rounds, warm_up=1)
    facts: dict[str, Any] = {"bench": "tls", "mode": "federated", "megabytes": args.megabytes, "rounds": args.rounds}
    for place, direction in enumerate(("upload", "download")):
        speeds = {way: 4 * size / statistics.median(pair[place] for pair in pairs) for way, pairs in seconds.items()}
        facts |= {f"{direction}_{way}_mb_per_second": round(speed / 1e6, 1) for way, speed in speeds.items()}
        facts[f"{direction}_ratio"] = round(speeds["tls"] / speeds["plaintext"], 3)
    return facts


def _round(fleet: Fleet, control: Control, job: dict[str, Any]) -> tuple[float, float]:
    """Run one round, and return the seconds of the only client's upload and download."""
    (client,) = run_job(fleet, control, job)[0].clients
    return client.upload_seconds, client.download_seconds


def _ring(repeats: int) -> dict[str, Any]:
    times = alternate({way: partial(_all_reduce_ms, way) for way in _WAYS}, repeats)
    medians = {way: statistics.median(spent) for way, spent in times.items()}
    ratio = round(medians["plaintext"] / medians["tls"], 3)
    facts = {f"allreduce_{way}_ms": round(median, 2) for way, median in medians.items()}
    return {"bench": "tls", "mode": "ring", "bytes": _RING_BYTES, "ranks": 2, **facts, "ratio": ratio}


def _all_reduce_ms(way: str) -> float:
    """Run the benchmark of all-reduces in processes of its own, and return the median milliseconds of the ring."""
    command = [sys.executable, "-m", "tests.bench.allreduce", "--streams-only", f"--sizes={_RING_BYTES}"]
    if way == "tls":
        command.append("--tls")
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    return float(json.loads(done.stdout.splitlines()[-1])["fedring_ms"])


if __name__ == "__main__":
    main()
