"""Checks of a host before a daemon runs on it.

Each of them returns rows with what was found and what to do.
"""

import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from cryptography.hazmat.primitives.serialization import Encoding
from pydantic_settings import BaseSettings

from fedring.control.access import Access
from fedring.ctl.operate.port_health import check_health
from fedring.daemon.checks import Check, Level, check_writable, existing_part
from fedring.daemon.config import ConfigError, load_config
from fedring.extras import missing
from fedring.rpc.certificates import identity_of, load_authorities
from fedring.rpc.channel import encrypts
from fedring.rpc.handshake import diagnose, shown_at
from fedring.rpc.tls import PLAINTEXT, Tls, check_tls, read_token
from fedring.server.config import ServerConfig
from fedring.v1 import control_pb2, federation_pb2

FOR_CLIENTS = federation_pb2.DESCRIPTOR.services_by_name["TrainCmdService"].full_name
FOR_FLCTL = control_pb2.DESCRIPTOR.services_by_name["ControlService"].full_name
"""The gRPC services by which the two ports of fl-server are recognised."""

_MIN_FREE_BYTES, _WARN_FREE_BYTES = 100_000_000, 2_000_000_000
_NETWORK_TYPES = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "glusterfs", "ceph"})
_TIMEOUT_SECONDS = 2.0

C = TypeVar("C", bound=BaseSettings)


def check_config(name: str, model: type[C], path: Path | None) -> tuple[Check, C | None]:
    """Check a configuration file, or the defaults and the environment.

    Returns:
        The row, and the configuration if it can be used.
    """
    where = str(path) if path else "defaults and environment"
    try:
        return Check(name, Level.OK, where), load_config(model, path).config
    except ConfigError as error:
        return Check(
            name,
            Level.FAIL,
            str(error),
            f"correct {where}; --print-config of the daemon shows where each value comes from",
        ), None


def check_listen(name: str, address: str, *, service: str, tls: Tls = PLAINTEXT) -> Check:
    """Check that fl-server can listen at the address.

    It is also good if fl-server serves there already.
    """
    if _serves(address, service, tls):
        return Check(name, Level.OK, f"fl-server serves at {address}")
    if address.startswith("unix:"):
        folder = Path(address.removeprefix("unix:")).absolute().parent
        good = os.access(folder, os.W_OK)
        return Check(name, Level.OK if good else Level.FAIL, address, "" if good else f"make {folder} writable")
    host, _, port = address.rpartition(":")
    try:
        family, kind, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind) as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            sock.bind(where)
    except OSError as error:
        return Check(name, Level.FAIL, f"{address}: {error.strerror}", "stop the other program, or choose another port")
    return Check(name, Level.OK, f"{address} is free")


def check_certificates(tls: Tls) -> Iterator[Check]:
    """Check the files of the table, if it names any."""
    try:
        check_tls(tls)
    except ConfigError as error:
        yield Check("tls", Level.FAIL, str(error), "correct the paths, or make new files: flctl certs --help")
    else:
        if tls.on:
            yield Check("tls", Level.OK, f"{tls.cert or tls.ca}")


def check_reachable(name: str, address: str, tls: Tls) -> Check:
    """Check that fl-server serves clients at the address.

    If it does not, the row says why.
    """
    answer = check_health(address, _TIMEOUT_SECONDS, Access(tls), service=FOR_CLIENTS)
    if answer == "serving":
        return Check(name, Level.OK, f"fl-server serves at {address}")
    if answer in ("not_found", "unimplemented"):
        found = f"what listens at {address} is no fl-server, or not its port for clients"
        return Check(name, Level.FAIL, found, "set it to the address in `listen` of fl-server")
    if answer != "unreachable" or address.startswith("unix:"):
        return Check(name, Level.FAIL, f"{address} is {answer}", "start fl-server, or read its log")
    diagnosis = diagnose(address, tls, _TIMEOUT_SECONDS)
    return Check(name, Level.FAIL, diagnosis.found, diagnosis.advice)


def check_identity(client_id: str, tls: Tls, token_file: Path | None) -> Iterator[Check]:
    """Check that the client's token or certificate fits its client_id.

    Only what this host can know is checked.
    """
    name = "identity"
    if token_file:
        try:
            read_token(token_file)
        except ConfigError as error:
            yield Check(
                name,
                Level.FAIL,
                str(error),
                "make a token with flctl token create, and let only the daemon read the file: chmod 600",
            )
            return
        yield Check(name, Level.OK, f"a token, in {token_file}")
    if tls.cert:
        shown = identity_of(load_authorities(tls.cert)[0])
        if shown and not shown.speaks_for(client_id):
            advice = f"set client_id = {shown.name!r}, or make a certificate: flctl certs issue"
            yield Check(name, Level.FAIL, f"the certificate is that of {shown}, but client_id is {client_id!r}", advice)
        elif shown or not token_file:
            level = Level.OK if shown else Level.FAIL
            advice = "" if shown else "make a certificate with an identity: flctl certs issue"
            yield Check(name, level, str(shown or f"the certificate in {tls.cert} has no identity"), advice)


def check_state_dir(path: Path) -> Iterator[Check]:
    """Check that a daemon can keep its state in the folder."""
    check = check_writable("state_dir", path)
    if check.level is Level.FAIL:
        yield check
        return
    holder = _holder(path / "lock")
    yield replace(check, found=f"{path}, in use by process {holder}") if holder else check
    existing = existing_part(path)
    free = shutil.disk_usage(existing).free
    level = Level.FAIL if free < _MIN_FREE_BYTES else Level.WARN if free < _WARN_FREE_BYTES else Level.OK
    yield Check(
        "disk",
        level,
        f"{free / 1e9:.1f} GB free",
        "" if level is Level.OK else "free space on the disk, or move state_dir",
    )
    if (kind := _filesystem(existing)) in _NETWORK_TYPES:
        yield Check(
            "disk", Level.FAIL, f"{path} is on {kind}", "put state_dir on a local disk, which the database needs"
        )


def check_database(state_dir: Path) -> Iterator[Check]:
    """Check the version and the log of a server's database.

    It must be this version's, and have lost no commits. Nothing is checked if there is none.
    """
    from fedring.server.state.failures import StorageError
    from fedring.server.state.log_check import check_at_rest  # imports the database

    if state_dir.is_dir():
        try:
            check_at_rest(state_dir)
        except (OSError, StorageError) as error:
            yield Check("database", Level.FAIL, str(error), "restore a backup, or see docs/deployment.md")


def check_shared_state(config: ServerConfig) -> Iterator[Check]:
    """Check the database and the object store of a shared state.

    Nothing is checked if there is none.
    """
    if not config.state_url:
        return
    from fedring.server.leading import check_shared  # imports the database
    from fedring.server.state.failures import Deposed, StorageError

    name, advice = "shared state", "correct state_url and blob_url, or what they name: see docs/availability.md"
    try:
        better = check_shared(config)
    except (ConfigError, StorageError, ImportError) as error:
        yield Check(name, Level.FAIL, missing(error) or str(error), advice)
    except Deposed as error:
        yield Check(name, Level.FAIL, error.why, advice)
    else:
        yield Check(name, Level.OK, f"{config.state_url} and {config.blob_url}")
        yield from (Check(name, Level.WARN, sentence) for sentence in better)


def _serves(address: str, service: str, tls: Tls) -> bool:
    """Return whether the server itself serves at the address.

    With TLS, it must show the server's certificate.
    """
    if tls.cert is None or not encrypts(address, tls):
        return check_health(address, _TIMEOUT_SECONDS, service=service) == "serving"
    try:
        own = load_authorities(tls.cert)[0]
    except ConfigError:
        return False
    return shown_at(address, _TIMEOUT_SECONDS) == own.public_bytes(Encoding.DER)


def _holder(lock: Path) -> str:
    """Return the id of the lock's process, or an empty string."""
    try:
        with lock.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read(20).decode(errors="replace").strip() or "unknown"
    except OSError:
        pass  # there is no lock yet, or it belongs to another user
    return ""


def _filesystem(path: Path) -> str:
    """Return the path's file system type; empty = unknown."""
    try:
        rows = [line.split() for line in Path("/proc/mounts").read_text(encoding="utf-8").splitlines()]
    except OSError:
        return ""
    inside = [(row[1], row[2]) for row in rows if path.resolve().is_relative_to(row[1])]
    return max(inside, key=lambda row: len(row[0]), default=("", ""))[1]
