"""Real daemons that run rounds with secure aggregation, and are killed meanwhile."""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from fedring.ctl.process import Process
from tests.conftest import path_to
from tests.fault.faulty_fleet import FaultyFleet, job_end, wait_for
from tests.fleets import Control, give_secrets, until_watching
from tests.system.wire import vector_job
from tests.waiting import until

HERE = Path(__file__).parent
TRUSTED = {"trusted": ["fedring", "user_trainers"]}
SERVER = -1
"""The server among daemons that are named by numbers; the others are clients."""
KILLED = 137
SECRET = bytes(range(32))
"""From which the secrets of all clients follow: two fleets round in the same way."""


def secure_job(clients: int, **keys: Any) -> dict[str, Any]:
    """Return a job with secure aggregation of all clients, which learn what the tests can compute."""
    fixed = {
        "model_args": {"size": 1000},
        "trainer": "user_trainers:lesson",
        "min_clients": clients,
        "min_clients_to_aggregate": 2 * clients // 3 + 1,
        "weights": "uniform",
        "deadline_seconds": 240,
        "start": "newest",
        "seed": 0,  # it says which blocks are sent
        "secure_aggregation": {"step_seconds": 120, "keep_ratio": 0.5},
    }
    return vector_job(**fixed | keys)


class SecureFleet(FaultyFleet):
    """A server, and clients that learn the same in a round however often they begin it."""

    def __init__(self, folder: Path, clients: int, settings: Mapping[str, Any] | None = None) -> None:
        super().__init__(folder, TRUSTED | dict(settings or {}), [TRUSTED] * clients, env=path_to(HERE))
        give_secrets(folder, clients, SECRET)
        self.state = Path(self.server.settings["state_dir"])
        self.folders = [Path(client.settings["state_dir"]) for client in self.clients]
        for number, client in enumerate(self.clients):
            client.env["FL_TEST_CLIENT"] = str(number)

    def daemon_of(self, number: int) -> Process:
        """Return the daemon of this number."""
        return self.server if number == SERVER else self.clients[number]

    def start_daemon(self, number: int) -> None:
        """Start a daemon that has ended; return when it is ready, if it is the server."""
        self.start_server() if number == SERVER else self.clients[number].start()

    def kill_at(self, number: int, place: str) -> None:
        """Start a daemon again, which is killed as soon as it comes to a crash point."""
        daemon = self.daemon_of(number)
        daemon.kill()
        daemon.env["FL_CRASH_AT"] = place
        self.start_daemon(number)
        del daemon.env["FL_CRASH_AT"]

    def run_round(self, killed: Mapping[int, str], **keys: Any) -> tuple[str, int]:
        """Run a job of one round in which each of these daemons is killed at a crash point, and started again.

        Args:
            killed: crash points, by the numbers of the daemons.
            keys: of the job.

        Returns:
            The reason for which the round was abandoned, "" if it was published; and how many updates it had.
        """
        for number in sorted(killed):
            self.kill_at(number, killed[number])
        with Control(self.control) as control:
            until_watching(control, len(self.clients))
            job_id = control.start_job(secure_job(len(self.clients), **keys)).job_id
        with ThreadPoolExecutor(max(1, len(killed))) as pool:
            list(pool.map(lambda item: self._bring_back(*item), killed.items()))
        with Control(self.control) as control:
            job_end(self, control, job_id)
            (round_,) = control.rounds(job_id=job_id)
            return round_.reason, round_.delivered

    def digest(self) -> str:
        """Return the digest of the newest model."""
        with Control(self.control) as control:
            return control.models(limit=1)[0].digest

    def wait_until_forgotten(self) -> None:
        """Return when the clients have no secrets of any round, and no update, any more."""
        wait_for(self, "the end of all secrets", lambda: until(lambda: not any(map(secrets_of, self.folders))))

    def _bring_back(self, number: int, place: str) -> None:
        assert wait_for(self, f"the crash {place}", self.daemon_of(number).wait) == KILLED
        self.start_daemon(number)


def secrets_of(folder: Path) -> list[Path]:
    """Return the files with secrets of rounds in a client's state folder."""
    return [path for path in (folder / "secure").glob("*") if path.name not in ("finished.json", "released.json")]
