"""Real clients that owe what their updates left out, and a server whose state is put back to an older one."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedring.server.state.backup.create import back_up
from fedring.server.state.backup.restore import restore
from tests.conftest import path_to
from tests.damage import ask
from tests.fault.books import KEEP, SMALL, Training, copy_state, notes_of, trainings
from tests.fault.patience import FaultyFleet, patiently
from tests.fleets import Fleet
from tests.system.wire import vector_job
from tests.waiting import until

HERE = Path(__file__).parent
TRUSTED = {"trusted": ["fedring", "user_trainers"]}
WAYS = ("restored", "copied")
"""How a state is put back: only the first begins an epoch."""
KEPT: dict[str, Any] = {"keep_models": 100, "keep_update_rounds": 100}


def owing_job(**keys: Any) -> dict[str, Any]:
    """A job whose clients keep back most of what they learn."""
    fixed = {
        "model_args": {"size": SMALL},
        "encoding": "fp32_sparse",
        "keep_ratio": KEEP,
        "trainer": "user_trainers:known",
        "deadline_seconds": 240,
    }
    return vector_job(**fixed | keys)


class OwingFleet(FaultyFleet):
    """A server that keeps all, and clients of which the first waits at a gate in each training."""

    def __init__(self, folder: Path, clients: int = 1, settings: dict[str, Any] | None = None) -> None:
        super().__init__(folder, TRUSTED | KEPT | (settings or {}), [TRUSTED] * clients, env=path_to(HERE))
        self._gate = folder / "gate"
        for name in ("gate", "gate.began"):
            os.mkfifo(folder / name)
        self.folders = [Path(client.settings["state_dir"]) for client in self.clients]
        self.state = Path(self.server.settings["state_dir"])
        for number, client in enumerate(self.clients):
            client.env |= {"FL_TEST_NOTES": str(notes_of(self.folders[number])), "FL_TEST_CLIENT": str(number)}
        self.close_gate()

    def at_the_gate(self) -> Training:
        """The training in which the first client waits, once it does."""
        patiently(self, "client 0 at the gate", self._gate.with_name("gate.began").read_text)
        return trainings(notes_of(self.folders[0]))[-1]

    def at_the_gate_in(self, number: int) -> Training:
        """The same, for the round of that number; trainings for others are let through before."""
        while (training := self.at_the_gate()).round != number:
            self.let_through()
        return training

    def let_through(self) -> None:
        """The first client goes on."""
        patiently(self, "the opening of the gate", lambda: self._gate.write_text("go on"))

    def open_gate(self) -> None:
        """The first client, from its next start on, waits at no gate."""
        del self.clients[0].env["FL_TEST_GATE"]

    def close_gate(self) -> None:
        """The first client, from its next start on, waits at the gate in each training."""
        self.clients[0].env["FL_TEST_GATE"] = str(self._gate)

    def until_accepted(self, number: int, client: str) -> None:
        """Return when the server has the client's update of the round."""
        self._until(lambda: ask(self.state, "SELECT 1 FROM updates WHERE (round, client_id) = (?, ?)", number, client))

    def keep(self, way: str, copy: Path) -> None:
        """Make a copy of the state that can be put back."""
        keep(self, way, copy)

    def put_back(self, way: str, copy: Path) -> Path:
        """Put the copy in the place of the state; returns where the state of before is."""
        return put_back(self, way, copy)

    def _until(self, true: Callable[[], object]) -> None:
        patiently(self, "what is waited for", lambda: until(true))


def start(fleet: Fleet, index: int) -> None:
    """The client, which was killed, runs again."""
    fleet.clients[index].settings["server"] = fleet.listen
    fleet.clients[index].start()


def keep(fleet: Fleet, way: str, copy: Path) -> None:
    """Make a copy of the server's state that can be put back: a backup, or of all files while it does not run."""
    state = Path(fleet.server.settings["state_dir"])
    if way == "restored":
        back_up(state, copy)
        return
    fleet.server.kill()
    copy_state(state, copy)
    fleet.start_server()


def put_back(fleet: Fleet, way: str, copy: Path) -> Path:
    """Stop the server, put the copy in the place of its state, start it; returns where the state of before is."""
    state = Path(fleet.server.settings["state_dir"])
    fleet.server.kill()
    if way == "restored":
        lost = restore(copy, state, replace=True).replaced
        assert lost is not None
    else:
        lost = state.with_name("lost")
        state.rename(lost)
        copy_state(copy, state)
    fleet.start_server()
    return lost
