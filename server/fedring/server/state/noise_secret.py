"""The secret of a round's noise, in a file of its own.

No backup has it, and it is erased with the round. It is durable before the first noise is drawn from it. So a server
that is killed while it aggregates draws the same noise again, and nobody who gets hold of the state after the round can
draw it.
"""

import os
from collections.abc import Container, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from fedring.daemon.durable import make_durable, replace_durably
from fedring.privacy.keystream import SECRET_BYTES
from fedring.server.state.blobs import storage_error

_PREFIX = "noise-"


def noise_secret(folder: Path, name: str) -> bytes:
    """Return the noise secret of this name in a state folder.

    It is drawn from the operating system if there is none yet.

    Args:
        folder: the state folder.
        name: of the round: no other round, before or after a restore, has the same.

    Raises:
        StorageFailed: if it cannot be kept.
    """
    path = folder / f"{_PREFIX}{name}"
    with _as_storage_errors():
        try:
            secret = path.read_bytes()
        except FileNotFoundError:
            secret = b""
        if len(secret) != SECRET_BYTES or not any(secret):
            secret = os.urandom(SECRET_BYTES)
            replace_durably(path, secret)
        return secret


def erase_noise_secret(folder: Path, name: str) -> None:
    """Overwrite and remove the noise secret of this name.

    There may be none. Other rounds keep theirs, which another thread may be writing.

    Raises:
        StorageFailed: if that fails.
    """
    with _as_storage_errors():
        _erase(folder / f"{_PREFIX}{name}")


def has_noise_secret(folder: Path, name: str) -> bool:
    """Return whether a state folder has a noise secret."""
    return (folder / f"{_PREFIX}{name}").exists()


def erase_noise_secrets(folder: Path, *, keep: Container[str] = ()) -> None:
    """Overwrite and remove a state folder's noise secrets.

    Those whose names are in `keep` stay. No round may be open.

    Raises:
        StorageFailed: if that fails.
    """
    with _as_storage_errors():
        for path in folder.glob(f"{_PREFIX}*"):
            if path.name.removeprefix(_PREFIX) not in keep:
                _erase(path)


def _erase(path: Path) -> None:
    with suppress(FileNotFoundError):
        with path.open("r+b") as file:
            file.write(bytes(SECRET_BYTES))
            make_durable(file)
        path.unlink()


@contextmanager
def _as_storage_errors() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise storage_error(error) from error
