"""Fixtures of the system tests: a real fl-server, the connection of an operator, and clients of the wire contract."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fedring.ctl import fleet
from fedring.ctl.main import main
from tests.fleets import Control, Flctl, Fleet
from tests.forks import Daemon
from tests.system.wire import WireClient, stop_jobs


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Fleet]:
    """Start an fl-server without clients for one test; files whose tests share a server replace this fixture."""
    with Fleet(tmp_path) as fleet:
        yield fleet


@pytest.fixture
def control(server: Fleet) -> Iterator[Control]:
    """Connect to the control service; stop the jobs that the test has left, for the server may serve other tests."""
    with Control(server.control) as control:
        yield control
        if server.server.running:
            stop_jobs(control)


@pytest.fixture
def wire(server: Fleet) -> Iterator[WireClient]:
    """Open one client of the wire contract."""
    with WireClient(server.listen) as client:
        yield client


@pytest.fixture
def clients(server: Fleet, control: Control) -> Iterator[Callable[..., list[WireClient]]]:
    """Return a function that opens clients of these names; the fixture ends when the server has noticed their end."""
    opened: list[WireClient] = []

    def open_(*names: str) -> list[WireClient]:
        new = [WireClient(server.listen, name) for name in names or ("a",)]
        opened.extend(new)
        return new

    yield open_
    events = control.events()
    watching = {client.client_id for client in control.clients() if client.state == "watching"}
    for client in opened:
        client.close()
    while watching:
        watching -= {next(event.client_id for event in events if event.kind == "client_lost")}
    events.cancel()


@pytest.fixture
def forked_daemons(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the daemons forks that this process starts in any way: real interpreters import torch for seconds each."""
    monkeypatch.setattr(fleet.Fleet, "daemon", Daemon)


@pytest.fixture
def flctl(forked_daemons: None, capsys: pytest.CaptureFixture[str]) -> Flctl:
    """Return a function that runs flctl in this process; the daemons that it starts are forks."""

    def run(*arguments: str | Path) -> "subprocess.CompletedProcess[str]":
        capsys.readouterr()
        words = [str(argument) for argument in arguments]
        code = main(words)
        captured = capsys.readouterr()
        return subprocess.CompletedProcess(words, code, captured.out, captured.err)

    return run
