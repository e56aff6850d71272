"""systemd's notification socket."""

import asyncio
import os
import socket
from contextlib import suppress


def sd_notify(state: str) -> None:
    """Notify systemd; do nothing outside it, or where it does not listen."""
    if path := os.environ.get("NOTIFY_SOCKET"):
        # This does not wait: a manager that does not read must not block the event loop.
        kind = socket.SOCK_DGRAM | socket.SOCK_NONBLOCK
        with suppress(OSError), socket.socket(socket.AF_UNIX, kind) as sock:
            sock.sendto(state.encode(), "\0" + path[1:] if path[0] == "@" else path)


async def watchdog() -> None:
    """Prove to systemd regularly that the event loop still turns.

    It does so twice in each period that systemd asks for, and returns at once if it asks for none.
    """
    period = int(os.environ.get("WATCHDOG_USEC", "0")) / 1e6
    while period:
        sd_notify("WATCHDOG=1")
        await asyncio.sleep(period / 2)
