"""Fixtures of the unit tests: a scripted fl-server, flctl, a disk that does not wait, groups of secure aggregation."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.scripted_server import SECONDS, ScriptedServer
from tests.secure_sums import Group, group_of

from fedring.ctl.main import main


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give peers in a ring so much time that they are not lost if the machine does nothing for a few seconds."""
    monkeypatch.setenv("FEDRING_RING_LOST_AFTER_SECONDS", str(SECONDS))


@pytest.fixture
def server() -> Iterator[ScriptedServer]:
    """Yield a scripted fl-server that listens."""
    server = ScriptedServer()
    server.start()
    yield server
    server.close()


@pytest.fixture
def settings(server: ScriptedServer, tmp_path: Path) -> dict[str, Any]:
    """Return the arguments with which `connect` reaches the scripted server."""
    return {"server": f"127.0.0.1:{server.port}", "client_id": "alice", "state_dir": tmp_path / "state"}


@pytest.fixture
def flctl(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """Return a function that runs flctl and returns its exit code, stdout and stderr."""

    def call(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return code, captured.out, captured.err

    return call


@pytest.fixture
def fast_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write without waiting for the disk; that it waits is the business of `fedring.daemon.durable`."""
    monkeypatch.setattr("os.fsync", lambda fd: None)


@pytest.fixture
def make_group(tmp_path: Path) -> Callable[..., Group]:
    """Return a function that makes a group of so many clients of secure aggregation in one round."""

    def group(count: int, **command: Any) -> Group:
        return group_of(count, tmp_path, **command)

    return group
