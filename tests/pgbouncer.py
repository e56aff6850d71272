"""PgBouncer for tests, between a server and a cluster of `tests.postgres`."""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psycopg
from sqlalchemy.engine import make_url

from tests.conftest import missing
from tests.ports import free_port
from tests.waiting import until


@contextmanager
def pgbouncer(folder: Path, database: str, mode: str) -> Iterator[str]:
    """Run a PgBouncer; provide the address by which a database is reached through it.

    Args:
        folder: A folder that other users can reach.
        database: Its own address.
        mode: When a connection to PostgreSQL may be used by somebody else: after a "session", or a "transaction".
    """
    program, address, port = shutil.which("pgbouncer") or missing("PgBouncer"), make_url(database), free_port()
    config = folder / "pgbouncer.ini"
    config.write_text(
        f"[databases]\n* = host={address.query['host']} user={address.username}\n"
        f"[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\nauth_type = any\n"
        f"pool_mode = {mode}\nlogfile = {folder / 'pgbouncer.log'}\n"
    )
    # It does not run as root, and has the user of PostgreSQL's package.
    user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.getuid() == 0 else []
    if user:
        shutil.chown(folder, "postgres")
    with subprocess.Popen([*user, program, "-q", str(config)], stderr=subprocess.DEVNULL, cwd="/") as process:
        through = address.set(host="127.0.0.1", port=port, query={})
        try:
            until(lambda: process.poll() is not None or _answers(port, str(address.database)))
            yield through.render_as_string()
        finally:
            process.terminate()


def _answers(port: int, database: str) -> bool:
    try:
        psycopg.connect(f"host=127.0.0.1 port={port} user=fedring dbname={database}").close()
    except psycopg.OperationalError:
        return False
    return True
