"""The facts of a run in a database that SQLAlchemy knows."""

import sqlite3
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sqlalchemy import Engine, delete, func, select, update

from fedring.server.state.rows import KEEP_EVENTS, EventRow, MetaRow, ModelRow, Pruned, TokenRow
from fedring.server.state.sql import sealed
from fedring.server.state.sql.blob_names import named_blobs
from fedring.server.state.sql.commands import CommandStore
from fedring.server.state.sql.database import (
    EPOCH,
    LOG_BYTES,
    SECRET,
    backup,
    epoch_in,
    meaning_of,
    next_epoch,
    open_database,
    shorten_log,
)
from fedring.server.state.sql.jobs import JobStore, best_by
from fedring.server.state.sql.models import EvaluationStore, ModelStore
from fedring.server.state.sql.pruning import remove_models, remove_updates_and_rounds
from fedring.server.state.sql.rounds import KeptStore, RoundStore
from fedring.server.state.sql.sealed import rows_of
from fedring.server.state.sql.tables import events, meta, models, tokens
from fedring.server.state.sql.transactions import Database
from fedring.server.state.sql.updates import UpdateStore


class Store:
    """The facts of a run, in stores of one concern each.

    Each method of a store is one transaction over all of them. When a method that changes something returns, the change
    is durable; when it raises, nothing was changed. All methods are called from one thread. A row must not name a blob
    that has not been sealed.

    Every method raises StorageFailed if the disk is full or failed, FsyncFailed if a sync failed, and another
    StorageError if the database is damaged ("corrupt") or does not allow the change ("database").

    Attributes:
        run_id: the id of the run, which was drawn when the database was created.
        secret: a random text that is drawn once, too, and that no client may learn.
        state_id: the id that also lies beside the blobs; empty if there is none yet.
        epoch: of the rounds: 0 until the state is restored from a backup, and greater after each restore.

    Args:
        database: "sqlite:///path", or "sqlite://" for one in memory; or an engine, which is open already.
        keep_events: how many of the newest events are kept.
        log_bytes: how long SQLite's log may become.
        migrates: make the tables of an older version those of this one. Nobody else writes to them.

    Raises:
        StoreError: "older_state" or "newer_state" if another version has written the database, "corrupt" if it is
            damaged.
    """

    def __init__(
        self,
        database: str | Engine,
        *,
        keep_events: int = KEEP_EVENTS,
        log_bytes: int = LOG_BYTES,
        migrates: bool = False,
    ) -> None:
        self._database = opened = Database(open_database(database, log_bytes=log_bytes, migrates=migrates))
        self.jobs = JobStore(opened)
        self.rounds = RoundStore(opened)
        self.updates = UpdateStore(opened)
        self.commands = CommandStore(opened)
        self.kept = KeptStore(opened)
        self.models = ModelStore(opened)
        self.evaluations = EvaluationStore(opened)
        self.events = EventStore(opened, keep_events)
        self.tokens = TokenStore(opened)
        found = {row.name: row.value for row in opened.all(select(meta), MetaRow)}
        self.run_id, self.secret = found["run_id"], found[SECRET]
        self.state_id = found.get("state_id", "")
        self.epoch = epoch_in(found)

    def set_state_id(self, state_id: str) -> None:
        """Keep the id that also lies beside the blobs.

        It may be called once for each database.
        """
        with self._database.transaction() as connection:
            sealed.add(connection, MetaRow("state_id", state_id))
        self.state_id = state_id

    def close(self) -> None:
        """Release the database. No other method may be called afterwards."""
        self._database.engine.dispose()

    def backup(self, path: Path) -> None:
        """Copy the whole database to `path`, which must not exist."""
        backup(self._database.engine, path)

    def prune(self, keep_models: int, keep_update_rounds: int, keep_rounds: int, keep_jobs: int = 0) -> Pruned:
        """Remove old rows.

        Open rounds, their updates and the models that jobs start from always stay. Of each client, the number of its
        updates and the newest one's name stay known. Of all models but the newest, and those that `keep_jobs` keeps,
        the residual and the optimizer's state are released.

        Args:
            keep_models: how many of the newest models stay, at least one.
            keep_update_rounds: of how many of the newest ended rounds the updates stay, besides those that transforms
                may ask for.
            keep_rounds: how many of the newest ended rounds stay, at least `keep_update_rounds`.
            keep_jobs: of how many of the newest jobs the newest and the best model stay.
        """
        with self._database.transaction() as connection:
            before = named_blobs(connection)
            removed = remove_updates_and_rounds(connection, keep_update_rounds, keep_rounds)
            rows = rows_of(connection, select(models), ModelRow)
            removed += remove_models(connection, rows, best_by(connection), newest=keep_models, jobs_kept=keep_jobs)
            return Pruned(removed, frozenset(before - named_blobs(connection)))

    def begin_epoch(self) -> None:
        """Count rounds in a new epoch from now on.

        The newest facts were lost.
        """
        with self._database.transaction() as connection:
            epoch = next_epoch({EPOCH: str(self.epoch)})
            sealed.set_meta(connection, EPOCH, str(epoch))
        self.epoch = epoch

    def shorten_log(self) -> None:
        """Shorten the store's files beside the facts themselves.

        This is called when a round has ended.
        """
        if self._database.engine.dialect.name != "sqlite":  # PostgreSQL looks after its own
            return
        try:
            shorten_log(self._database.engine)
        except sqlite3.Error as error:
            raise meaning_of(error) from error

    def log_bytes(self) -> int:
        """Return how much that is now, in bytes; called from any thread."""
        if self._database.engine.dialect.name != "sqlite":
            return 0
        try:
            return Path(f"{self._database.engine.url.database}-wal").stat().st_size
        except OSError:  # there is none yet, or the database is in memory
            return 0

    def named_blobs(self) -> set[str]:
        """Return the names of all blobs that a row names."""
        with self._database.transaction() as connection:
            return named_blobs(connection)

    def probe(self) -> None:
        """Write something durably without changing anything.

        This raises if the store cannot be written to.
        """
        with self._database.transaction() as connection:
            connection.execute(update(meta).values(value=meta.c.value))


class EventStore:
    """The newest events."""

    def __init__(self, database: Database, keep: int) -> None:
        self._database = database
        newest = select(events.c.id).order_by(events.c.id.desc())
        first_of_old = newest.offset(keep).limit(1).scalar_subquery()
        self._remove_old = delete(events).where(events.c.id <= first_of_old)

    def append(self, rows: Sequence[EventRow]) -> None:
        """Add events, and remove the oldest above KEEP_EVENTS.

        Their ids are above all before.
        """
        if rows:
            with self._database.transaction() as connection:
                sealed.add(connection, *rows)
                connection.execute(self._remove_old)

    def after(self, event_id: int, limit: int = 1000) -> list[EventRow]:
        """Return the events with greater ids, oldest first."""
        return self._database.all(
            select(events).where(events.c.id > event_id).order_by(events.c.id).limit(limit), EventRow
        )

    def newest(self, limit: int) -> list[EventRow]:
        """Return the newest events, oldest first."""
        return self._database.all(select(events).order_by(events.c.id.desc()).limit(limit), EventRow)[::-1]

    def last_id(self) -> int:
        """Return the id of the newest event; 0 if there is none."""
        with self._database.transaction() as connection:
            return connection.execute(select(func.max(events.c.id))).scalar() or 0


class TokenStore:
    """The tokens."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(self, row: TokenRow) -> None:
        """Add a token."""
        with self._database.transaction() as connection:
            sealed.add(connection, row)

    def all(self) -> list[TokenRow]:
        """Return all tokens, oldest first."""
        return self._database.all(select(tokens).order_by(tokens.c.created_at, tokens.c.token_id), TokenRow)

    def revoke(self, token_id: str, at: float) -> TokenRow | None:
        """Note when a token was revoked, and return it.

        A token that was revoked before keeps its time. None if there is none.
        """
        with self._database.transaction() as connection:
            row = next(iter(rows_of(connection, select(tokens).where(tokens.c.token_id == token_id), TokenRow)), None)
            if row is not None and row.revoked_at is None:
                row = replace(row, revoked_at=at)
                sealed.put(connection, row)
        return row
