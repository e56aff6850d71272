"""A place at which threads wait until a test lets them continue."""

import asyncio
import threading


class Gate:
    """Holds up the threads that come to a named place. It is open until a test closes it."""

    def __init__(self) -> None:
        self._place = ""
        self._arrived, self._open = threading.Event(), threading.Event()

    def close(self, place: str) -> None:
        """Hold up the threads that come to this place."""
        self._place = place
        self._arrived.clear()
        self._open.clear()

    def open(self) -> None:
        """Let all threads continue."""
        self._place = ""
        self._open.set()

    def pass_(self, place: str) -> None:
        """Pass this place, or wait here, at most a minute, while it is closed."""
        if place == self._place:
            self._arrived.set()
            self._open.wait(60)

    def arrived(self) -> bool:
        """Wait, at most a minute, until a thread has come to the closed place; return whether one has."""
        return self._arrived.wait(60)

    async def reached(self) -> None:
        """Return when a thread has come to the closed place."""
        assert await asyncio.to_thread(self.arrived)
