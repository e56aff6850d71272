"""Uploads that a client repeats while the server still works on the previous attempt."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
from tests.unit.host import SIZE, Host, running, spec


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with running(tmp_path) as host:
        yield host


async def test_an_upload_that_was_cancelled_while_its_file_was_opened_can_be_repeated(host: Host) -> None:
    session, values = host.join("a"), np.ones(20_000, np.float32)
    job, _ = await host.jobs.start(spec(model_args={"size": values.size}), "")
    command = await host.command(session)
    host.gate.close("open_partial")
    first = asyncio.create_task(host.push(session, command, values))
    await host.gate.reached()
    first.cancel()
    host.gate.open()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (await host.push(session, command, values)).HasField("accepted")
    assert await host.ended(job.job_id) == "completed"


@pytest.mark.parametrize("size", [SIZE, 20_000])
async def test_a_retry_learns_that_the_previous_attempt_was_accepted_even_after_the_round_has_ended(
    host: Host, size: int
) -> None:
    values = np.ones(size, np.float32)
    session = host.join("a")
    await host.jobs.start(spec(rounds=2, model_args={"size": size}), "")
    command = await host.command(session)
    host.gate.close("updates.accept")
    first = asyncio.create_task(host.push(session, command, values))
    await host.gate.reached()
    session, published = host.join("a"), asyncio.Event()
    again = asyncio.create_task(host.push(session, command, values, after=published))
    await asyncio.wait([first])  # the second attempt has begun, and has ended the first
    host.gate.open()
    while (await host.command(session)).round == command.round:
        pass
    published.set()
    assert (await again).accepted.already
