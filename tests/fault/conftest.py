"""Fixtures of the fault tests: a server that a test kills or damages."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fleets import Control, Fleet


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Start an fl-server without clients."""
    with Fleet(tmp_path) as fleet:
        yield fleet


@pytest.fixture
def state(fleet: Fleet) -> Path:
    """Return the server's state folder."""
    return fleet.directory / "state" / "server"


@pytest.fixture
def control(fleet: Fleet) -> Iterator[Control]:
    """Connect to the server's control service."""
    with Control(fleet.control) as control:
        yield control
