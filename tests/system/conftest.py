"""Real daemons for the system tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedring.ctl.control import Control
from fedring.ctl.fleet import Fleet


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Fleet]:
    """A real fl-server without clients."""
    with Fleet(tmp_path, {"lost_after_seconds": 5}) as fleet:
        yield fleet


@pytest.fixture
def control(server: Fleet) -> Iterator[Control]:
    """flctl's connection to it."""
    with Control(server.control) as control:
        yield control
