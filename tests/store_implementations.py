"""The databases of the server's store; every test of a store runs on each."""

from collections.abc import Callable
from pathlib import Path

from fedring.server.state.sql.store import Store
from tests import postgres

Implementation = Callable[[Path, int], Store]
"""Makes a store in an empty folder that keeps so many events."""


def in_a_file(folder: Path, keep_events: int) -> Store:
    return Store(f"sqlite:///{folder / 'facts.sqlite'}", keep_events=keep_events)


def in_memory(_folder: Path, keep_events: int) -> Store:
    return Store("sqlite://", keep_events=keep_events)


def in_postgres(_folder: Path, keep_events: int) -> Store:
    return Store(postgres.shared().new_database(), keep_events=keep_events)


IMPLEMENTATIONS: tuple[Implementation, ...] = (in_a_file, in_memory, in_postgres)
