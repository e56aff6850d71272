"""Real clients that keep residuals, and a server whose state is reverted to an older one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedring.server.state.backup.create import back_up
from fedring.server.state.backup.restore import restore
from fedring.v1 import control_pb2 as pb
from tests.conftest import path_to
from tests.damage import ask
from tests.fault.faulty_fleet import FaultyFleet, job_end, wait_for
from tests.fault.gate import Gate
from tests.fault.residuals import (
    KEEP,
    SMALL,
    Training,
    copy_files,
    knows_newest_acceptance,
    notes_path,
    read_trainings,
)
from tests.fleets import Control, Fleet, until_watching
from tests.system.wire import vector_job
from tests.waiting import until

HERE = Path(__file__).parent
TRUSTED = {"trusted": ["fedring", "user_trainers"]}
WAYS = ("restored", "copied")
"""How a state is reverted: by `flctl restore`, which begins a new epoch, or by a copy of its files, which does not."""
KEPT: dict[str, Any] = {"keep_models": 100, "keep_update_rounds": 100}


def residual_job(**keys: Any) -> dict[str, Any]:
    """Return a job whose updates leave most of what the clients learn in their residuals."""
    fixed = {
        "model_args": {"size": SMALL},
        "encoding": "fp32_sparse",
        "keep_ratio": KEEP,
        "trainer": "user_trainers:known",
        "deadline_seconds": 240,
    }
    return vector_job(**fixed | keys)


class ResidualFleet(FaultyFleet):
    """A server that keeps all models and updates, and clients, the first of which waits at a gate in each training."""

    def __init__(self, folder: Path, clients: int = 1, settings: dict[str, Any] | None = None) -> None:
        super().__init__(folder, TRUSTED | KEPT | (settings or {}), [TRUSTED] * clients, env=path_to(HERE))
        self._gate = Gate(folder)
        self.folders = [Path(client.settings["state_dir"]) for client in self.clients]
        self.state = Path(self.server.settings["state_dir"])
        for number, client in enumerate(self.clients):
            client.env |= {"FL_TEST_NOTES": str(notes_path(self.folders[number])), "FL_TEST_CLIENT": str(number)}
        self.close_gate()

    def start_job(self, **keys: object) -> int:
        """Start a job of all clients once they are connected; return its id."""
        with Control(self.control) as control:
            until_watching(control, len(self.clients))
            return control.start_job(residual_job(min_clients=len(self.clients), **keys)).job_id

    def finish_job(self, job_id: int) -> list[pb.Round]:
        """Wait until the job has completed; return its rounds, oldest first."""
        with Control(self.control) as control:
            job_end(self, control, job_id)
            job = control.job(job_id)
            assert (job.state, job.reason) == ("completed", "")
            return control.rounds(job_id=job_id)[::-1]

    def wait_at_gate(self) -> Training:
        """Return the training in which the first client waits, once it does."""
        self._gate.wait(self)
        return read_trainings(notes_path(self.folders[0]))[-1]

    def wait_at_gate_in_round(self, number: int) -> Training:
        """Let the first client through until it waits in its training for this round; return the training."""
        while (training := self.wait_at_gate()).round != number:
            self.let_through()
        return training

    def let_through(self) -> None:
        """Let the first client, which waits at the gate, go on."""
        self._gate.let_through(self)

    def remove_gate(self) -> None:
        """Let the first client, from its next start on, train without waiting."""
        self._gate.remove_for(self.clients[0])

    def close_gate(self) -> None:
        """Let the first client, from its next start on, wait at the gate in each training."""
        self._gate.close_for(self.clients[0])

    def wait_until_accepted(self, number: int, client: str) -> None:
        """Return when the server has the client's update of the round."""
        query = "SELECT 1 FROM updates WHERE (round, client_id) = (?, ?)"
        self._until("an update", lambda: ask(self.state, query, number, client))

    def wait_until_known(self, index: int = 0) -> None:
        """Return when the client has recorded the acceptance of its newest update."""
        folder, name = self.folders[index], self.clients[index].name
        self._until("a recorded acceptance", lambda: knows_newest_acceptance(folder, self.state, name))

    def _until(self, what: str, condition: Callable[[], object]) -> None:
        wait_for(self, what, lambda: until(condition))


def start_client(fleet: Fleet, index: int) -> None:
    """Start the client again that was killed."""
    fleet.clients[index].settings["server"] = fleet.listen
    fleet.clients[index].start()


def save_state(fleet: Fleet, way: str, copy: Path) -> None:
    """Copy the server's state: "restored" by a backup of the running server, "copied" as files while it is down."""
    state = Path(fleet.server.settings["state_dir"])
    if way == "restored":
        back_up(state, copy)
        return
    fleet.server.kill()
    copy_files(state, copy)
    fleet.start_server()


def revert_state(fleet: Fleet, way: str, copy: Path) -> Path:
    """Stop the server, replace its state by the copy, start it; return where the replaced state is."""
    state = Path(fleet.server.settings["state_dir"])
    fleet.server.kill()
    if way == "restored":
        replaced = restore(copy, state, replace=True).replaced
        assert replaced is not None
    else:
        replaced = state.with_name("lost")
        state.rename(replaced)
        copy_files(copy, state)
    fleet.start_server()
    return replaced
