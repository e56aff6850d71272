"""Ports for programs that need them in their configuration, or use them again after a restart."""

import os
import random
import socket
from itertools import count

_FIRST = 20_000
"""Below the ports that systems choose for programs that ask for any port."""
_EACH = 1_000  # ports for each process of the test run; there are at most twelve processes
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12
_numbers = count(random.SystemRandom().randrange(_EACH))


def free_port() -> int:
    """Return a port of this host that is free, and that neither another test nor the system hands out."""
    while True:
        port = _FIRST + _EACH * _WORKER + next(_numbers) % _EACH
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
