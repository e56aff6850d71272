"""One client per state folder."""

import fcntl
import os
from pathlib import Path

from fedring.client.errors import StateInUse
from fedring.daemon.config import ConfigError


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
            holder = os.pread(self._fd, 20, 0).decode(errors="replace").strip() or "unknown"
            os.close(self._fd)
            raise StateInUse(
                f"state_dir {folder} is in use by process {holder}: give each client a state_dir of its own"
            ) from None
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"{os.getpid()}\n".encode(), 0)

    def release(self) -> None:
        """Let another process use the folder. The file stays: removing it would let two processes in."""
        os.close(self._fd)
