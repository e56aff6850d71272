"""Ranks that are killed or frozen in the middle of an allreduce: every other rank notices within seconds."""

import json
import os
import queue
import signal
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from fedring.ring.options import RingOptions
from tests.forks import Fork

PATIENCE = 100.0
NOTICED_WITHIN = 30.0  # seconds; without notice, the operation itself would wait for two minutes
SMALL, LARGE = 1000, 3_000_000  # values; allreduce has an algorithm for each, and the large one fills its streams
OVER_TCP = {"local_transport": False, "lost_after_seconds": 60}
FROZEN = {"lost_after_seconds": 8}  # longer than a busy machine keeps a healthy rank waiting


class Rank:
    """A `ring_worker` process, and the lines that it prints."""

    def __init__(self, rank: int, options: dict[str, Any], count: int) -> None:
        self.process = Fork(
            "tests.fault.ring_worker",
            [str(rank), json.dumps(options), str(count)],
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        self._lines: queue.Queue[dict[str, Any]] = queue.Queue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def tell(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(f"{line}\n".encode())

    def hear(self, key: str) -> dict[str, Any]:
        """Wait for the next line with this key, and return it."""
        while key not in (line := self._lines.get(timeout=PATIENCE)):
            assert "error" not in line, line
        return line

    def end(self) -> None:
        self.process.kill()  # works on a stopped process, too
        self.process.wait()
        self._reader.join()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream
            stream.close()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self._lines.put(json.loads(line))


@pytest.fixture
def ended() -> Iterator[ExitStack]:
    """Return a stack of callbacks that are called when the test ends."""
    with ExitStack() as stack:
        yield stack


def ring(ended: ExitStack, size: int, count: int = SMALL, **options: Any) -> list[Rank]:
    """Start ranks, and return them when they have finished one allreduce."""
    ranks = [Rank(rank, {**OVER_TCP, **options}, count) for rank in range(size)]
    for rank in ranks:
        ended.callback(rank.end)
    members = json.dumps([rank.hear("address")["address"] for rank in ranks])
    for rank in ranks:
        rank.tell(members)
    assert [rank.hear("sum")["sum"] for rank in ranks] == [size] * size
    return ranks


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


@pytest.mark.parametrize("local_transport", [False, True])
@pytest.mark.parametrize(("size", "count", "word"), [(4, SMALL, "run"), (3, LARGE, "run"), (3, SMALL, "idle")])
def test_a_frozen_rank_is_named_by_all_others_and_raises_when_it_wakes(
    ended: ExitStack, size: int, count: int, word: str, local_transport: bool
) -> None:
    ranks = ring(ended, size, count, local_transport=local_transport, **FROZEN)
    for rank in ranks:
        rank.tell(word)
    ranks[2].process.send_signal(signal.SIGSTOP)
    check_survivors(2, ranks, time.time())
    ranks[2].process.send_signal(signal.SIGCONT)
    assert ranks[2].hear("error")["error"] == "PeerLost"
    ranks[2].hear("closed")
    assert ranks[2].process.wait(PATIENCE) == 0


def test_by_default_a_silent_rank_is_lost_within_five_seconds() -> None:
    assert RingOptions().lost_after_seconds < 5


@pytest.mark.slow
def test_a_rank_that_holds_the_interpreters_lock_for_long_is_not_lost(ended: ExitStack) -> None:
    ranks = ring(ended, 3, LARGE, **FROZEN)
    ranks[0].tell("hold 16")
    for rank in ranks[1:]:
        rank.tell("again")
    for rank in ranks:
        assert rank.hear("sum")["sum"] == 3
        rank.tell("stop")
        rank.hear("closed")
        assert rank.process.wait(PATIENCE) == 0
