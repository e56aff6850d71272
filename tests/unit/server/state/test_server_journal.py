"""The journal: each watcher that reads fast enough gets every event once, in order."""

import asyncio
import time
from collections.abc import AsyncIterator
from itertools import pairwise

import pytest
from tests.journal_events import each_event

from fedring.rpc.errors import Overloaded
from fedring.server.state.journal import RECENT, TOGETHER, TOGETHER_BYTES, Journal, rfc3339
from fedring.server.state.rows import EventRow
from fedring.v1 import control_pb2 as pb


async def some(events: AsyncIterator[pb.Event], count: int) -> list[str]:
    async with asyncio.timeout(60):
        return [(await anext(events)).text for _ in range(count)]


def test_ids_increase_even_if_the_clock_was_set_back() -> None:
    journal = Journal()
    tomorrow = int((time.time() + 86400) * 1e6)
    journal.begin(tomorrow)
    for _ in range(3):
        journal.write("job_started", "go")
    assert [event.id - tomorrow for event in journal.recent()] == [1, 2, 3]
    assert [event.id - tomorrow for event in journal.recent(tomorrow + 1)] == [2, 3]
    assert journal.last_id == tomorrow + 3


def test_ids_increase_within_one_microsecond() -> None:
    journal = Journal()
    for _ in range(1000):
        journal.write("job_started", "go")
    assert all(before.id < after.id for before, after in pairwise(journal.recent()))


async def test_a_watcher_gets_earlier_and_later_events_without_a_gap() -> None:
    journal = Journal()
    for number in range(3):
        journal.write("job_started", f"{number}")

    events = each_event(journal, journal.oldest)
    journal.write("job_started", "3")  # before the first is read
    assert await some(events, 3) == ["1", "2", "3"]
    journal.write("job_started", "4")
    assert await some(events, 1) == ["4"]


async def test_a_watcher_of_new_events_gets_no_earlier_ones() -> None:
    journal = Journal()
    journal.write("job_started", "old")

    events = each_event(journal, 0)
    journal.write("job_started", "new")
    assert await some(events, 1) == ["new"]


async def test_events_that_wait_come_together_but_large_ones_alone() -> None:
    journal = Journal()
    groups = journal.follow(0)
    large = "x" * TOGETHER_BYTES
    for text in ("0", "1", large, "2", "3", *["4"] * TOGETHER):
        journal.write("job_started", text)
    journal.close()
    came = [[event.text for event in group] async for group in groups]
    assert came[:2] == [["0", "1"], [large]]
    assert [text for group in came[2:] for text in group] == ["2", "3", *["4"] * TOGETHER]
    assert all(len(group) <= TOGETHER for group in came)
    again = journal.follow(1)
    assert [[event.text for event in await anext(again)] for _ in range(2)] == came[:2]


async def test_a_watcher_that_reads_too_slowly_gets_an_error_and_delays_nobody() -> None:
    journal = Journal()
    events = each_event(journal, 0)
    first = asyncio.create_task(some(events, 1))
    await asyncio.sleep(0)  # it watches now
    for number in range(RECENT + 2):
        journal.write("job_started", f"{number}")
    assert await first == ["0"]
    with pytest.raises(Overloaded, match="too slowly"):
        async for _ in events:
            pass


async def test_events_are_stored_in_order_except_those_that_rows_hold() -> None:
    journal = Journal()
    stored: list[EventRow] = []
    done = asyncio.Event()

    async def append(rows: list[EventRow]) -> None:
        stored.extend(rows)
        done.set()

    journal.write("client_joined", "a is here", client_id="a")
    journal.write("update_accepted", "a delivered", client_id="a")
    journal.write("round_published", "done", job_id=3, state=pb.Round(round=7))
    saving = asyncio.create_task(journal.save(append))
    await done.wait()
    saving.cancel()
    assert [(row.kind, row.job_id, row.round, row.client_id) for row in stored] == [
        ("client_joined", 0, 0, "a"),
        ("round_published", 3, 7, ""),
    ]
    assert [row.id for row in stored] == sorted({row.id for row in stored})


async def test_events_within_a_short_time_are_stored_together(monkeypatch: pytest.MonkeyPatch) -> None:
    journal, enough = Journal(), asyncio.Event()
    stored: asyncio.Queue[list[EventRow]] = asyncio.Queue()
    let_others = asyncio.sleep
    monkeypatch.setattr(asyncio, "sleep", lambda seconds: enough.wait())
    saving = asyncio.create_task(journal.save(stored.put))
    for text in ("one", "two"):
        journal.write("job_started", text)
        await let_others(0)
    enough.set()
    assert [row.text for row in await stored.get()] == ["one", "two"]
    saving.cancel()


def test_times_are_rfc_3339_in_utc() -> None:
    assert rfc3339(0.5) == "1970-01-01T00:00:00.500+00:00"
    assert rfc3339(None) == ""
