"""Ports for programs that need them in their configuration, or use them again after a restart."""

import fcntl
import os
import random
import socket
import tempfile
from contextlib import suppress
from itertools import count
from pathlib import Path

_FIRST = 20_000
"""Below the ports that systems choose for programs that ask for any port."""
_EACH = 1_000  # ports for each process of the test run; there are at most twelve processes
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12
_LOCKS = Path(tempfile.gettempdir()) / "fedring-test-ports"
_numbers = count(random.SystemRandom().randrange(_EACH))
_held: dict[int, int] = {}  # the locks of this process' ports, which it may hand out again


def free_port() -> int:
    """Return a port of this host that is free, and that nobody else hands out: no other test, nor the system."""
    while True:
        port = _FIRST + _EACH * _WORKER + next(_numbers) % _EACH
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
        if port in _held or _lock(port):
            return port


def _lock(port: int) -> bool:
    """Return whether this process may hand out the port, which another run on this host may have done."""
    _LOCKS.mkdir(exist_ok=True)
    file = os.open(_LOCKS / str(port), os.O_CREAT | os.O_RDWR, 0o666)
    with suppress(OSError):
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        _held[port] = file
        return True
    os.close(file)
    return False
