"""Locks of state folders, for a process's life or a moment."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from fedring.daemon.config import ConfigError
from fedring.daemon.durable import make_folder, replace_with_digest, text_after_digest


class StateInUse(ConfigError):
    """Another process uses the folder; `pid` is its id, 0 if unknown."""

    def __init__(self, folder: Path, pid: int) -> None:
        super().__init__(f"state_dir {folder} is in use by process {pid or 'unknown'}: give each daemon one of its own")
        self.pid = pid


class StateLock:
    """The right to use a state folder, until `release`.

    It also ends with the process, however that ends. The folder itself is locked, which nobody can delete from under
    its owner. The file `lock` in it says who that is, and is locked, too, as versions before 0.2 lock nothing else.

    Args:
        folder: The state folder, which is made if it is missing.
        client: The client that owns it; the first one is noted in its file `client`. Empty = it is no client's.

    Raises:
        StateInUse: If another process uses it.
        ConfigError: If it cannot be used, or is another client's.
    """

    def __init__(self, folder: Path, *, client: str = "") -> None:
        self._fds: list[int] = []
        try:
            make_folder(folder)
            self._fds.append(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
            self._fds.append(os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            for fd in self._fds:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fds[-1], 20, 0).decode(errors="replace").strip()
            self.release()
            raise StateInUse(folder, int(holder) if holder.isdigit() else 0) from None
        except OSError as error:
            self.release()
            raise ConfigError(f"state_dir {folder} cannot be used: {error.strerror}") from error
        # Both locks are held: only now is the text of the last owner replaced.
        os.ftruncate(self._fds[-1], 0)
        os.pwrite(self._fds[-1], f"{os.getpid()}\n".encode(), 0)
        if client:
            try:
                _claim(folder, client)
            except ConfigError:
                self.release()
                raise

    def release(self) -> None:
        """Let another process use the folder."""
        while self._fds:
            os.close(self._fds.pop())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()


@contextmanager
def held_alone(fd: int) -> Iterator[None]:
    """Hold the lock of an open file or folder.

    This waits until nobody else holds it. At the end, the file is closed.
    """
    try:
        with suppress(OSError):  # a file system may know no locks
            fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _claim(folder: Path, client: str) -> None:
    """Note or check the owner of a state folder.

    A copy would send its owner's residual a second time.

    Raises:
        ConfigError: If it is another client's, or nobody can tell.
    """
    path = folder / "client"
    try:
        # The digest tells a damaged note from another client's name.
        known = text_after_digest(path.read_bytes()).decode()
    except FileNotFoundError:
        try:
            replace_with_digest(path, client.encode())
        except OSError as error:
            raise ConfigError(f"{path} cannot be written: {error.strerror}") from error
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{path} says whose folder this is, and cannot be read ({error}): delete it if it is {client}'s"
        ) from error
    else:
        if known != client:
            raise ConfigError(
                f"state_dir {folder} is that of the client {known}, and this one is {client}: give it a folder of its "
                f"own. If {known} is called {client} now, and this is not a copy of its folder, delete {path}"
            )
