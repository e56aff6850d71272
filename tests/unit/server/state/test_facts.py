"""The threads of the state, and the end of trust in a disk."""

import asyncio
import threading
from pathlib import Path

import pytest

from fedring.server.state.blobs import FileBlobs
from fedring.server.state.facts import Facts
from fedring.server.state.failures import FsyncFailed
from fedring.server.state.files import database_url
from fedring.server.state.sql.store import Store


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_failed_sync_ends_the_trust_in_the_disk_though_nobody_waits_for_it(
    tmp_path: Path, cancelled: bool
) -> None:
    facts = Facts(Store(database_url(tmp_path)), FileBlobs(tmp_path), threads=1)
    begun, may_end = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def sync() -> None:
        loop.call_soon_threadsafe(begun.set)
        may_end.wait()
        raise FsyncFailed("the disk lost pages")

    call = asyncio.create_task(facts.db(sync))
    await begun.wait()
    if cancelled:
        call.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError if cancelled else FsyncFailed):
        await call
    with pytest.raises(FsyncFailed, match="the disk lost pages"):
        await facts.storage.until_distrusted()
    facts.close()


async def test_an_error_that_no_future_takes_is_raised_as_another(tmp_path: Path) -> None:
    facts = Facts(Store(database_url(tmp_path)), FileBlobs(tmp_path), threads=1)
    with pytest.raises(RuntimeError, match="StopIteration"):
        await facts.db(lambda: next(iter(())))
    facts.close()
