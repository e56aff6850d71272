"""Putting a whole state into a database and an object store.

No server leads there meanwhile.

The law: one commit of the database decides which state is there. Until then the objects of the new one are named by
nothing, and the old one is complete, or there is none; from then on the new one is. Before the first object is
written, both ids are noted beside the objects, and the term that they are written in. A process that is killed leaves
objects of one of the two, which the next leader moves aside: the commit notes the term in the database, too.
"""

import os
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from pathlib import Path

import obstore
from sqlalchemy import Connection, select, text
from sqlalchemy.exc import DBAPIError

from fedring.daemon.config import ConfigError
from fedring.daemon.crash import crashpoint
from fedring.daemon.exits import Exit
from fedring.server.state.backup.contents import BackupError, NamedBlob, Tell, advancing, checked, parts_of, read_rows
from fedring.server.state.failures import Deposed, StorageError, StorageFailed
from fedring.server.state.files import STATE_ID
from fedring.server.state.rows import MetaRow
from fedring.server.state.shared.leadership import DatabaseSession, Leader, attempt, beating, open_session
from fedring.server.state.shared.object_blobs import (
    NO_STATE,
    PLACED,
    as_storage_errors,
    delete_objects,
    list_blobs,
    move_aside,
    newest_key,
    note_placing,
    open_objects,
    placing_terms,
    state_ids,
    term_of,
    write_object,
)
from fedring.server.state.shared.source import as_backup_errors
from fedring.server.state.sql.copying import copy_tables
from fedring.server.state.sql.database import lock_tables, read_version
from fedring.server.state.sql.sealed import set_meta
from fedring.server.state.sql.tables import METADATA, meta

_PART_BYTES = 8 << 20
_IN_DOUBT = (
    "the database failed during the commit, so it has the new state, or still what was there before: "
    "repeat this when it works again"
)


class SharedPlace:
    """A database and an object store that nobody else writes to.

    Attributes:
        objects: The object store.

    Args:
        session: With the database, which leads.
        blob_url: Of the object store.
    """

    def __init__(self, session: DatabaseSession, blob_url: str) -> None:
        self._session, self.objects = session, open_objects(blob_url)
        self._prefix, self._named = f"blobs/{session.term}/", False
        self._former, self._announced = list[str](), list[str]()  # ids of states
        self._unfinished = set[int]()  # terms of earlier restores that were killed

    def meta(self) -> dict[str, str]:
        """Return the table `meta`; empty if there is no state."""
        with self._session.engine.begin() as connection:
            if not read_version(connection):
                return {}
            return {row.name: row.value for row in connection.execute(select(meta.c.name, meta.c.value))}

    def refuse_strangers(self, state_id: str) -> None:
        """Check that the objects are not those of another state.

        Its database would be elsewhere.

        Raises:
            ConfigError: They are.
        """
        ids = set(state_ids(self.objects))
        if ids - {state_id} and NO_STATE not in ids:
            raise ConfigError("blob_url holds the objects of another state: give it a prefix of its own")

    def announce(self, state_id: str) -> None:
        """Note beside the objects that a new state may come.

        Raises:
            StorageFailed: The object store cannot be used now.
        """
        with self._session.engine.begin() as connection:  # nobody else begins to lead meanwhile
            former = state_ids(self.objects)
            is_empty = not read_version(connection) and (NO_STATE in former or not (former or list_blobs(self.objects)))
            kept = [NO_STATE] if is_empty else former
            announced = kept if state_id in kept else [*kept, state_id]
            unfinished = placing_terms(self.objects)
            self._former, self._announced, self._unfinished = former, announced, unfinished  # only if all are known
            write_object(self.objects, STATE_ID, " ".join(announced).encode())
            # A server that starts after a kill learns from it which blobs are not those of lost commits.
            note_placing(self.objects, self._unfinished | {self._session.term})
        crashpoint("shared_id_added")

    def put_blobs(self, folder: Path, blobs: Sequence[NamedBlob], tell: Tell) -> None:
        """Write blobs from a folder as objects, and check them.

        They belong to this session's term.

        Raises:
            BackupError: One is damaged or missing.
            StorageFailed: The object store cannot be used now.
        """
        try:
            step = advancing(tell, sum((folder / blob.digest).stat().st_size for blob in blobs))
            sizes = {self._key_of(blob): self._put(folder, blob, step) for blob in blobs}
        except FileNotFoundError as error:
            missing = next(blob for blob in blobs if not (folder / blob.digest).exists())
            raise missing.damage("is missing") from error
        crashpoint("shared_blobs_written")
        found = {key: size for keys in list_blobs(self.objects).values() for key, size in keys.items()}
        for key, size in sizes.items():
            if found.get(key) != size:
                raise StorageFailed("disk_error", f"the object {key} has {found.get(key, 0)} bytes instead of {size}")

    def tidy(self, state_id: str, blobs: Sequence[NamedBlob]) -> None:
        """Note the new id alone, and move all other objects below unnamed/.

        These are of the state that was replaced. A server would take models among them for lost commits of the new one,
        if they are newer. What a later leader has written stays.

        Args:
            state_id: Of the new state, whose rows are there.
            blobs: Those that it names.

        Raises:
            StorageError: The object store cannot be used now. The next leader does the rest.
            Deposed: The session does not lead any more, so another leader does so.
        """
        with self._session.engine.begin():  # nobody else begins to lead meanwhile
            write_object(self.objects, STATE_ID, state_id.encode())
        named = {blob.digest for blob in blobs}
        for digest, keys in list_blobs(self.objects).items():
            if digest not in named and term_of(newest_key(keys)) <= self._session.term:
                with as_storage_errors():
                    move_aside(self.objects, digest, keys)
                crashpoint("shared_object_aside")
        with self._session.engine.begin():
            note_placing(self.objects, self._unfinished)

    def discard(self) -> None:
        """Delete the objects that were written, and note the former ids.

        They stay if rows may name them already.

        Raises:
            StorageFailed: The object store cannot be used now.
            Deposed: The session does not lead any more.
        """
        if self._named:
            return
        keys = [key for keys in list_blobs(self.objects).values() for key in keys if key.startswith(self._prefix)]
        with as_storage_errors():
            delete_objects(self.objects, keys)
        if self._announced:
            with self._session.engine.begin(), as_storage_errors():  # nobody else begins to lead meanwhile
                if self._former:
                    write_object(self.objects, STATE_ID, " ".join(self._former).encode())
                else:
                    delete_objects(self.objects, [STATE_ID])
                note_placing(self.objects, self._unfinished)

    def put_rows(
        self,
        facts: Path,
        rows: Sequence[MetaRow] = (),
        before_commit: Callable[[], None] = lambda: None,
    ) -> str:
        """Make the rows of a database file those of this database.

        Args:
            facts: The file, whose blobs have been written as objects.
            rows: What its table `meta` gets.
            before_commit: Called when nothing but the commit is left.

        Returns:
            The name of the schema that the old rows are in now; empty if there was no state.

        Raises:
            BackupError: The database failed, and the message says if it may have the rows all the same.
        """
        try:
            with as_backup_errors(), read_rows(facts) as source, self._session.engine.begin() as connection:
                replaced = _move_aside(connection) if read_version(connection) else ""
                copy_tables(source, connection)
                for row in (*rows, MetaRow(PLACED, str(self._session.term))):
                    set_meta(connection, row.name, row.value)
                before_commit()
                crashpoint("shared_rows_written")
                self._named = True  # whether a commit that fails has been made, only the database knows
        except BackupError as error:
            if not self._named:
                raise
            raise BackupError(f"{_IN_DOUBT} ({error})", Exit.TRY_AGAIN) from error
        crashpoint("shared_rows_committed")
        return replaced

    def _put(self, folder: Path, blob: NamedBlob, tell: Callable[[int], None]) -> int:
        path = folder / blob.digest
        with path.open("rb", buffering=0) as file, as_storage_errors():
            # An error while the parts are read, such as a wrong digest, ends the upload without an object.
            parts = checked(parts_of(file.fileno(), blob, _PART_BYTES), blob, tell)
            obstore.put(self.objects, self._key_of(blob), parts, chunk_size=_PART_BYTES)
        return path.stat().st_size

    def _key_of(self, blob: NamedBlob) -> str:
        return f"{self._prefix}{blob.digest}"


@contextmanager
def led_place(state_url: str, blob_url: str) -> Iterator[SharedPlace]:
    """Lead a shared state in the place of a server.

    No server can do so meanwhile.

    Raises:
        ConfigError: A server leads, or one of the two cannot be used.
        BackupError: Something is damaged, or cannot be reached now.
    """
    with as_backup_errors():
        session = open_session(state_url)
        try:
            found = attempt(session, f"flctl on {socket.gethostname()} (process {os.getpid()})")
            if not isinstance(found, DatabaseSession):
                leader = f": {found.name} leads" if isinstance(found, Leader) else ""
                raise ConfigError(f"the database that state_url names is in use{leader}: stop all its servers first")
            place = SharedPlace(found, blob_url)
            with beating(found):
                try:
                    yield place
                except BaseException:
                    with suppress(StorageError, Deposed, DBAPIError):  # what stays, the next leader moves aside
                        place.discard()
                    raise
        finally:
            session.close()


def _move_aside(connection: Connection) -> str:
    """Move the present state's tables into a schema.

    Its name is returned.

    Raises:
        OperationalError: Somebody reads the tables for too long.
    """
    lock_tables(connection)
    schema = f"replaced_{datetime.now(UTC):%Y%m%dt%H%M%S%f}"
    connection.execute(text(f"CREATE SCHEMA {schema}"))
    for table in METADATA.sorted_tables:
        connection.execute(text(f"ALTER TABLE IF EXISTS {table.name} SET SCHEMA {schema}"))
    return schema
