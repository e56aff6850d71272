"""Every rank's message on every rank, while the caller does something else: what sparse gradients need."""

from datetime import timedelta

from fedring.ring import collectives
from fedring.ring.futures import RingFuture
from fedring.ring.group import Group
from fedring.ring.work import RingWork


class BytesGather:
    """Messages on their way; `wait` and `collect` are separate, so that waiting can be measured alone."""

    def __init__(self, work: RingWork, messages: list[memoryview]) -> None:
        self._work = work
        self._messages = messages

    def wait(self, timeout_seconds: float | None = None) -> None:
        """They have all arrived; raises the RingError that kept them from it."""
        self._work.wait(timedelta(seconds=timeout_seconds or 0))

    def collect(self) -> list[memoryview]:
        """The messages, in rank order."""
        self.wait()
        return self._messages

    @property
    def future(self) -> RingFuture:
        """Of the messages, in rank order."""
        return self._work.get_future()


def gather_bytes(group: Group, payload: bytes | memoryview, *, limit: int, timeout: float) -> BytesGather:
    """`payload`, and every other rank's, is on its way to every rank."""
    mine = memoryview(payload).cast("B")
    if len(mine) > limit:
        raise ValueError(f"a message of {len(mine)} bytes is larger than the limit of {limit}")
    messages = [memoryview(b"")] * group.size
    messages[group.rank] = mine
    program = collectives.allgather_bytes(group.rank, group.size, messages, limit)
    operation = group.start(f"allgather of at most {limit} bytes", program, timeout=timeout)
    return BytesGather(RingWork(group, [operation], messages), messages)
