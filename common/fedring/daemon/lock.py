"""One process per state folder."""

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from fedring.daemon.config import ConfigError


class StateInUse(ConfigError):
    """Another process holds the folder; `pid` is its id, 0 if unknown."""

    def __init__(self, folder: Path, pid: int) -> None:
        super().__init__(f"state_dir {folder} is in use by process {pid or 'unknown'}: give each daemon one of its own")
        self.pid = pid


class StateLock:
    """Held from its making to `release`, or to the end of the process however it ends."""

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._fd = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise ConfigError(f"state_dir {folder} cannot be used: {error.strerror}") from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.pread(self._fd, 20, 0).decode(errors="replace").strip()
            os.close(self._fd)
            raise StateInUse(folder, int(holder) if holder.isdigit() else 0) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let another process use the folder. The file stays: removing it would let two processes in."""
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.release()
