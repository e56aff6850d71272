"""The events of a journal, one by one."""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing

from fedring.server.state.journal import Journal
from fedring.v1 import control_pb2 as pb


def each_event(journal: Journal, after: int) -> AsyncIterator[pb.Event]:
    """Watch events from this call on, and known ones above `after`: see `Journal.follow`."""
    return _each(journal.follow(after))


async def _each(groups: AsyncGenerator[Sequence[pb.Event]]) -> AsyncIterator[pb.Event]:
    async with aclosing(groups):
        async for group in groups:
            for event in group:
                yield event
