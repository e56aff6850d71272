"""What mutual TLS costs: uploads, downloads and allreduces, encrypted and in plaintext, alternating, as ratios.

    python -m tests.bench.tls [--megabytes 100] [--rounds 5] [--repeats 3]

Prints one JSON line for the federated mode and one for the ring; a ratio is the share of plaintext's throughput that
is left with mutual TLS. The ring sends everything over its streams, as between hosts: nothing through shared memory.
"""

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedring.ctl.control import Control
from fedring.ctl.fleet import Fleet
from fedring.rpc.channel import open_sync_channel
from fedring.rpc.tls import PLAINTEXT
from tests.bench.fleets import ROOT, TRUSTED, print_line, run_job
from tests.pki import Pki

_WAYS = ("plaintext", "tls")
_RING_BYTES = 26_214_400


def main() -> None:
    """Measure both modes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=float, default=100, help="size of the model that goes down and up")
    parser.add_argument("--rounds", type=int, default=5, help="rounds each way")
    parser.add_argument("--repeats", type=int, default=3, help="runs of the ring each way")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=Path.cwd(), prefix=".bench-") as folder:
        with contextlib.redirect_stdout(sys.stderr):
            pki = Pki(Path(folder) / "pki")
            pki.issue("client-0")
        print_line(_federated(Path(folder), pki, args))
    print_line(_ring(args.repeats))


def _federated(folder: Path, pki: Pki, args: argparse.Namespace) -> dict[str, Any]:
    size = int(args.megabytes * 1e6 / 4)
    job = {
        "model": "fedring.train.models:vector",
        "model_args": {"size": size},
        "trainer": "tests.bench.trainers:barely_changed",
        "data": "tests.bench.trainers:data",
        "encoding": "fp32",
        "rounds": 1,
        "min_clients": 1,
        "evaluate": False,
    }
    seconds: dict[str, list[tuple[float, float]]] = {way: [] for way in _WAYS}
    with contextlib.ExitStack() as stack:
        controls = {way: stack.enter_context(_fleet(folder, pki, way)) for way in _WAYS}
        for turn in range(args.rounds + 1):  # the first warms up
            for way, control in controls.items():
                (client,) = run_job(control, job)[0].clients
                if turn:
                    seconds[way].append((client.upload_seconds, client.download_seconds))
    facts: dict[str, Any] = {"bench": "tls", "mode": "federated", "megabytes": args.megabytes, "rounds": args.rounds}
    for place, direction in enumerate(("upload", "download")):
        speeds = {way: 4 * size / statistics.median(pair[place] for pair in pairs) for way, pairs in seconds.items()}
        facts |= {f"{direction}_{way}_mb_per_second": round(speed / 1e6, 1) for way, speed in speeds.items()}
        facts[f"{direction}_ratio"] = round(speeds["tls"] / speeds["plaintext"], 3)
    return facts


@contextlib.contextmanager
def _fleet(folder: Path, pki: Pki, way: str) -> Iterator[Control]:
    """A server and a client, and a connection to its control port."""
    secure = way == "tls"
    server, client = ({"tls": pki.table(name)} if secure else {} for name in ("server", "client-0"))
    trusted: dict[str, Any] = {"trusted": TRUSTED}
    env = {"PYTHONPATH": ":".join([str(ROOT), *sys.path])}
    with (
        Fleet(folder / way, trusted | server, [trusted | client], env=env) as fleet,
        open_sync_channel(fleet.control, pki.tls("operator") if secure else PLAINTEXT) as channel,
        Control(fleet.control, channel=channel) as control,
    ):
        yield control


def _ring(repeats: int) -> dict[str, Any]:
    times: dict[str, list[float]] = {way: [] for way in _WAYS}
    for _ in range(repeats):
        for way in _WAYS:
            command = [sys.executable, "-m", "tests.bench.allreduce", "--streams-only", f"--sizes={_RING_BYTES}"]
            done = subprocess.run(
                [*command, *(["--tls"] if way == "tls" else [])],
                cwd=ROOT,
                stdout=subprocess.PIPE,
                text=True,
                check=True,
            )
            times[way].append(json.loads(done.stdout.splitlines()[-1])["fedring_ms"])
    medians = {way: statistics.median(spent) for way, spent in times.items()}
    ratio = round(medians["plaintext"] / medians["tls"], 3)
    facts = {f"allreduce_{way}_ms": round(median, 2) for way, median in medians.items()}
    return {"bench": "tls", "mode": "ring", "bytes": _RING_BYTES, "ranks": 2, **facts, "ratio": ratio}


if __name__ == "__main__":
    main()
