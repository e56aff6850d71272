"""Calls that send the same model at the same time read and digest it once, and check every byte that they send."""

import asyncio
import threading
from collections.abc import AsyncGenerator, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedring.codec import Vectors
from fedring.rpc.chunks import CHUNK_BYTES
from fedring.rpc.errors import UnknownModel
from fedring.server.aggregation.aggregate import store_model
from fedring.server.aggregation.versions import ModelVersions
from fedring.server.model.downloads import Downloads
from fedring.server.service import downloads as service
from fedring.server.service.downloads import ModelStreams
from fedring.server.state.blobs import FileBlobs, FileReader
from fedring.server.state.facts import Facts
from fedring.server.state.failures import DamagedModel
from fedring.server.state.lead import Lead
from fedring.server.state.sql.store import Store
from fedring.train.models import vector
from fedring.train.tensors.state import schema_of
from fedring.v1 import federation_pb2 as pb

RANGES = [pb.ValueRange(vector=pb.VECTOR_PARAMETERS, start=0, count=1)]
CHUNKS = 9
VALUES = (CHUNKS - 1) * CHUNK_BYTES // 4 + 10


class CountedBlobs(FileBlobs):
    """Blobs of which a test knows how often each long range was read."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.reads: list[int] = []
        self.opened_by: set[int] = set()  # threads

    def reader(self, digest: str) -> FileReader:
        self.opened_by.add(threading.get_ident())
        reader = super().reader(digest)
        read = reader.read

        def counted(offset: int, size: int) -> bytes:
            if size > CHUNK_BYTES // 2:
                self.reads.append(offset)
            return read(offset, size)

        reader.read = counted  # type: ignore[method-assign]  # the test counts
        return reader


class Server:
    """One model, and what is told of damaged ones."""

    def __init__(self, root: Path) -> None:
        self.blobs = CountedBlobs(root)
        self.facts = Facts(Store("sqlite://"), self.blobs, threads=1)
        schema, versions = schema_of(vector(VALUES)), ModelVersions(self.blobs)
        for version in (2, 1):
            values = Vectors(np.arange(version, VALUES + version, dtype=np.float32), np.empty(0))
            self.row = store_model(schema, values, self.blobs, {}).row(schema, version=version, number=0)
            versions.remember(self.row)
            self.facts.store.models.publish(self.row)
        self.path = root / "blobs" / self.row.blob
        self.told: list[DamagedModel] = []
        self.streams = ModelStreams(Downloads(self.blobs, "run-1", versions), self.facts, self._tell)

    async def _tell(self, error: DamagedModel) -> None:
        self.told.append(error)

    def call(self, version: int = 1, **keys: Any) -> AsyncGenerator[Any, None]:
        return self.streams.messages(pb.FetchModelRequest(version=version, **keys))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    server = Server(tmp_path)
    yield server
    server.facts.close()


async def some(call: AsyncGenerator[Any, None], count: int) -> list[bytes]:
    return [await anext(call) for _ in range(count)]


async def rest(call: AsyncGenerator[Any, None]) -> list[bytes]:
    return [message async for message in call]


def test_calls_side_by_side_read_every_chunk_once(server: Server) -> None:
    async def run() -> list[list[bytes]]:
        calls = [server.call() for _ in range(3)]
        sent: list[list[bytes]] = [[] for _ in calls]
        for _ in range(1 + CHUNKS):
            for call, messages in zip(calls, sent, strict=True):
                messages += await some(call, 1)
        assert not [message for call in calls for message in await rest(call)]
        return sent

    first, *others = asyncio.run(run())
    assert len(first) == 1 + CHUNKS
    assert all(messages[1:] == first[1:] for messages in others)
    assert len(server.blobs.reads) == len(set(server.blobs.reads)) == CHUNKS - 1


def test_a_call_that_comes_too_late_sends_the_same_bytes(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_KEPT", 2)

    async def run() -> tuple[list[bytes], list[bytes]]:
        quick, slow = server.call(), server.call()
        before = await some(quick, 2), await some(slow, 2)
        ahead = before[0] + await some(quick, CHUNKS - 2)
        behind = before[1] + await rest(slow)  # goes on alone, meets the others, and is the first at the end
        return ahead + await rest(quick), behind

    ahead, behind = asyncio.run(run())
    assert ahead[1:] == behind[1:]
    assert len(behind) == 1 + CHUNKS
    assert not server.told


def test_a_call_that_comes_too_late_sends_no_damaged_chunk(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_KEPT", 2)

    async def run() -> None:
        quick, slow = server.call(), server.call()
        await some(slow, 2)
        assert len(await rest(quick)) == 1 + CHUNKS
        with server.path.open("r+b") as file:
            file.seek(server.row.bytes - 5 * CHUNK_BYTES)
            file.write(b"damage")
        with pytest.raises(DamagedModel):
            await rest(slow)

    asyncio.run(run())
    assert [error.digest for error in server.told] == [server.row.blob]


def test_all_calls_learn_of_damage_before_the_last_chunk(server: Server) -> None:
    with server.path.open("r+b") as file:
        file.seek(server.row.bytes - 5 * CHUNK_BYTES)
        file.write(b"damage")

    async def run() -> None:
        calls = [server.call(), server.call()]
        for call in calls:
            await some(call, CHUNKS)
        for call in calls:
            with pytest.raises(DamagedModel):
                await anext(call)

    asyncio.run(run())
    assert len(server.told) == 2


def test_a_payload_goes_on_when_the_call_that_began_it_has_ended(server: Server) -> None:
    async def run() -> int:
        gone, other = server.call(), server.call()
        await some(gone, 4)
        sent = await some(other, 2)
        await gone.aclose()
        return len(sent + await rest(other))

    assert asyncio.run(run()) == 1 + CHUNKS
    assert len(server.blobs.reads) == CHUNKS - 1


def test_a_call_alone_keeps_no_chunks(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_KEPT", 2)

    async def run() -> int:
        call = server.call()
        await some(call, 6)
        payload = server.streams._shared._open
        assert payload is not None
        return len(payload._kept)

    assert asyncio.run(run()) == 1


def test_a_call_that_begins_later_does_not_end_what_others_share(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_KEPT", 2)

    async def run() -> list[list[bytes]]:
        first, second = server.call(), server.call()
        sent = [await some(first, 1), await some(second, 1)]
        for _ in range(4):
            sent[0] += await some(first, 1)
            sent[1] += await some(second, 1)
        third = server.call()
        sent.append(await some(third, 1))
        for index, call in enumerate((first, second, third)):
            sent[index] += await rest(call)
        return sent

    sent = asyncio.run(run())
    assert all(messages[1:] == sent[0][1:] for messages in sent)
    assert len(sent[2]) == 1 + CHUNKS


def test_slow_calls_keep_no_others_from_sharing_the_next_model(server: Server) -> None:
    async def run() -> tuple[list[bytes], list[bytes], list[bytes]]:
        slow, stuck = server.call(), server.call()
        sent = await some(slow, 5)
        await some(stuck, 2)
        server.blobs.reads.clear()
        first, second = server.call(2), server.call(2)
        await some(first, 1)
        await some(second, 1)
        for _ in range(CHUNKS):
            assert await some(first, 1) == await some(second, 1)
        reads = list(server.blobs.reads)
        whole = await rest(server.call())
        sent += await rest(slow)
        behind = await rest(stuck)
        assert len(reads) == len(set(reads)) == CHUNKS - 1
        return whole, sent, behind

    whole, sent, behind = asyncio.run(run())
    assert sent[1:] == whole[1:]
    assert behind == whole[2:]


def test_a_call_that_resumes_sends_the_rest(server: Server) -> None:
    async def run() -> tuple[list[bytes], list[bytes]]:
        whole = await rest(server.call())
        header: Any = whole[0]
        resumed = server.call(offset=6 * CHUNK_BYTES, payload_name=header.header.payload_name)
        return whole, await rest(resumed)

    whole, resumed = asyncio.run(run())
    assert resumed[1:] == whole[7:]


def test_a_model_that_is_an_object_is_fetched_beside_the_event_loop(server: Server) -> None:
    async def run() -> list[bytes]:
        server.blobs.opened_by.clear()
        return await rest(server.call())

    assert len(asyncio.run(run())) == 1 + CHUNKS
    assert server.blobs.opened_by == {threading.get_ident()}
    server.facts.lead = Lead(True, "here:8443")
    assert len(asyncio.run(run())) == 1 + CHUNKS
    assert server.blobs.opened_by
    assert threading.get_ident() not in server.blobs.opened_by


@pytest.mark.parametrize("begun", [False, True])
def test_a_model_that_is_removed_as_it_is_sent_is_not_told_to_be_damaged(server: Server, begun: bool) -> None:
    """It is looked for, as everybody is told a moment later that it is gone, or parts of it are still to be fetched."""

    async def run() -> None:
        call = server.call(ranges=RANGES if begun else [])
        if begun:
            reader = server.blobs.reader

            def removed(digest: str) -> FileReader:
                server.blobs.reader = reader  # type: ignore[method-assign]  # it is opened twice
                opened = reader(digest)
                asyncio.run_coroutine_threadsafe(server.facts.db(server.facts.drop_models, [1]), loop).result()
                return opened

            loop, server.blobs.reader = asyncio.get_running_loop(), removed  # type: ignore[method-assign]
        else:
            await server.facts.db(server.facts.drop_models, [1])
        with pytest.raises(UnknownModel, match="model 1 is not kept any more"):
            await rest(call)

    asyncio.run(run())
    assert not server.told
