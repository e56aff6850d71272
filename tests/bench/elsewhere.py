"""Measure how long a server is away whose disk moves to another machine.

    python -m tests.bench.elsewhere [--turns 3] [--clients 8]

A server with clients is killed with SIGKILL. Its state folder gets another name, as if it were mounted elsewhere, and
a new process serves from it at the same address. Prints one JSON line with the medians of the seconds from the kill
until the new process serves, until the first client is back, and until all are. The new process is a new interpreter,
as on another machine. Nothing here detaches or mounts a volume: whatever moves the disk adds what that takes.
"""

import argparse
import tempfile
import time
from pathlib import Path
from statistics import median

from fedring.ctl.process import Process
from tests.bench.lab.daemons import print_line
from tests.fleets import Control, Fleet, until_watching
from tests.system.wire import vector_job
from tests.waiting import until

PARAMETERS = 1_000_000


def move(fleet: Fleet, clients: int, number: int) -> dict[str, float]:
    """Return the seconds of one move."""
    began = time.monotonic()
    fleet.server.kill()
    old = Path(str(fleet.server.settings["state_dir"]))
    new = old.with_name(f"server-{number}")
    old.rename(new)
    fleet.server.settings["state_dir"] = str(new)
    fleet.start_server()
    found = {"serves": time.monotonic() - began}
    with Control(fleet.control) as control:
        until(lambda: any(client.state == "watching" for client in control.clients()))
        found["first client back"] = time.monotonic() - began
        until_watching(control, clients)
    return found | {"all clients back": time.monotonic() - began}


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=3, help="moves")
    parser.add_argument("--clients", type=int, default=8, help="clients, which are real ones")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet(Path(folder), {}, [{} for _ in range(options.clients)])
        given = fleet.server
        fleet.server = Process(given.name, given.module, given.settings, given.log)
        with fleet:
            with Control(fleet.control) as control:
                until_watching(control, options.clients)
                job = vector_job(rounds=3, min_clients=options.clients, model_args={"size": PARAMETERS})
                for _ in control.follow_job(control.start_job(job).job_id):
                    pass
            turns = [move(fleet, options.clients, number) for number in range(options.turns)]
    seconds = {what: round(median(turn[what] for turn in turns), 2) for what in turns[0]}
    print_line({"clients": options.clients, "parameters": PARAMETERS, "seconds": seconds})


if __name__ == "__main__":
    main()
