"""Ranks that are killed or frozen in the middle of an allreduce: every other rank notices within seconds."""

import signal
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import pytest

from fedring.ring.options import RingOptions
from tests.fault.ring_ranks import PATIENCE, SMALL, Rank, ring

NOTICED_WITHIN = 30.0  # seconds; without notice, the operation itself would wait for two minutes
LARGE = 3_000_000  # values; allreduce has another algorithm for these than for SMALL, and they fill its streams
FROZEN = {"lost_after_seconds": 8}  # longer than a busy machine keeps a healthy rank waiting


@pytest.fixture
def ended() -> Iterator[ExitStack]:
    """Return a stack of callbacks that are called when the test ends."""
    with ExitStack() as stack:
        yield stack


def check_survivors(lost: int, ranks: Sequence[Rank], since: float) -> None:
    """Assert that all other ranks raise PeerLost with the lost rank in time, and end."""
    for rank in [*ranks[:lost], *ranks[lost + 1 :]]:
        heard = rank.hear("error")
        print(f"noticed after {heard['at'] - since:.2f} s: {heard['detail']}")
        assert (heard["error"], heard["rank"]) == ("PeerLost", lost)
        assert heard["at"] - since < NOTICED_WITHIN
        rank.hear("closed")
        assert rank.process.wait(PATIENCE) == 0


@pytest.mark.parametrize(
    ("size", "count", "local_transport"), [(3, SMALL, False), (4, LARGE, False), (3, SMALL, True), (3, LARGE, True)]
)
def test_a_killed_rank_is_named_by_all_others(ended: ExitStack, size: int, count: int, local_transport: bool) -> None:
    ranks = ring(ended, size, count, local_transport=local_transport)
    for rank in ranks:
        rank.tell("run")
    ranks[1].process.send_signal(signal.SIGKILL)
    check_survivors(1, ranks, time.time())


def test_a_frozen_rank_is_named_by_all_others_and_raises_when_it_wakes(ended: ExitStack) -> None:
    frozen = []
    # Each ring waits for eight seconds, so all of them wait together.
    for size, count, word in ((4, SMALL, "run"), (3, LARGE, "run"), (3, SMALL, "idle")):
        for local_transport in (False, True):
            ranks = ring(ended, size, count, local_transport=local_transport, **FROZEN)
            for rank in ranks:
                rank.tell(word)
            ranks[2].process.send_signal(signal.SIGSTOP)
            frozen.append((f"{size} ranks, {count} values, {word}, {local_transport=}", ranks, time.time()))
    for case, ranks, since in frozen:
        print(case)
        check_survivors(2, ranks, since)
        ranks[2].process.send_signal(signal.SIGCONT)
        assert ranks[2].hear("error")["error"] == "PeerLost"
        ranks[2].hear("closed")
        assert ranks[2].process.wait(PATIENCE) == 0


def test_by_default_a_silent_rank_is_lost_within_five_seconds() -> None:
    assert RingOptions().lost_after_seconds < 5


@pytest.mark.slow
def test_a_rank_that_holds_the_interpreters_lock_for_long_is_not_lost(ended: ExitStack) -> None:
    ranks = ring(ended, 3, LARGE, **FROZEN)
    ranks[0].tell("hold 12")
    for rank in ranks[1:]:
        rank.tell("again")
    for rank in ranks:
        assert rank.hear("sum")["sum"] == 3
        rank.tell("stop")
        rank.hear("closed")
        assert rank.process.wait(PATIENCE) == 0
