"""The session with the database of the leading server.

It holds a lock: PostgreSQL gives the lock to one session at a time, and takes it back when the session ends. All writes
go over that session, so a server that has lost the lock cannot write: no clock decides. A *term* numbers the leaders.
It is checked in each transaction, for the case that something between server and database has replaced the session in
silence.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from threading import Event, Thread
from typing import Any
from uuid import uuid4

from sqlalchemy import Connection, Engine, StaticPool, create_engine, event, text
from sqlalchemy.engine import URL, ExceptionContext, make_url
from sqlalchemy.exc import DBAPIError

from fedring.daemon.config import ConfigError
from fedring.server.state.failures import Deposed, StorageFailed
from fedring.server.state.shared import replication
from fedring.server.state.sql.database import translate

log = logging.getLogger(__name__)

LOCK = 0x6665_6472_696E_67  # "fedring" in ASCII
SILENT_SECONDS = 5.0
"""How old the leader's last beat may be, by the database's clock, before another server ends its session."""

BEAT_SECONDS = 1.0
_PATIENCE = {
    "connect_timeout": 5,
    "keepalives_idle": 2,
    "keepalives_interval": 2,
    "keepalives_count": 2,
    "tcp_user_timeout": 8000,  # of a host that has lost its power, nothing comes, not even the end of a connection
    "application_name": "fl-server",
}
_POOLER = "state_url leads to a pooler that changes sessions (PgBouncer: pool_mode): give PostgreSQL's own address"
_ENDS = ("08", "57P01", "57P02", "57P03", "57P05", "25P03")
"""What PostgreSQL, or a pooler, says when it ends a session, or how that begins.

The reasons are the connection, an administrator, a crash, a start, and a limit of time.
"""

_HOLDERS = (
    "SELECT pid FROM pg_locks WHERE locktype = 'advisory' AND granted "
    f"AND classid = {LOCK >> 32} AND objid = {LOCK & 0xFFFF_FFFF} "
    # Other databases of the same PostgreSQL have locks of this key, too.
    "AND database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)
"""The query of the session that has the lock."""

_TABLES = (
    "CREATE TABLE IF NOT EXISTS leader (only_row int PRIMARY KEY CHECK (only_row = 1), term bigint NOT NULL UNIQUE, "
    "pid int NOT NULL, name text NOT NULL, control text NOT NULL, since timestamptz NOT NULL)",
    # A table of its own: nothing that checks the term ever waits for a beat.
    "CREATE TABLE IF NOT EXISTS leader_beat (only_row int PRIMARY KEY CHECK (only_row = 1), at timestamptz NOT NULL)",
    replication.TABLE,
    "CREATE TABLE IF NOT EXISTS standby (pid int PRIMARY KEY, name text NOT NULL, at timestamptz NOT NULL)",
)


@dataclass(frozen=True, slots=True)
class Leader:
    """The server that leads, as the database has it."""

    name: str
    control: str  # its address for flctl
    term: int
    since: float  # when that began, in seconds since 1970, by the database's clock
    pid: int  # of its session
    beat: float  # when it was heard last, in the same way
    silent_seconds: float  # since then


@dataclass(frozen=True, slots=True, eq=False)
class DatabaseSession:
    """A session with the database. With a term, it leads.

    Attributes:
        engine: Its only connection. When that ends, every use raises Deposed.
        beats: Another connection.
        term: Above that of every earlier leader; 0 = it does not lead yet.
        since: When that began, by the database's clock, in seconds since 1970.
    """

    engine: Engine
    beats: Engine  # another connection: a large upload keeps the first one's thread busy for seconds
    term: int = 0
    since: float = 0.0

    def beat(self, *, opening: bool = False) -> tuple[str, ...] | None:
        """Tell other servers that this one is alive.

        If that fails, it has a line in the log: the next beat may arrive.

        Args:
            opening: Whether the state is being opened, so that the database's timeline was not compared yet. What is
                noted beside it then stays.

        Returns:
            The names of the servers that wait; None if that is not known now.
        """
        mine = "EXISTS (SELECT 1 FROM leader WHERE term = :term)"
        waiting = f"SELECT name FROM standby WHERE at > clock_timestamp() - interval '{SILENT_SECONDS} s' ORDER BY name"
        try:
            with self.beats.connect() as connection:
                # A server that is frozen within a transaction would keep the row, for which its successor would wait:
                # the successor ends the session that leads, and knows of no other.
                connection.execution_options(isolation_level="AUTOCOMMIT")
                query = text(f"UPDATE leader_beat SET at = clock_timestamp() WHERE {mine}")
                connection.execute(query, {"term": self.term})
                if not opening:
                    connection.execute(text(replication.NOTE_SYNCHRONOUS))
                return tuple(connection.execute(text(waiting)).scalars())
        except DBAPIError as error:
            log.warning("a beat has not arrived at the database: %s", _first_line(error))
            return None

    def check(self) -> None:
        """Check that this server still leads.

        Raises:
            Deposed: It leads no more.
        """
        try:
            with self.engine.begin():
                pass
        except DBAPIError as error:
            raise translate(error) from error

    def close(self) -> None:
        """End the session."""
        self.beats.dispose()
        self.engine.dispose()


@contextmanager
def beating(session: DatabaseSession, told: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Tell standbys from a thread that this session is alive.

    So the caller may be busy for longer than they wait.

    Args:
        session: That leads.
        told: Called after each beat, in the thread.
    """
    ends = Event()

    def beat() -> None:
        while not ends.is_set():
            session.beat(opening=True)
            told()
            ends.wait(BEAT_SECONDS)

    thread = Thread(target=beat, name="beats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()


def open_session(url: str) -> DatabaseSession:
    """Open a session that does not lead yet.

    Raises:
        ConfigError: The database cannot be used: not PostgreSQL, a password in its address, or a pooler before it.
        Deposed: It cannot be reached now.
    """
    address = _checked(url)
    engine = create_engine(address, poolclass=StaticPool, connect_args=_PATIENCE)
    event.listen(engine, "handle_error", _note_the_end)
    session = DatabaseSession(engine, create_engine(address, pool_size=1, pool_pre_ping=True, connect_args=_PATIENCE))
    try:
        changes, version = _changes_sessions(session), _scalar(engine, "SHOW server_version_num")
    except DBAPIError as error:
        session.close()
        raise Deposed(f"PostgreSQL at {address.render_as_string()} cannot be used: {_first_line(error)}") from error
    if changes:
        session.close()
        raise ConfigError(_POOLER)
    if int(version) < 120_000:
        session.close()
        raise ConfigError(f"state_url leads to PostgreSQL {int(version) // 10_000}: fl-server needs 12 or newer")
    event.listen(engine, "handle_error", _note_no_other)
    return session


def check_role(session: DatabaseSession) -> None:
    """Check that this server's role may end the session that leads.

    Raises:
        ConfigError: It may not, so a leader that stands still would lead for ever.
        Deposed: The session has ended.
    """
    query = (
        "SELECT current_user AS mine, usename AS other FROM pg_stat_activity JOIN pg_roles ON pg_roles.oid = usesysid "
        f"WHERE pid IN ({_HOLDERS}) AND NOT (SELECT rolsuper FROM pg_roles WHERE rolname = current_user) "
        "AND (rolsuper OR NOT (pg_has_role(usesysid, 'USAGE') OR pg_has_role('pg_signal_backend', 'USAGE')))"
    )
    try:
        with session.engine.begin() as connection:
            found = connection.execute(text(query)).first()
    except DBAPIError as error:
        raise translate(error) from error
    if found is not None:
        what = f"the role {found.mine} may not end the session of {found.other}, whose server leads"
        way = f"give both servers one role in state_url, or grant pg_signal_backend to {found.mine}"
        raise ConfigError(f"{what}: {way}")


def open_reader(url: str) -> Engine | None:
    """Open a connection that cannot write, for a standby.

    Returns:
        None if there are no tables yet.

    Raises:
        StorageFailed: The database cannot be read now. So does each use of the connection, which is made anew then.
    """
    only_reads = {"postgresql_readonly": True}
    engine = create_engine(_checked(url), poolclass=StaticPool, connect_args=_PATIENCE, execution_options=only_reads)
    event.listen(engine, "handle_error", _note_a_pause)
    try:
        if _scalar(engine, "SELECT to_regclass('meta')") is not None:
            return engine
    except DBAPIError as error:
        engine.dispose()
        raise translate(error) from error
    except StorageFailed:
        engine.dispose()
        raise
    engine.dispose()
    return None


def attempt(session: DatabaseSession, name: str, control: str = "") -> DatabaseSession | Leader | None:
    """Try to lead.

    A leader that has been silent for too long is ended, so that a later attempt can succeed.

    Args:
        session: That is to lead.
        name: Of this server: the address at which clients reach it.
        control: Its address for flctl.

    Returns:
        The session that leads, or else the leader; None if it is not known yet.

    Raises:
        Deposed: The session has ended.
        ConfigError: A pooler is between this server and PostgreSQL.
    """
    try:
        with session.engine.begin() as connection:
            if not connection.execute(text("SELECT pg_try_advisory_lock(:key)"), {"key": LOCK}).scalar_one():
                return _other(connection)
        with session.engine.begin() as connection:  # another transaction: a pooler would take another session for it
            if connection.execute(text(f"{_HOLDERS} AND pid = pg_backend_pid()")).first() is None:
                raise ConfigError(_POOLER)
            term, since = _begin_term(connection, name, control)
    except DBAPIError as error:
        raise translate(error) from error
    leading = replace(session, term=term, since=since)
    event.listen(session.engine, "begin", lambda connection: _check_term(connection, term))
    return leading


def _changes_sessions(session: DatabaseSession) -> bool:
    """Return whether a pooler changes sessions between transactions.

    While nothing else uses such a pooler, it gives a connection the same session again and again. So another one takes
    what it has left, and looks at it: a pooler that keeps sessions, or none, gives it another session.
    """
    mine = uuid4().hex
    with session.engine.begin() as connection:
        connection.execute(text("SELECT set_config('fedring.session', :mine, false)"), {"mine": mine})
        before = connection.execute(text("SELECT pg_backend_pid()")).scalar_one()
    with session.beats.begin() as other:
        found = other.execute(text("SELECT current_setting('fedring.session', true)")).scalar_one()
        if found == mine:
            return True
        return bool(_scalar(session.engine, "SELECT pg_backend_pid()") != before)


def wait_beside(session: DatabaseSession, name: str) -> None:
    """Tell the leader, once a second, that this server waits.

    Raises:
        Deposed: The session has ended.
    """
    row = "INSERT INTO standby VALUES (pg_backend_pid(), :name, clock_timestamp()) ON CONFLICT (pid) "
    later = f"WHERE standby.at < clock_timestamp() - interval '{BEAT_SECONDS} s'"
    try:
        with session.engine.begin() as connection:
            connection.execute(
                text(f"{row} DO UPDATE SET at = excluded.at, name = excluded.name {later}"), {"name": name}
            )
    except DBAPIError as error:
        raise translate(error) from error


def _scalar(engine: Engine, query: str) -> Any:
    """Return the only value that a query finds."""
    with engine.begin() as connection:
        return connection.execute(text(query)).scalar_one()


def _begin_term(connection: Connection, name: str, control: str) -> tuple[int, float]:
    for table in _TABLES:
        connection.execute(text(table))
    # A database that was put back counts on from an earlier term, which clients and objects have seen already. The time
    # in seconds is above it, as long as the clocks are right; the order within a database does not depend on them.
    now = "extract(epoch FROM clock_timestamp())::bigint"
    row = f"(1, {now}, pg_backend_pid(), :name, :control, clock_timestamp())"
    term = "greatest(leader.term + 1, excluded.term)"
    changed = ", ".join(f"{column} = excluded.{column}" for column in ("pid", "name", "control", "since"))
    again = f"ON CONFLICT (only_row) DO UPDATE SET term = {term}, {changed}"
    insert = f"INSERT INTO leader VALUES {row} {again} RETURNING term, extract(epoch FROM since)::float AS since"
    begun = connection.execute(text(insert), {"name": name, "control": control}).one()
    beat = "INSERT INTO leader_beat VALUES (1, clock_timestamp()) ON CONFLICT (only_row) DO UPDATE SET at = excluded.at"
    connection.execute(text(beat))
    connection.execute(text("DELETE FROM standby"))  # those that still wait say so again
    return int(begun.term), begun.since


def _other(connection: Connection) -> Leader | None:
    """Return the server that leads.

    Its session is ended if it has been silent for too long.
    """
    begun = connection.execute(text("SELECT to_regclass('standby')")).scalar_one()  # else nobody has led yet
    query = (
        "SELECT name, control, term, extract(epoch FROM since)::float, pid, extract(epoch FROM at)::float, "
        "extract(epoch FROM clock_timestamp() - at)::float FROM leader, leader_beat "
        f"WHERE pid IN ({_HOLDERS})"
    )
    found = connection.execute(text(query)).first() if begun else None
    if found is None:
        # The lock has a holder that has not begun its term. If its machine has gone in that moment, PostgreSQL would
        # keep its session for hours.
        idle = f"state LIKE 'idle%' AND state_change < clock_timestamp() - interval '{SILENT_SECONDS} s'"
        ends = f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE pid IN ({_HOLDERS}) AND {idle}"
        if connection.execute(text(ends)).first():
            log.warning("a server that was about to lead has been silent for too long: its session is ended")
        return None
    leader = Leader(*found)
    if leader.silent_seconds > SILENT_SECONDS:
        log.warning("%s leads, but has been silent for %.1f s: ending its session", leader.name, leader.silent_seconds)
        connection.execute(text("SELECT pg_terminate_backend(:pid)"), {"pid": leader.pid})
    return leader


def _check_term(connection: Connection, term: int) -> None:
    """Check in a transaction that nobody else has begun a term.

    The lock of the row keeps others from beginning one before this transaction has ended.
    """
    query = text("SELECT 1 FROM leader WHERE term = :term FOR KEY SHARE")
    if connection.execute(query, {"term": term}).first() is None:
        raise Deposed("another server leads")


def _note_no_other(context: ExceptionContext) -> None:
    """Take a failure to connect anew for the end of the session."""
    if context.connection is None:
        raise Deposed(f"the database cannot be reached any more ({_first_line(context.original_exception)})")


def _note_the_end(context: ExceptionContext) -> None:
    """Let no pool open another connection.

    It would not hold the lock.
    """
    if _is_the_end(context):
        raise Deposed(f"the session with the database has ended ({_first_line(context.original_exception)})")


def _note_a_pause(context: ExceptionContext) -> None:
    """Take the end of a reader's connection for a passing failure."""
    if context.connection is None or _is_the_end(context):
        raise StorageFailed(
            "disk_error", f"the shared state cannot be read now ({_first_line(context.original_exception)})"
        )


def _is_the_end(context: ExceptionContext) -> bool:
    # The database may have said that the session ends before its end has been read.
    return context.is_disconnect or str(getattr(context.original_exception, "sqlstate", "")).startswith(_ENDS)


def _checked(url: str) -> URL:
    try:
        address = make_url(url)
        if address.get_backend_name() != "postgresql":
            raise ValueError(f"it is {address.get_backend_name()}")
    except Exception as error:  # SQLAlchemy's own, of several kinds
        raise ConfigError("state_url must be postgresql://USER@HOST/DATABASE") from error
    if address.password is not None:
        raise ConfigError("state_url must not hold the password: use PGPASSWORD, or a file that PGPASSFILE names")
    return address.set(drivername="postgresql+psycopg")


def _first_line(error: BaseException) -> str:
    cause = getattr(error, "orig", None) or error
    return next(iter(str(cause).strip().splitlines()), type(cause).__name__)
