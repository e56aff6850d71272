"""Opening a shared state, once this server leads."""

import uuid
from pathlib import Path

from obstore.store import ObjectStore
from sqlalchemy import select

from fedring.server.state.backup.exchange import is_occupied
from fedring.server.state.blob_interfaces import Blobs
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.failures import StorageError
from fedring.server.state.files import SHARED, STATE_ID
from fedring.server.state.shared.leadership import DatabaseSession
from fedring.server.state.shared.object_blobs import (
    NO_STATE,
    PLACED,
    ObjectBlobs,
    list_blobs,
    open_objects,
    put_aside_unfinished,
    state_ids,
    write_object,
)
from fedring.server.state.sql.database import UNREADABLE, check_released, read_version, translate
from fedring.server.state.sql.store import Store
from fedring.server.state.sql.tables import meta

_ADVICE = "Give both addresses of one state, or two new ones. Nothing was changed."


def check_same_state(session: DatabaseSession, objects: ObjectStore) -> None:
    """Check that a database and objects may be of one state.

    Nothing is changed.

    Raises:
        StorageError: "wrong_state" if they are not, "older_state" or "newer_state" if another version has written it.
    """
    try:
        with session.engine.begin() as connection:
            version = read_version(connection)
            if version:
                check_released(version)
    except UNREADABLE as error:
        raise translate(error) from error
    stored = _noted(session, STATE_ID) if version else ""
    beside = state_ids(objects)
    if beside and (stored or NO_STATE) not in beside:
        raise StorageError("wrong_state", f"state_url and blob_url belong to different states. {_ADVICE}")


def open_shared(folder: Path, blob_url: str, session: DatabaseSession, *, adopt: bool = True) -> tuple[Store, Blobs]:
    """Open the database and the objects of a state.

    They are created if both are empty, and those of an older version are migrated.

    Args:
        folder: this server's own state folder.
        blob_url: of the object store.
        session: with the database, which leads.
        adopt: give an id to a state that has none, because it is new.

    Raises:
        StorageError: "wrong_state" if the two belong to different states; nothing was changed then. Another reason if
            one of them cannot be used.
        ConfigError: there is no such object store.
        Deposed: this server leads no more.
    """
    objects = open_objects(blob_url)
    beside = state_ids(objects)
    store = Store(session.engine, migrates=True)
    try:
        stored = store.state_id
        own = stored or NO_STATE
        strangers = own not in beside if beside else bool(list_blobs(objects) or store.named_blobs())
        if not stored and is_occupied(folder):
            way = "move it with flctl migrate, or give the server another state_dir"
            raise StorageError("wrong_state", f"{folder} holds a state, and the database does not: {way}")
        if strangers:
            raise StorageError("wrong_state", f"state_url and blob_url belong to different states. {_ADVICE}")
        if adopt and beside != [stored]:
            # A start that is killed between any two of these is simply repeated.
            if not stored:
                made = uuid.uuid4().hex
                write_object(objects, STATE_ID, f"{NO_STATE} {made}".encode())
                store.set_state_id(made)
            write_object(objects, STATE_ID, store.state_id.encode())
        if adopt:
            put_aside_unfinished(objects, store.named_blobs, int(_noted(session, PLACED) or 0))
        blobs = ObjectBlobs(objects, FileBlobs(folder / SHARED, durable=False), session.term)
    except BaseException:
        store.close()
        raise
    return store, blobs


def _noted(session: DatabaseSession, name: str) -> str:
    """Return a fact about the whole database, or an empty text."""
    try:
        with session.engine.begin() as connection:
            return str(connection.execute(select(meta.c.value).where(meta.c.name == name)).scalar() or "")
    except UNREADABLE as error:
        raise translate(error) from error
