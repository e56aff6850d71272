"""A place at which threads wait until a test lets them go on."""

import asyncio
import threading


class Gate:
    """Says when a thread has come to a place, and lets it go on when it may; open at first."""

    def __init__(self) -> None:
        self._place = ""
        self._here, self._open = threading.Event(), threading.Event()

    def close(self, place: str) -> None:
        self._place = place
        self._here.clear()
        self._open.clear()

    def open(self) -> None:
        self._place = ""
        self._open.set()

    def pass_(self, place: str) -> None:
        if place == self._place:
            self._here.set()
            self._open.wait(60)

    async def reached(self) -> None:
        assert await asyncio.to_thread(self._here.wait, 60)
