"""Crowds: a line for clients that come at once, and times away for those that are more than may be connected."""

import heapq
import random
from collections import deque
from itertools import pairwise

import pytest

from fedring.rpc.errors import MOST_AWAY
from fedring.server.sessions.crowd import ARRIVING, Line, PaceSteering

REGISTERED, MOST, STAY = 100_000, 1000, 30.0


def test_clients_that_come_at_once_get_places_as_far_apart_as_the_server_greets_them() -> None:
    slow, quick = Line(), Line()
    for number in range(2000):  # 400 a second
        quick.arrived(1000 + number / 400)
    places = [quick.place(1005) for _ in range(1000)]
    assert places == sorted(places)
    gaps = [later - earlier for earlier, later in pairwise(places)]
    assert max(gaps) == pytest.approx(min(gaps)) == pytest.approx(1 / (1.3 * 400), rel=0.05)
    assert [slow.place(5) for _ in range(100)][-1] == pytest.approx(1 + 100 / 150)
    assert slow.place(50) < 1.1  # the line is empty again
    assert max(slow.place(50) for _ in range(100_000)) <= 120  # also if somebody calls again and again


@pytest.mark.parametrize("rate", [60, 230, 600])
def test_a_crowd_is_greeted_as_fast_as_the_server_can(rate: int) -> None:
    """10,000 clients call within two seconds; the server greets `rate` in a second, one after the other."""
    line, drawn = Line(), random.Random(3)
    calls = [(drawn.uniform(0, 2), client) for client in range(10_000)]
    heapq.heapify(calls)
    joined: deque[float] = deque()  # when each client that has joined will be greeted
    free, refused = 0.0, 0
    while calls:
        now, client = heapq.heappop(calls)
        while joined and joined[0] <= now:
            line.arrived(joined.popleft())
        if len(joined) < ARRIVING:
            free = max(free, now) + 1 / rate
            joined.append(free)
        else:
            refused += 1
            heapq.heappush(calls, (now + line.place(now), client))
    assert free < 1.25 * 10_000 / rate
    assert refused < 3 * 10_000


def test_of_a_hundred_thousand_clients_few_are_connected_and_no_stampede_forms() -> None:
    pace, drawn = PaceSteering(MOST, STAY, seed=1), random.Random(2)
    calls = [(drawn.uniform(0, 600), client) for client in range(REGISTERED)]
    heapq.heapify(calls)
    leaves: list[tuple[float, int]] = []
    here: list[int] = []
    arrivals: dict[int, int] = {}  # by minute
    seen: set[int] = set()
    while calls[0][0] < 4800:
        now, client = heapq.heappop(calls)
        while leaves and leaves[0][0] <= now:
            at, leaver = heapq.heappop(leaves)
            assert pace.crowded(len(leaves) + 1, at)
            heapq.heappush(calls, (at + pace.leave(str(leaver), len(leaves) + 1, at), leaver))
        arrivals[int(now // 60)] = arrivals.get(int(now // 60), 0) + 1
        if len(leaves) >= MOST:
            heapq.heappush(calls, (now + pace.leave(str(client), len(leaves), now), client))
        else:
            seen.add(client)
            pace.came(str(client))
            heapq.heappush(leaves, (now + STAY, client))
        here.append(len(leaves))
    assert max(here) <= MOST
    assert sum(here[-50_000:]) / 50_000 > 0.9 * MOST
    settled = [arrivals[minute] for minute in range(30, 80)]
    assert max(settled) < 1.5 * sum(settled) / len(settled)  # 36 calls a second, evenly
    assert len(seen) > 0.75 * REGISTERED  # every client has its turn


def test_who_is_one_of_few_stays_and_nobody_is_sent_away_for_longer_than_a_day() -> None:
    pace = PaceSteering(10, STAY)
    assert not pace.crowded(10, 0)
    assert pace.crowded(11, 0)
    assert not PaceSteering(0, STAY).crowded(1_000_000, 0)
    seconds = pace.leave("a", 11, 0)
    assert seconds <= 1.5 * STAY
    assert pace.leave("a", 11, 1) == pytest.approx(seconds - 1)  # who calls again at once counts once
    assert pace.crowded(10, 1)
    assert not pace.crowded(9, 1)
    pace.came("a")
    assert not pace.crowded(10, 1)
    pace.leave("b", 11, 0)
    assert not pace.crowded(10, 2 * STAY)  # it should be back
    assert pace.leave("c", 1_000_000_000, 0) == MOST_AWAY
