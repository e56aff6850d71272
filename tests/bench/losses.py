"""Measure how soon a lost process is noticed, with default settings: seconds from the signal to the event.

    python -m tests.bench.losses [--times 3]

A client in session, and one of four workers in the middle of a data-parallel round, are killed (SIGKILL) and frozen
(SIGSTOP). The server notices the loss of the client, and the other workers that of the worker, which they report.
"""

import argparse
import random
import signal
import threading
import time
from typing import Any

from fedring.v1 import control_pb2 as pb
from tests.bench.lab.daemons import fleet_of, print_line
from tests.fleets import until_watching

WORKERS = 4
SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3, help="losses of each kind")
    args = parser.parse_args()
    seconds = {
        f"{who}_{fate}": [round(lose(number, in_a_group=who == "worker"), 2) for _ in range(args.times)]
        for who in ("client", "worker")
        for fate, number in SIGNALS.items()
    }
    print_line({"bench": "losses", "seconds": seconds})


def lose(number: int, *, in_a_group: bool) -> float:
    """Send the signal to one of the clients, and return the seconds until the server reports its loss."""
    with fleet_of([{}] * WORKERS) as (fleet, control):
        events = control.events()
        if in_a_group:
            control.start_job(long_job())
            wait_for(events, "group_formed")
            threading.Event().wait(1 + random.random())  # at a random moment of the training
        else:
            until_watching(control, WORKERS)
        victim = random.choice(fleet.clients)
        began = time.monotonic()
        victim.send(number)
        wait_for(events, "group_lost" if in_a_group else "client_lost")
        noticed = time.monotonic() - began
        victim.send(signal.SIGKILL)  # so that nothing waits for a frozen process
        return noticed


def long_job() -> dict[str, Any]:
    """Return the keys of a job whose round lasts longer than the measurement."""
    return {
        "mode": "data_parallel",
        "min_clients": WORKERS,
        "min_clients_to_aggregate": 2,
        "rounds": 1,
        "epochs": 10_000,
        "batch_size": 16,
        "data_parallel": {"replacement_seconds": 60},
    }


def wait_for(events: Any, kind: str) -> pb.Event:
    """Return the next event of this kind."""
    found: pb.Event = next(event for event in events if event.kind == kind)
    return found


if __name__ == "__main__":
    main()
