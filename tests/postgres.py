"""PostgreSQL for tests: one cluster for each test process, and a database for each test."""

import atexit
import os
import shutil
import subprocess
import tempfile
from functools import cache
from itertools import count
from pathlib import Path

import psycopg

from tests.conftest import missing

_NUMBERS = count(1)
_PLACES = "usr/lib/postgresql/*/bin"  # of Debian, which does not add them to the path


def programs() -> Path | None:
    """Return the folder of PostgreSQL's programs, or None if it is not installed."""
    installed = max(Path("/").glob(_PLACES), key=lambda folder: int(folder.parent.name), default=None)
    found = shutil.which("pg_ctl")
    return installed or (Path(found).parent if found else None)


class Cluster:
    """A running cluster, which listens on a socket in its folder.

    Args:
        folder: A new one.
        durable: Whether commits are synced, as tests that kill the cluster need.
        listen: Another address of this host where it listens.
        port: Where it listens there.
        source: Another cluster, of which this one is a replica until it is promoted.
    """

    def __init__(
        self,
        folder: Path,
        *,
        durable: bool = False,
        listen: str = "",
        port: int = 5432,
        source: "Cluster | None" = None,
    ) -> None:
        self._host, self._port = listen or str(folder), port
        self._programs, self.folder = programs() or missing("PostgreSQL"), folder
        # PostgreSQL does not run as root; its package has made a user of its own.
        self._user = ["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"] if os.getuid() == 0 else []
        if self._user:
            shutil.chown(folder, "postgres")
        # The order of texts is that of a language, as in most databases, and not that of bytes.
        order = ["-E", "UTF8", "--locale=C.UTF-8", "--locale-provider=icu", "--icu-locale=en-US"]
        data = ["-D", str(folder / "data"), "-U", "fedring", "--no-sync"]
        if source:
            self._run("pg_basebackup", *data, "-h", str(source.folder), "-R", "--checkpoint=fast")
        else:
            self._run("initdb", *data, "-A", "trust", *order)
        with (folder / "data" / "postgresql.conf").open("a") as file:
            file.write(
                f"listen_addresses = '{listen}'\nunix_socket_directories = '{folder}'\n"
                f"fsync = {'on' if durable else 'off'}\nport = {port}\n"
            )
        if listen:
            with (folder / "data" / "pg_hba.conf").open("a") as file:
                file.write("host all all samenet trust\n")
        self.start()

    def start(self) -> None:
        """Start it, and wait until it serves."""
        log = str(self.folder / "log")
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-l", log, "start")

    def stop(self, mode: str = "immediate") -> None:
        """Stop it, if it runs."""
        if (self.folder / "data" / "postmaster.pid").exists():
            self._run("pg_ctl", "-D", str(self.folder / "data"), "-w", "-m", mode, "stop")

    def promote(self) -> None:
        """Let a replica be a primary from now on, as a failover does."""
        self._run("pg_ctl", "-D", str(self.folder / "data"), "-w", "promote")

    def set(self, name: str, value: str) -> None:
        """Change a setting of the running cluster."""
        where = f"host={self.folder} port={self._port} user=fedring dbname=postgres"
        with psycopg.connect(where, autocommit=True) as connection:
            connection.execute(f"ALTER SYSTEM SET {name} = '{value}'".encode())
            connection.execute("SELECT pg_reload_conf()")

    def new_database(self, name: str = "", *, template: str = "template1") -> str:
        """Return the address of a new database, which is empty, or a copy of another one that nobody uses now."""
        name = name or f"db{next(_NUMBERS)}"
        where = f"host={self.folder} port={self._port} user=fedring dbname=postgres"
        with psycopg.connect(where, autocommit=True) as connection:
            connection.execute(f"CREATE DATABASE {name} TEMPLATE {template}".encode())
        return f"postgresql+psycopg://fedring@/{name}?host={self._host}&port={self._port}"

    def _run(self, program: str, *arguments: str) -> None:
        command = [*self._user, str(self._programs / program), *arguments]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, cwd="/", timeout=60)


def folder_for_anybody() -> Path:
    """Return a folder that PostgreSQL's own user can reach; it is removed when this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="fedring-pg-"))
    folder.chmod(0o755)
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def shared() -> Cluster:
    """Return this process's cluster, started when first asked for."""
    cluster = Cluster(folder_for_anybody())
    atexit.register(cluster.stop)
    return cluster
