"""How soon a lost process is noticed, with the settings that everybody has: seconds from the signal to the event.

    python -m tests.bench.losses [--times 3]

A client in session, and one of four workers in the middle of a data-parallel round, are killed (SIGKILL) and frozen
(SIGSTOP). The first is noticed by the server, the second by the other workers, who tell the server.
"""

import argparse
import random
import signal
import threading
import time
from typing import Any

from fedring.v1 import control_pb2 as pb
from tests.bench.fleets import fleet_of, print_line
from tests.fleets import until_watching

WORKERS = 4
SIGNALS = {"killed": signal.SIGKILL, "frozen": signal.SIGSTOP}


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--times", type=int, default=3)
    args = parser.parse_args()
    seconds = {
        f"{who}_{fate}": [round(lose(number, in_a_group=who == "worker"), 2) for _ in range(args.times)]
        for who in ("client", "worker")
        for fate, number in SIGNALS.items()
    }
    print_line({"bench": "losses", "seconds": seconds})


def lose(number: int, *, in_a_group: bool) -> float:
    """Seconds until it is known that one of the clients was lost."""
    with fleet_of([{}] * WORKERS) as (fleet, control):
        events = control.events()
        if in_a_group:
            control.start_job(job())
            until(events, "group_formed")
            threading.Event().wait(1 + random.random())  # somewhere in the training
        else:
            until_watching(control, WORKERS)
        victim = random.choice(fleet.clients)
        began = time.monotonic()
        victim.send(number)
        until(events, "group_lost" if in_a_group else "client_lost")
        noticed = time.monotonic() - began
        victim.send(signal.SIGKILL)  # nobody has to wait for one that is frozen
        return noticed


def job() -> dict[str, Any]:
    """A round that is longer than the measurement."""
    return {
        "mode": "data_parallel",
        "min_clients": WORKERS,
        "min_clients_to_aggregate": 2,
        "rounds": 1,
        "epochs": 10_000,
        "batch_size": 16,
        "data_parallel": {"replacement_seconds": 60},
    }


def until(events: Any, kind: str) -> pb.Event:
    """The next event of this kind."""
    found: pb.Event = next(event for event in events if event.kind == kind)
    return found


if __name__ == "__main__":
    main()
