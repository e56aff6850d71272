"""The threads of the state, and the end of trust in a disk."""

import asyncio
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from tests.unit.rows import a_model

from fedring.server.state.blobs import FileBlobs
from fedring.server.state.facts import Facts
from fedring.server.state.failures import FsyncFailed, StorageFailed
from fedring.server.state.files import database_url
from fedring.server.state.rows import ModelRow
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


async def test_a_model_whose_file_went_with_another_models_row_is_not_committed(tmp_path: Path) -> None:
    store, blobs = Store(database_url(tmp_path)), FileBlobs(tmp_path)
    facts = Facts(store, blobs, threads=1)

    def seal(content: bytes) -> str:
        partial = blobs.open_partial("model", fresh=True)
        partial.write(content)
        return blobs.seal_many([partial])[0]

    def model(version: int, optimizer: str = "") -> ModelRow:
        return replace(a_model(version, optimizer=optimizer), blob=seal(f"model {version}".encode()))

    async def commit(row: ModelRow) -> None:
        await facts.db(facts.commit_model, row, store.models.publish, row)

    await commit(model(1, seal(b"the state of an optimizer")))
    await commit(model(2))  # with which the state of version 1 is old
    made = model(3, seal(b"the state of an optimizer"))
    assert await facts.db(facts.prune, 10, 1, 100, 0)
    with pytest.raises(StorageFailed, match="made anew"):
        await commit(made)
    assert [row.version for row in store.models.newest(10)] == [2, 1]
    await commit(model(3, seal(b"the state of an optimizer")))
    blobs.reader(made.optimizer_blob).close()
    facts.close()
