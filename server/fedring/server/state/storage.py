"""Whether the state directory takes what is to be kept."""

import asyncio
import time


class Storage:
    """Works, until something could not be kept; then fails, until somebody has tried it. Belongs to one event loop."""

    def __init__(self) -> None:
        self.fault = ""  # why it fails
        self.since = 0.0  # when it began to fail, monotonic
        self.works, self.fails = asyncio.Event(), asyncio.Event()
        self.works.set()

    def fail(self, why: str) -> None:
        """Something could not be kept."""
        if not self.fault:
            self.since = time.monotonic()
        self.fault = why
        self.works.clear()
        self.fails.set()

    async def works_or(self, event: asyncio.Event) -> None:
        """Return when the folder takes what is to be kept, or `event` is set."""
        waits = [asyncio.ensure_future(each.wait()) for each in (self.works, event)]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

    def mend(self) -> None:
        """A trial went well."""
        self.fault = ""
        self.fails.clear()
        self.works.set()
