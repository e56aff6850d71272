"""A database and an object store for copies of states, and what is in them."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sqlalchemy import NullPool, create_engine, make_url, text

from fedring.server.state.backup.create import back_up
from fedring.server.state.shared.leadership import DatabaseSession, attempt, open_session
from fedring.server.state.shared.opening import open_shared
from fedring.server.state.shared.source import shared_source
from fedring.server.state.sql.store import Store
from tests import forks, postgres
from tests.fault.state_folder import rows
from tests.waiting import until


class Place:
    """A new database, and an object store in a folder.

    Args:
        folder: A new one.
        like: Another place, which nobody uses now, and whose content this one gets; else it is empty.
    """

    def __init__(self, folder: Path, like: "Place | None" = None) -> None:
        self.folder = folder
        if like is None:
            (folder / "objects").mkdir(parents=True)
            self.state_url = postgres.shared().new_database()
        else:
            shutil.copytree(like.folder / "objects", folder / "objects")
            self.state_url = postgres.shared().new_database(template=str(make_url(like.state_url).database))
        self.blob_url = (folder / "objects").as_uri()

    @property
    def words(self) -> tuple[str, ...]:
        """The options of flctl that name it."""
        return ("--state-url", self.state_url, "--blob-url", self.blob_url)

    @property
    def settings(self) -> dict[str, str]:
        """The keys of fl-server that name it."""
        return {"state_url": self.state_url, "blob_url": self.blob_url}

    def ask(self, query: str) -> list[tuple[Any, ...]]:
        """Run a query, and commit what it changes."""
        engine = create_engine(self.state_url, poolclass=NullPool)
        with engine.begin() as connection:
            found = connection.execute(text(query))
            return [tuple(row) for row in found] if found.returns_rows else []

    def end_session(self) -> None:
        """End the session that leads."""
        self.ask("SELECT pg_terminate_backend(pid) FROM leader")
        until(lambda: not self.ask("SELECT 1 FROM pg_locks WHERE locktype = 'advisory' AND granted"))

    def meta(self) -> dict[str, str]:
        """Return the table `meta`."""
        return {str(name): str(value) for name, value in self.ask("SELECT name, value FROM meta")}

    def objects(self) -> set[str]:
        """Return the keys of all objects."""
        root = self.folder / "objects"
        return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}

    def rows(self) -> dict[str, list[Any]]:
        """Return the rows of a backup of it, by table."""
        copy = self.folder / "examined"
        shutil.rmtree(copy, ignore_errors=True)
        with shared_source(self.state_url, self.blob_url) as source:
            back_up(source, copy)
        return rows(copy)

    @contextmanager
    def led(self) -> Iterator[Store]:
        """Open it as the server that leads does."""
        session = open_session(self.state_url)
        try:
            leading = attempt(session, "a test")
            assert isinstance(leading, DatabaseSession)
            store, blobs = open_shared(self.folder / "local", self.blob_url, leading)
            blobs.close()
            yield store
            store.close()
        finally:
            session.close()


def kill(point: str, *words: str | Path) -> None:
    """Run flctl, which is killed at this crash point."""
    env = os.environ | {"FL_CRASH_AT": point}
    done = forks.run("fedring.ctl.main", *words, timeout=60, env=env)
    assert done.returncode == 137, done.stderr
