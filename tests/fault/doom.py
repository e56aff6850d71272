"""What happens to one client in the middle of a step, and what the server tells of it."""

import os
import random
import re
import time

from fedring.v1 import control_pb2 as pb
from tests.fault.patience import patiently
from tests.fleets import Fleet


class Doom:
    """A signal that one of the first `workers` clients will get in a random pass below `passes` of its model."""

    def __init__(self, fleet: Fleet, number: int, *, passes: int, workers: int) -> None:
        self.step = random.randint(2, passes - 2)
        self.victim = random.randrange(workers)
        self._fleet, self._at = fleet, 0.0
        self._pipe = fleet.directory / "fate"
        os.mkfifo(self._pipe)
        way = random.choice(["forward", "backward"])
        fleet.clients[self.victim].env["FL_TEST_FATE"] = f"{number} {self.step} {way} {self._pipe}"
        print(f"client-{self.victim} gets signal {number} in the {way} pass {self.step} of {passes}")

    def wait(self) -> None:
        """Return when it has happened."""
        self._at = float(patiently(self._fleet, f"pass {self.step}", self._pipe.read_text))

    def noticed_after(self) -> float:
        """Seconds since it happened."""
        return time.monotonic() - self._at


def began_at(event: pb.Event) -> tuple[int, int]:
    """The workers of a group that has formed, and the step of the job that it goes on after."""
    found = re.search(r"(\d+) workers go on after step (\d+)", event.text)
    assert found, event.text
    return int(found[1]), int(found[2])
