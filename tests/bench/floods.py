"""Flood a server beside an honest job: rounds a second, memory, threads and descriptors, as ratios of a quiet run.

    python -m tests.bench.floods [--seconds 60] [--kinds pings,resets] [--source 127.0.0.2] [--server max_clients=100]

Each flood has a server and a client of its own. The rounds a second are those of the job before the flood and during
it. Memory, threads and descriptors are those before the flood and --settle seconds after it. Prints one JSON line for
each flood.
"""

import argparse
import json
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedring.control.calls import Control
from fedring.ctl.fleet import Fleet
from tests.bench.lab.daemons import ROOT, fleet_of, print_line, resident_bytes
from tests.bench.lab.trainers import vector_job
from tests.floods import KINDS

_ROUNDS = 100_000  # more than the job ends
_WARM_UP = 20  # rounds, of which the first are slower


def main() -> None:
    """Measure all floods, one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60, help="length of each flood")
    parser.add_argument("--quiet", type=float, default=20, help="seconds of the job before the flood")
    parser.add_argument("--settle", type=float, default=20, help="seconds from the end of the flood to the last look")
    parser.add_argument("--kinds", default=",".join(KINDS), help="floods, separated by commas")
    parser.add_argument("--source", default="127.0.0.2", help="address that the flood comes from")
    parser.add_argument("--server", action="append", default=[], metavar="KEY=VALUE", help="a key of the server")
    args = parser.parse_args()
    keys = {key: json.loads(value) for key, _, value in (pair.partition("=") for pair in args.server)}
    for kind in args.kinds.split(","):
        print_line({"bench": "floods", "kind": kind, "seconds": args.seconds, **_measure(kind, args, keys)})


def _measure(kind: str, args: argparse.Namespace, keys: Mapping[str, Any]) -> dict[str, Any]:
    with fleet_of([{}], metrics_listen="127.0.0.1:0", **keys) as (fleet, control):
        control.start_job(vector_job(1000, rounds=_ROUNDS))
        while _round(control) < _WARM_UP:
            _wait(0.1)
        quiet = _rounds_per_second(control, args.quiet)
        before = _state_of(fleet)
        target = fleet.ready["metrics"] if kind.endswith("metrics") else fleet.listen
        command = [sys.executable, "-m", "tests.floods", kind, target, str(args.seconds + 2), f"--source={args.source}"]
        flood = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        try:
            _wait(1)
            flooded = _rounds_per_second(control, args.seconds)
            during = _state_of(fleet)
        except Exception as error:  # noqa: BLE001  # a server that has ended is what is to be shown
            return {"ended": not fleet.server.running, "error": str(error), "log": fleet.server.tail()[-400:]}
        finally:
            sent = json.loads(flood.communicate()[0])
        _wait(args.settle)
        after = _state_of(fleet)
        again = _rounds_per_second(control, args.quiet)
    return {
        "rounds_per_second": {"quiet": round(quiet, 2), "flooded": round(flooded, 2), "after": round(again, 2)},
        "ratio": round(flooded / quiet, 3),
        **{
            name: {
                "before": before[name],
                "during": during[name],
                "after": after[name],
                "ratio": round(after[name] / before[name], 3),
            }
            for name in before
        },
        "flood": sent,
    }


def _rounds_per_second(control: Control, seconds: float) -> float:
    began, first = time.monotonic(), _round(control)
    _wait(seconds)
    return (_round(control) - first) / (time.monotonic() - began)


def _round(control: Control) -> int:
    """Return the number of rounds so far."""
    return max((round_.round for round_ in control.rounds(limit=1)), default=0)


def _state_of(fleet: Fleet) -> dict[str, float]:
    """Return what the server's process takes up now."""
    pid = fleet.server.pid
    return {
        "megabytes": round(resident_bytes(pid) / 1e6, 1),
        "threads": len([*Path(f"/proc/{pid}/task").iterdir()]),
        "descriptors": len([*Path(f"/proc/{pid}/fd").iterdir()]),
    }


def _wait(seconds: float) -> None:
    threading.Event().wait(seconds)


if __name__ == "__main__":
    main()
