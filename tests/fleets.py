"""Daemons for tests, and the way to their server: as everybody has them, but for their patience.

A busy machine keeps a process waiting for seconds. Here that makes nobody lost; tests of losses say what they need.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import grpc

from fedring.ctl import control, fleet
from fedring.ctl.process import Process
from tests.forks import Daemon
from tests.ports import free_port

PATIENCE = 60.0
"""Seconds of silence, of an answer, of a start: longer than any machine on which the tests can pass stands still."""

PATIENT = {"FEDRING_SERVER_LOST_AFTER_SECONDS": str(PATIENCE), "FEDRING_RING_LOST_AFTER_SECONDS": str(PATIENCE)}
"""The same, for daemons that a test starts as people do."""


class Fleet(fleet.Fleet):
    """A server that waits long for clients that are silent, and clients that wait so for each other."""

    daemon: ClassVar[type[Process]] = Daemon
    silence: ClassVar[float] = PATIENCE  # seconds after which a silent client or peer is lost

    def __init__(
        self,
        directory: Path,
        server_overrides: Mapping[str, Any] | None = None,
        clients: Sequence[Mapping[str, Any]] = (),
        *,
        env: Mapping[str, str] | None = None,
    ) -> None:
        # Not any ports: while a server is restarted, somebody else could get one of those.
        ports = {key: f"127.0.0.1:{free_port()}" for key in ("listen", "control_listen")}
        settings = {"lost_after_seconds": self.silence, **ports, **(server_overrides or {})}
        if settings.get("web_port") == 0:
            settings["web_port"] = free_port()
        patient = {"FEDRING_RING_LOST_AFTER_SECONDS": str(self.silence), **(env or {})}
        super().__init__(directory, settings, clients, env=patient)


class Programs(Fleet):
    """Such a fleet whose daemons are no forks: an interpreter of its own starts each, as people start them."""

    daemon = Process


class Control(control.Control):
    """An operator who waits long for an answer."""

    def __init__(self, address: str, *, channel: grpc.Channel | None = None, timeout_seconds: float = PATIENCE) -> None:
        super().__init__(address, channel=channel, timeout_seconds=timeout_seconds)


def until_watching(control: control.Control, count: int) -> None:
    """Wait until this many clients are connected."""
    events = control.events()
    while sum(client.state == "watching" for client in control.clients()) < count:
        next(event for event in events if event.kind == "client_joined")
    events.cancel()
