"""Fleets of daemons for tests, with timeouts that a busy machine does not reach.

A busy machine keeps a process waiting for seconds, which must not count as a loss. Tests of losses set their own times.
"""

import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import grpc

from fedring.client.policy.secret import SECRET_FILE
from fedring.control import calls
from fedring.ctl import fleet
from fedring.ctl.process import Process
from fedring.daemon.durable import create_durably
from fedring.simulation import client_secret
from fedring.v1 import control_pb2
from tests.forks import Daemon
from tests.ports import free_port

PATIENCE = 60.0
"""Seconds for silence, for an answer, for a start: longer than any machine on which the tests pass stands still."""

PATIENT = {"FEDRING_SERVER_LOST_AFTER_SECONDS": str(PATIENCE), "FEDRING_RING_LOST_AFTER_SECONDS": str(PATIENCE)}
"""The same as variables, for daemons that a test starts without `Fleet`."""

Flctl = Callable[..., "subprocess.CompletedProcess[str]"]
"""Runs flctl with these arguments."""


class Fleet(fleet.Fleet):
    """A server and clients that take each other for lost only after `silence` seconds."""

    daemon: ClassVar[type[Process]] = Daemon
    silence: ClassVar[float] = PATIENCE  # seconds after which a silent client or peer is lost

    def __init__(
        self,
        directory: Path,
        server_overrides: Mapping[str, Any] | None = None,
        clients: Sequence[Mapping[str, Any]] = (),
        *,
        env: Mapping[str, str] | None = None,
        code: Sequence[Path] = (),
    ) -> None:
        # Fixed ports: while a server is restarted, another process could get a port that the system has chosen.
        ports = {key: f"127.0.0.1:{free_port()}" for key in ("listen", "control_listen")}
        settings = {"lost_after_seconds": self.silence, **ports, **(server_overrides or {})}
        if settings.get("web_port") == 0:
            settings["web_port"] = free_port()
        patient = {"FEDRING_RING_LOST_AFTER_SECONDS": str(self.silence), **(env or {})}
        super().__init__(directory, settings, clients, env=patient, code=code)


class Programs(Fleet):
    """Such a fleet whose daemons are not forks: a new interpreter runs each, as for users."""

    daemon = Process


class Control(calls.Control):
    """A control connection that waits PATIENCE seconds for an answer."""

    def __init__(self, address: str, *, channel: grpc.Channel | None = None, timeout_seconds: float = PATIENCE) -> None:
        super().__init__(address, channel=channel, timeout_seconds=timeout_seconds)


def give_secrets(folder: Path, clients: int, secret: bytes) -> None:
    """Give the clients of a fleet in a folder, which has not started, the secrets that simulated ones have."""
    for name in (f"client-{number}" for number in range(clients)):
        create_durably(folder / "state" / name / SECRET_FILE, client_secret(secret, name))


def until_watching(control: calls.Control, count: int) -> None:
    """Wait until this many clients are connected."""
    events = control.events()
    while sum(client.state == "watching" for client in control.clients()) < count:
        next(event for event in events if event.kind == "client_joined")
    events.cancel()


def run_job(control: calls.Control, spec: Mapping[str, Any]) -> control_pb2.Job:
    """Start a job, and return it when it has ended, in whatever way."""
    events = control.events()
    job_id = control.start_job(dict(spec)).job_id
    for _ in control.follow_job(job_id, events):
        pass
    return control.job(job_id)
