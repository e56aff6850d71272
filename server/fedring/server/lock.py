"""One fl-server per state directory."""

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedring.server.blobs import StorageError


class StateLocked(StorageError):
    """Another process holds the state directory; `pid` is its id, 0 if unknown."""

    def __init__(self, path: Path, pid: int) -> None:
        super().__init__("state_locked", f"{path} is in use by process {pid or 'unknown'}")
        self.pid = pid


@contextmanager
def lock_state_dir(path: Path) -> Iterator[None]:
    """Inside, this process is the only one that uses the folder, which exists."""
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(fd, 20, 0).decode(errors="replace").strip()
            raise StateLocked(path, int(holder) if holder.isdigit() else 0) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)
        yield
    finally:
        os.close(fd)  # lets the lock go; the file stays, as removing it would let two processes in
