"""A shared state as the source of a backup."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import obstore
from sqlalchemy import Connection, NullPool, create_engine

from fedring.daemon.config import ConfigError
from fedring.daemon.durable import create
from fedring.daemon.exits import Exit
from fedring.server.state.backup.contents import BackupError, Contents, NamedBlob, checked, read_contents, write_blob
from fedring.server.state.failures import Deposed, StorageError, StorageFailed, StoreError
from fedring.server.state.shared.leadership import DatabaseSession, open_session
from fedring.server.state.shared.object_blobs import (
    as_storage_errors,
    list_blobs,
    newest_first,
    newest_key,
    open_objects,
    state_ids,
)
from fedring.server.state.sql.copying import copy_tables
from fedring.server.state.sql.database import (
    OTHER_VERSION,
    PAGE_BYTES,
    UNREADABLE,
    check_schema,
    read_version,
    translate,
)
from fedring.server.state.sql.tables import meta

_STEP = 1 << 20  # bytes that are copied at a time
_SNAPSHOT = {"isolation_level": "REPEATABLE READ", "postgresql_readonly": True}


class SharedSource:
    """The state in a database and an object store.

    The interface StateSource documents each method.

    Args:
        session: With the database; it need not lead.
        blob_url: Of the object store.
    """

    def __init__(self, session: DatabaseSession, blob_url: str) -> None:
        self._session, self._objects = session, open_objects(blob_url)
        self._keys: dict[str, dict[str, int]] = {}

    def snapshot(self, copy: Path) -> Contents:
        copy.unlink(missing_ok=True)
        create(copy).close()  # SQLite keeps the mode of an empty file
        with self._session.engine.begin() as connection:
            if not read_version(connection):
                raise ConfigError("there is no state in the database that state_url names")
        with self._session.engine.connect().execution_options(**_SNAPSHOT) as connection, connection.begin():
            # A restore that replaces the tables has ended when this returns, or waits. PostgreSQL would else look up
            # the new tables by their names, and find no rows in them, since the snapshot is older.
            connection.exec_driver_sql(f"LOCK TABLE {meta.name} IN ACCESS SHARE MODE")
            check_schema(read_version(connection))
            with writing(copy) as target:
                copy_tables(connection, target)
            contents = read_contents(copy)
            if contents.state_id not in state_ids(self._objects):  # as long as no restore can change it
                raise ConfigError("state_url and blob_url belong to different states: give both addresses of one state")
        self._keys = list_blobs(self._objects)
        return contents

    def size_of(self, digest: str) -> int:
        keys = self._keys.get(digest)
        return keys[newest_key(keys)] if keys else 0

    def copy_blob(self, blob: NamedBlob, target: Path, tell: Callable[[int], None]) -> int:
        damage = None
        # A restore that fails deletes the objects that it has written, beside those of the state that stays.
        for key in newest_first(self._keys.get(blob.digest, ())):
            try:
                return write_blob(checked(self._parts(key), blob, tell), target)
            except BackupError as error:
                damage = damage or error
            except StorageError as error:
                if error.reason != "missing_blob":
                    raise
        raise damage or FileNotFoundError(blob.digest)

    def _parts(self, key: str) -> Iterator[bytes]:
        with as_storage_errors():
            for part in obstore.get(self._objects, key).stream(_STEP):
                yield bytes(part)


@contextmanager
def shared_source(state_url: str, blob_url: str) -> Iterator[SharedSource]:
    """Open a shared state as the source of a backup.

    Raises:
        ConfigError: One of the two cannot be used, or there is no state.
        BackupError: The state is damaged, or cannot be reached now.
    """
    with as_backup_errors():
        session = open_session(state_url)
        try:
            yield SharedSource(session, blob_url)
        finally:
            session.close()


@contextmanager
def as_backup_errors() -> Iterator[None]:
    """Raise the errors of a backup that stand for a shared state's."""
    try:
        yield
    except Deposed as error:
        raise BackupError(error.why, Exit.TRY_AGAIN) from error
    except StorageFailed as error:
        raise BackupError(f"the shared state cannot be used now ({error})", Exit.TRY_AGAIN) from error
    except StoreError as error:
        kind = ConfigError if error.reason in OTHER_VERSION else BackupError
        raise kind(error.detail) from error
    except StorageError as error:
        raise BackupError(str(error)) from error
    except UNREADABLE as error:
        meaning = translate(error)
        later = isinstance(meaning, StorageFailed | Deposed)
        raise BackupError(f"the database says: {meaning}", Exit.TRY_AGAIN if later else Exit.FAILED) from error


@contextmanager
def writing(facts: Path) -> Iterator[Connection]:
    """Open a new database file, in one transaction.

    It has no log beside it.
    """
    engine = create_engine(f"sqlite:///{facts}", poolclass=NullPool)
    with engine.connect() as connection:
        connection.exec_driver_sql(f"PRAGMA page_size = {PAGE_BYTES}")
        connection.commit()
        with connection.begin():
            yield connection
