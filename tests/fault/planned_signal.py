"""Signals that one client gets in the middle of a training step, and what the server reports about the group."""

import os
import random
import re
import time

from fedring.server.round.events import Phase, Round, RoundRules
from fedring.server.round.machine import sample
from fedring.v1 import control_pb2 as pb
from tests.fault.faulty_fleet import wait_for
from tests.fleets import Fleet


class PlannedSignal:
    """A signal that a random client gets in a random forward or backward pass of its model.

    The client's model must contain `signalled_models.SignalAtPass`.

    Args:
        fleet: not started yet.
        number: of the signal; 0 harms nobody.
        passes: training passes of the model; the signal comes before the last one.
        workers: one of the first so many clients gets the signal.
    """

    def __init__(self, fleet: Fleet, number: int, *, passes: int, workers: int) -> None:
        self.step = random.randint(2, passes - 2)
        self.victim = random.randrange(workers)
        self._fleet, self._at = fleet, 0.0
        self._pipe = fleet.directory / "signalled"
        os.mkfifo(self._pipe)
        direction = random.choice(["forward", "backward"])
        fleet.clients[self.victim].env["FL_TEST_SIGNAL"] = f"{number} {self.step} {direction} {self._pipe}"
        print(f"client-{self.victim} gets signal {number} in the {direction} pass {self.step} of {passes}")

    def wait(self) -> None:
        """Return when the client gets the signal."""
        self._at = float(wait_for(self._fleet, f"pass {self.step}", self._pipe.read_text))

    def seconds_since(self) -> float:
        """Return the seconds since the client got the signal."""
        return time.monotonic() - self._at


def workers_and_step(event: pb.Event) -> tuple[int, int]:
    """Return, from a `group_formed` event, the number of workers and the step of the job after which they go on."""
    found = re.search(r"(\d+) workers go on after step (\d+)", event.text)
    assert found, event.text
    return int(found[1]), int(found[2])


def steps_left_by(step: int) -> tuple[int, int]:
    """Return the steps that a group may have done when a worker is killed in the pass `step`, from 1.

    The killed worker has done `step - 1`, but its last bytes of that step may not have left its process.
    """
    return step - 2, step - 1


def seed_that_selects(client: int, workers: int) -> int:
    """Return a job seed for which the first round selects `client` among its `workers` of `workers + 1` clients."""
    names = [f"client-{number}" for number in range(workers + 1)]
    for seed in range(100):
        rules = RoundRules(min_clients=workers + 1, sample_clients=workers, seed=seed)
        if names[client] in sample(names, Round(1, rules, Phase.WAITING, 0.0)):
            return seed
    raise AssertionError(f"no seed below 100 selects {names[client]}")
