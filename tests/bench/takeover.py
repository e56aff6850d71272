"""Measure how long nobody serves when the leader of two servers ends.

    python -m tests.bench.takeover [--turns 5]

Two servers share a database of PostgreSQL and a folder of objects. By turns, the leader is killed with SIGKILL, stopped
with SIGTERM, and frozen with SIGSTOP, which ends its session once it has been silent for some seconds. Prints one JSON
line with the median seconds from the signal until the other server has printed that it serves. Of a frozen leader, they
end when the other one leads, since nobody else can have its ports on the same machine. Both have imported all that they
need before.
"""

import argparse
import signal
import tempfile
import time
from pathlib import Path
from statistics import median

from fedring.daemon.exits import Exit
from tests import postgres
from tests.bench.lab.daemons import print_line
from tests.fault.two_servers import TwoServers, terms
from tests.waiting import until

SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)


def measure(fleet: TwoServers, database: str, number: signal.Signals) -> float:
    """Return the seconds of one takeover; another standby waits afterwards."""
    term, began = terms(database), time.monotonic()
    fleet.server.send(number)
    if number == signal.SIGSTOP:
        until(lambda: terms(database) > term)
        seconds = time.monotonic() - began
        fleet.server.send(signal.SIGCONT)
        if fleet.server.wait() != Exit.TRY_AGAIN:
            raise RuntimeError("the frozen leader goes on")
        fleet.until_the_standby_leads()
    else:
        fleet.until_the_standby_leads()
        seconds = time.monotonic() - began
        fleet.server.wait()
    fleet.take_turns()
    return seconds


def main() -> None:
    """Print one JSON line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5, help="takeovers of each kind")
    options = parser.parse_args()
    database, found = postgres.shared().new_database(), {number.name: list[float]() for number in SIGNALS}
    with tempfile.TemporaryDirectory() as folder, TwoServers(Path(folder), database) as fleet:
        for _ in range(options.turns):
            for number in SIGNALS:
                found[number.name].append(round(measure(fleet, database, number), 2))
    print_line({"seconds": {name: median(each) for name, each in found.items()}, "measurements": found})


if __name__ == "__main__":
    main()
