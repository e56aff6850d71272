"""Measure how long nobody serves when the leader of two servers ends.

    python -m tests.bench.takeover [--turns 5] [--crash-points]

Two servers share a database of PostgreSQL and a folder of objects. By turns, the leader is killed with SIGKILL, stopped
with SIGTERM, and frozen with SIGSTOP, which ends its session once it has been silent for some seconds. Prints one JSON
line with the median seconds from the signal until the other server, which answers reads until then, has printed that it
serves. Both have imported all that they need before.

With --crash-points, the leader dies instead at each of its crash points, in the middle of the rounds of four clients,
and the seconds are those from its death. A place is left out where the other server was just starting itself.
"""

import argparse
import signal
import tempfile
import time
from math import isnan
from pathlib import Path
from statistics import median

from fedring.daemon.exits import Exit
from fedring.rpc.probe import Listener, listener_at
from tests import postgres
from tests.bench.lab.daemons import print_line
from tests.fault.counted_job import NAMES, SETTINGS, CountedJob
from tests.fault.killable_clients import KillableClients
from tests.fault.leader_ends import CRASH_POINTS, TwoAddresses, die_at_each
from tests.fault.two_servers import TwoServers
from tests.waiting import until

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)


def measure(fleet: TwoServers, number: signal.Signals) -> float:
    """Return the seconds of one takeover; another standby waits afterwards."""
    answering = str(fleet.standby.settings["control_listen"])
    until(lambda: listener_at(answering) is Listener.PLAINTEXT)
    began = time.monotonic()
    fleet.server.send(number)
    fleet.until_the_standby_leads()
    seconds = time.monotonic() - began
    if number == signal.SIGSTOP:
        fleet.server.send(signal.SIGCONT)
    if fleet.server.wait() != Exit.TRY_AGAIN and number == signal.SIGSTOP:
        raise RuntimeError("the frozen leader goes on")
    fleet.take_turns()
    return seconds


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="takeovers of each kind")
    parser.add_argument("--crash-points", action="store_true", help="let the leader die at each of its crash points")
    options = parser.parse_args()
    found = (at_crash_points if options.crash_points else after_signals)(options.turns)
    print_line({"seconds": {name: median(each) for name, each in found.items()}, "measurements": found})


def after_signals(turns: int) -> dict[str, list[float]]:
    """Return the seconds after each signal."""
    database, found = postgres.shared().new_database(), {number.name: list[float]() for number in SIGNALS}
    with tempfile.TemporaryDirectory() as folder, TwoServers(Path(folder), database, apart=True) as fleet:
        for _ in range(turns):
            for number in SIGNALS:
                found[number.name].append(round(measure(fleet, number), 2))
    return found


def at_crash_points(turns: int) -> dict[str, list[float]]:
    """Return the seconds after a death at each crash point, in the middle of rounds."""
    found = {place: list[float]() for place in CRASH_POINTS}
    for turn in range(turns):
        database, job = postgres.shared().new_database(), CountedJob(turn, 10_000)
        with (
            tempfile.TemporaryDirectory() as folder,
            TwoAddresses(Path(folder), database, settings=SETTINGS) as fleet,
            KillableClients(fleet, job.update_log, NAMES) as clients,
        ):
            job.start(fleet)
            clients.allow_rounds(job.rounds)
            for place, seconds in die_at_each(fleet, clients, CRASH_POINTS).items():
                if not isnan(seconds):
                    found[place].append(round(seconds, 2))
    return {place: each for place, each in found.items() if each}


if __name__ == "__main__":
    main()
