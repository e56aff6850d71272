"""Ports for programs that must be told theirs before they start, or take it again when they are restarted."""

import os
import random
import socket
from itertools import count

_FIRST = 20_000
"""Below the ports that systems give to whoever asks for any."""
_EACH = 1_000  # of each process of the test run; there are at most twelve
_WORKER = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % 12
_numbers = count(random.SystemRandom().randrange(_EACH))


def free_port() -> int:
    """Return a port of this host that nobody uses, and that no other test gets, nor anybody by chance."""
    while True:
        port = _FIRST + _EACH * _WORKER + next(_numbers) % _EACH
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port
