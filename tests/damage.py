"""Damage to files of a state folder, as by a failing disk, and queries to its database."""

import random
import sqlite3
import struct
from contextlib import closing
from pathlib import Path

from sqlalchemy import NullPool, create_engine, select

from fedring.server.state.files import database_url
from fedring.server.state.sql import sealed
from fedring.server.state.sql.schema import TABLE_OF
from fedring.server.state.sql.tables import ROW_DIGEST


def flip(path: Path, bit: int | None = None, *, seed: int = 0) -> int:
    """Flip one bit of the file, by default one that `seed` chooses; return its number."""
    bit = random.Random(seed).randrange(8 * path.stat().st_size) if bit is None else bit
    with path.open("r+b") as file:  # write one byte only: a server may be writing the others
        file.seek(bit // 8)
        (byte,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))
    return bit


def last_commit_of(log: Path) -> int:
    """Return where the last commit begins in a sound log of a database."""
    data = log.read_bytes()
    frame = 24 + struct.unpack_from(">I", data, 8)[0]
    starts = [at for at in range(32, len(data), frame) if data[at + 8 : at + 16] == data[16:24]]
    ends = [at + frame for at in starts if struct.unpack_from(">I", data, at + 4)[0]]
    return ends[-2] if len(ends) > 1 else 32


def ask(state: Path, query: str, *values: object) -> list[tuple[object, ...]]:
    """Run a query on the database of a state, which a server may be using; return the rows."""
    with closing(sqlite3.connect(state / "facts.sqlite")) as database:
        rows: list[tuple[object, ...]] = database.execute(query, values).fetchall()
        database.commit()
    return rows


def write(state: Path, query: str, *values: object) -> None:
    """Run a query on the database of a state, and give each row the digest of its values, as the server does."""
    ask(state, query, *values)
    with create_engine(database_url(state), poolclass=NullPool).begin() as connection:
        for kind, table in TABLE_OF.items():
            if ROW_DIGEST in table.c:
                columns = [column for column in table.c if column.name != ROW_DIGEST]
                for row in connection.execute(select(*columns)).mappings().all():
                    sealed.put(connection, sealed.row_of(kind, dict(row)))


def set_epoch(state: Path, epoch: object) -> None:
    """Set the epoch in the database of a state, as `flctl restore` does."""
    write(state, "INSERT OR REPLACE INTO meta VALUES ('epoch', ?, x'')", str(epoch))


def model_file(state: Path, version: int) -> Path:
    """Return the file of a model version."""
    ((name,),) = ask(state, "SELECT blob FROM models WHERE version = ?", version)
    return state / "blobs" / str(name)


def update_file(state: Path, client: str) -> Path:
    """Return the file of the client's newest accepted update, which must be too large for a row."""
    ((name,),) = ask(state, "SELECT blob FROM updates WHERE client_id = ? ORDER BY round DESC LIMIT 1", client)
    assert name, "the update is stored in its row"
    return state / "blobs" / str(name)
