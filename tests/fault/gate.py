"""A gate at which the trainers of `user_trainers` wait, so that a test decides when a training goes on."""

import os
from pathlib import Path

from fedring.ctl import fleet as shipped
from fedring.ctl.process import Process
from tests.fault.faulty_fleet import wait_for


class Gate:
    """Two named pipes in a folder: a client says through one that it waits, and goes on when the other is written."""

    def __init__(self, folder: Path) -> None:
        self._gate, self._began = folder / "gate", folder / "gate.began"
        for path in (self._gate, self._began):
            os.mkfifo(path)

    def close_for(self, client: Process) -> None:
        """Let the client, from its next start on, wait at the gate in each training."""
        client.env["FL_TEST_GATE"] = str(self._gate)

    def remove_for(self, client: Process) -> None:
        """Let the client, from its next start on, train without waiting."""
        del client.env["FL_TEST_GATE"]

    def wait(self, fleet: shipped.Fleet) -> None:
        """Return when a client waits at the gate."""
        assert wait_for(fleet, "a client at the gate", self._began.read_text) == "began"

    def let_through(self, fleet: shipped.Fleet) -> None:
        """Let the waiting client go on."""
        wait_for(fleet, "the opening of the gate", lambda: self._gate.write_text("go on"))
