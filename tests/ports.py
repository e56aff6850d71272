"""Ports for programs that must be told theirs before they start."""

import random
import socket

_BELOW = range(20_000, 32_000)  # of those that systems give to whoever asks for any


def free_port() -> int:
    """A port of this host that nobody uses now, and nobody gets by chance until it is used."""
    while True:
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port := random.SystemRandom().choice(_BELOW)))
            except OSError:
                continue
            return port
