"""Real daemons for the system tests."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.fleets import Control, Fleet
from tests.system.wire import WireClient


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Fleet]:
    """A real fl-server without clients."""
    with Fleet(tmp_path) as fleet:
        yield fleet


@pytest.fixture
def control(server: Fleet) -> Iterator[Control]:
    """flctl's connection to it."""
    with Control(server.control) as control:
        yield control


@pytest.fixture
def clients(server: Fleet, control: Control) -> Iterator[Callable[..., list[WireClient]]]:
    """Opens clients, by their names; at the end the server knows that they are gone."""
    opened: list[WireClient] = []

    def open_(*names: str) -> list[WireClient]:
        new = [WireClient(server.listen, name) for name in names or ("a",)]
        opened.extend(new)
        return new

    yield open_
    events = control.events()
    here = {client.client_id for client in control.clients() if client.state == "watching"}
    for client in opened:
        client.close()
    while here:
        here -= {next(event.client_id for event in events if event.kind == "client_lost")}
    events.cancel()
