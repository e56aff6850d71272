"""The forming of a generation, with retries after a loss."""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from fedring.ring.engine.endpoint import Endpoint
from fedring.ring.errors import CollectiveTimeout, PeerLost
from fedring.ring.torch.meeting import Meeting, Membership, Terms
from fedring.ring.transport.channels import is_serving

log = logging.getLogger(__name__)

Formed = TypeVar("Formed")

_FORMING_SECONDS = 60.0  # the members answered a moment ago
_WATCH_SECONDS = 1.0  # between questions whether they still do


def next_generation(
    meeting: Meeting,
    terms: Terms,
    form: Callable[[Endpoint, Membership, float], Formed],
    *,
    step: int,
    deadline: float,
) -> Formed:
    """Take part in attempts until a generation is formed.

    Returns the result of `form`.

    Args:
        meeting: This worker's part in the attempts.
        terms: How many workers to wait for.
        form: Connects this worker's endpoint to the members of a membership, within some seconds, or raises.
        step: How many steps of the training this worker has finished.
        deadline: When to give up, by the monotonic clock.

    Raises:
        PeerLost: A slot has stayed empty, or the last member that was lost when the time was up.
        RingError: See `Meeting.take_part`, or the error other than a loss that ended the generation.
    """
    while True:
        endpoint, membership = meeting.take_part(terms, step=step, deadline=deadline)
        left = deadline - time.monotonic()
        try:
            with _watching(endpoint, membership.addresses):
                formed = form(endpoint, membership, max(1.0, min(_FORMING_SECONDS, left)))
        except (PeerLost, CollectiveTimeout) as error:
            if left <= 0:
                raise
            # The loss of one member must not end the others: they form the next generation without it, or with its
            # replacement.
            log.warning("generation %d could not be formed, the next one is tried: %s", membership.generation, error)
            continue
        meeting.formed(membership)
        return formed


@contextmanager
def _watching(endpoint: Endpoint, members: Sequence[str]) -> Iterator[None]:
    """Fail the generation if a neighbour dies while the group forms.

    An endpoint notices the end of a peer that is connected. One that ends before would be awaited until the timeout.
    """
    me, size = members.index(endpoint.address), len(members)
    neighbours = sorted({(me + 1) % size, (me - 1) % size} - {me})
    formed = threading.Event()

    def watch() -> None:
        while not formed.wait(_WATCH_SECONDS):
            for rank in neighbours:
                serving = is_serving(members[rank], endpoint.options, generation=endpoint.generation)
                if not serving and not endpoint.has_left(members[rank]) and not formed.is_set():
                    endpoint.fail(PeerLost(f"rank {rank} was lost before all were connected", rank=rank))
                    return

    # A thread of its own, since the group forms inside calls of torch that nothing else can interrupt.
    threading.Thread(target=watch, name="ring-forming", daemon=True).start()
    try:
        yield
    finally:
        formed.set()
