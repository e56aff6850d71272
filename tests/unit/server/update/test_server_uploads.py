"""Uploads that end early, wherever they are: nothing stays open, no slot is lost, and each is counted once."""

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc import aio
from numpy.typing import NDArray
from tests.unit.host import ONES, Call, Host, running, spec

from fedring.codec import Encoding, encode
from fedring.codec.digest import name_of, update_name
from fedring.rpc.errors import (
    BadRequest,
    DamagedOnTheWay,
    FedringError,
    Gone,
    NotAllowed,
    OtherUpdate,
    Overloaded,
    TooLarge,
    UnknownRound,
)
from fedring.rpc.streams import METER, CallMeter
from fedring.server.service import upload_calls
from fedring.server.services import update_service
from fedring.server.sessions.sessions import Session
from fedring.server.update.admission import check_payload
from fedring.server.update.receipts import Receipts
from fedring.v1 import federation_pb2 as pb

PAYLOAD = encode(ONES, Encoding("fp32"))
LARGE = np.ones(20_000, np.float32)


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with running(tmp_path) as host:
        yield host


def counted(host: Host) -> dict[str, float]:
    """Return how many updates have been counted, by their result."""
    results = ("accepted", "duplicate", "rejected", "interrupted")
    read = host.parts.metrics.registry.get_sample_value
    return {result: read("fl_server_updates_total", {"result": result}) or 0.0 for result in results}


async def until(seen: Callable[[], object]) -> None:
    """Wait until what is looked for is seen."""
    async with asyncio.timeout(60):
        while not seen():  # noqa: ASYNC110  # a file tells nobody
            await asyncio.sleep(0.01)


class SmallCall(Call):
    """A call of small updates, as its service sees it."""

    def __init__(self, session: Session) -> None:
        super().__init__(session)
        self.requests: asyncio.Queue[Any] = asyncio.Queue()
        self.replies: asyncio.Queue[pb.Accepted] = asyncio.Queue()

    async def read(self) -> Any:
        return await self.requests.get()

    async def write(self, reply: pb.Accepted) -> None:
        self.replies.put_nowait(reply)


def small(command: pb.TrainCmd, client: str, payload: bytes) -> pb.SmallUpdate:
    packet = pb.Packet(vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_DELTA, encoding="fp32", bytes=len(payload))
    packet.num_samples = 1
    facts: dict[str, Any] = {name: getattr(command, name) for name in ("run_id", "epoch", "round", "schema_hash")}
    facts |= {"client_id": client, "packets": [packet], "total_bytes": len(payload)}
    header = pb.UpdateHeader(base_digest=command.model_digest, **facts).SerializeToString()
    digest = name_of(payload)
    offer = pb.UpdateOffer(header=header, payload_digest=digest, name=update_name(header, digest))
    return pb.SmallUpdate(offer=offer, payload=payload)


@pytest.mark.parametrize("place", ["open_partial", "check", "message"])
async def test_an_upload_gives_way_to_the_next_of_its_client_wherever_it_is(
    host: Host, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def check(*given: Any) -> float:
        host.gate.pass_("check")
        return check_payload(*given)

    monkeypatch.setattr(upload_calls, "check_payload", check)
    config = host.config.model_copy(update={"max_transfers": 2})  # a slot that is not given back would soon be missed
    host.uploads = update_service(host.parts, config)
    session, never = host.join("a"), asyncio.Event()
    job, _ = await host.jobs.start(spec(model_args={"size": LARGE.size}), "")
    command = await host.command(session)
    after = never if place == "message" else None
    for number in range(1, 4):
        host.gate.close(place)
        first = asyncio.create_task(host.push(session, command, LARGE, after=after))
        if place == "message":
            await until(host.blobs.partials)
        else:
            await host.gate.reached()
        second = asyncio.create_task(host.push(session, command, LARGE, after=never))
        await asyncio.sleep(0.01)  # it has ended the first one, and waits for it
        host.gate.open()
        await asyncio.wait([first])
        assert first.cancelled()
        second.cancel()
        await asyncio.wait([second])
        assert counted(host) == {"accepted": 0, "duplicate": 0, "rejected": 0, "interrupted": 2 * number}
    async with asyncio.timeout(60):
        assert not (await host.push(session, command, LARGE)).accepted.already
    assert await host.ended(job.job_id) == "completed"
    assert host.blobs.partials() == []
    assert counted(host)["accepted"] == 1


async def test_a_file_that_holds_more_than_the_payload_is_closed_and_begun_anew(host: Host) -> None:
    session = host.join("a")
    job, _ = await host.jobs.start(spec(model_args={"size": LARGE.size}), "")
    command = await host.command(session)
    name = f"{command.round}-{name_of(b'a')[-32:]}"
    with_more = host.blobs.open_partial(name)
    with_more.write(bytes(5 * LARGE.size))
    with_more.close()
    assert not (await host.push(session, command, LARGE)).accepted.already
    assert await host.ended(job.job_id) == "completed"


async def test_chunks_of_an_upload_that_breaks_off_are_kept(host: Host) -> None:
    session = host.join("a")
    await host.jobs.start(spec(model_args={"size": LARGE.size}), "")
    command = await host.command(session)
    with pytest.raises(BadRequest, match=r"ended at 30000 of"):
        await host.push(session, command, LARGE, damage=lambda payload: payload[:30_000], chunk=10_000)
    (name,) = host.blobs.partials()
    partial = host.blobs.open_partial(name)
    assert (partial.size, partial.digest) == (30_000, name_of(encode(LARGE, Encoding("fp32"))[:30_000]))
    partial.close()


async def test_an_update_whose_receipt_cannot_be_written_is_accepted_when_it_comes_again(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def full(*_: object) -> str:
        raise OSError(errno.ENOSPC, "no space left on device")

    session = host.join("a")
    job, _ = await host.jobs.start(spec(model_args={"size": LARGE.size}), "")
    command = await host.command(session)
    with monkeypatch.context() as broken:
        broken.setattr(Receipts, "note", full)
        with pytest.raises(Overloaded, match="receipts cannot be written"):
            await host.push(session, command, LARGE)
    assert not (await host.push(session, command, LARGE)).accepted.already
    assert await host.ended(job.job_id) == "completed"


async def test_four_chunks_are_written_together_however_short(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    session = host.join("a")
    job, _ = await host.jobs.start(spec(model_args={"size": LARGE.size}), "")
    command = await host.command(session)
    facts, jobs = host.parts.facts, list[str]()
    run = facts.work

    async def work(function: Any, *args: Any) -> Any:
        jobs.append(function.__name__)
        return await run(function, *args)

    monkeypatch.setattr(facts, "work", work)
    assert not (await host.push(session, command, LARGE, chunk=10_000)).accepted.already
    assert jobs.count("write") == 3  # of nine chunks, the last of which is alone
    assert await host.ended(job.job_id) == "completed"


@pytest.mark.parametrize("values", [ONES, LARGE], ids=["small", "large"])
async def test_each_upload_is_counted_once(host: Host, values: NDArray[np.float32]) -> None:
    session = host.join("a")
    host.join("b")
    await host.jobs.start(spec(min_clients=2, model_args={"size": values.size}), "")
    command = await host.command(session)
    with pytest.raises(DamagedOnTheWay):
        await host.push(session, command, values, damage=lambda payload: payload[:-1] + b"x")
    with pytest.raises(TooLarge):
        await host.push(session, command, values, damage=lambda payload: payload + b"x")
    with pytest.raises(UnknownRound):
        await host.push(session, command, values, round=command.round + 1)
    assert not (await host.push(session, command, values)).accepted.already
    assert (await host.push(session, command, values)).accepted.already
    with pytest.raises(OtherUpdate):
        await host.push(session, command, 2 * values)
    assert counted(host) == {"accepted": 1, "duplicate": 1, "rejected": 4, "interrupted": 0}


async def test_small_updates_of_one_call_are_answered_one_by_one(host: Host) -> None:
    METER.set(CallMeter())
    session = host.join("a")
    job, _ = await host.jobs.start(spec(rounds=2), "")
    call = SmallCall(session)
    serving = asyncio.create_task(host.uploads.PushSmallUpdates(iter(()), call))  # type: ignore[arg-type]
    for _ in range(2):
        update = small(await host.command(session), "a", PAYLOAD)
        for already in (False, True):
            call.requests.put_nowait(update)
            assert (await call.replies.get()).already == already
    call.requests.put_nowait(aio.EOF)
    await serving
    assert await host.ended(job.job_id) == "completed"
    assert counted(host) == {"accepted": 2, "duplicate": 2, "rejected": 0, "interrupted": 0}


async def test_a_small_update_that_is_being_accepted_is_answered_although_its_session_was_closed(host: Host) -> None:
    METER.set(CallMeter())
    session = host.join("a")
    await host.jobs.start(spec(), "")
    call, command = SmallCall(session), await host.command(session)
    serving = asyncio.create_task(host.uploads.PushSmallUpdates(iter(()), call))  # type: ignore[arg-type]
    host.gate.close("updates.accept")
    call.requests.put_nowait(small(command, "a", PAYLOAD))
    await host.gate.reached()
    session.close(Gone())
    host.gate.open()
    assert not (await call.replies.get()).already
    with pytest.raises(Gone):
        await serving


async def test_a_small_update_that_is_refused_ends_its_call_and_the_next_call_is_served(host: Host) -> None:
    METER.set(CallMeter())
    session = host.join("a")
    job, _ = await host.jobs.start(spec(), "")
    command = await host.command(session)
    for _ in range(2):
        call = SmallCall(session)
        call.requests.put_nowait(small(command, "b", PAYLOAD))
        with pytest.raises(NotAllowed):
            await host.uploads.PushSmallUpdates(iter(()), call)  # type: ignore[arg-type]
    call = SmallCall(session)
    call.requests.put_nowait(small(command, "a", PAYLOAD))
    call.requests.put_nowait(aio.EOF)
    await host.uploads.PushSmallUpdates(iter(()), call)  # type: ignore[arg-type]
    assert await host.ended(job.job_id) == "completed"
    assert counted(host) == {"accepted": 1, "duplicate": 0, "rejected": 2, "interrupted": 0}


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (PAYLOAD[:-1], "bad_chunk"),
        (b"", "bad_chunk"),
        (PAYLOAD[:-1] + bytes([PAYLOAD[-1] ^ 1]), "digest_mismatch"),
    ],
)
async def test_a_small_update_with_another_payload_than_its_offer_says_is_refused(
    host: Host, payload: bytes, reason: str
) -> None:
    METER.set(CallMeter())
    session = host.join("a")
    await host.jobs.start(spec(), "")
    call, update = SmallCall(session), small(await host.command(session), "a", PAYLOAD)
    update.payload = payload
    call.requests.put_nowait(update)
    with pytest.raises(FedringError) as refused:
        await host.uploads.PushSmallUpdates(iter(()), call)  # type: ignore[arg-type]
    assert refused.value.reason == reason
    assert counted(host) == {"accepted": 0, "duplicate": 0, "rejected": 1, "interrupted": 0}


async def test_a_small_update_whose_first_attempt_was_being_accepted_counts_once(host: Host) -> None:
    METER.set(CallMeter())
    session = host.join("a")
    job, _ = await host.jobs.start(spec(), "")
    update, calls = small(await host.command(session), "a", PAYLOAD), [SmallCall(session), SmallCall(session)]
    host.gate.close("updates.accept")
    calls[0].requests.put_nowait(update)
    first = asyncio.create_task(host.uploads.PushSmallUpdates(iter(()), calls[0]))  # type: ignore[arg-type]
    await host.gate.reached()
    calls[1].requests.put_nowait(update)
    calls[1].requests.put_nowait(aio.EOF)
    second = asyncio.create_task(host.uploads.PushSmallUpdates(iter(()), calls[1]))  # type: ignore[arg-type]
    await asyncio.wait([first])
    assert first.cancelled()
    host.gate.open()
    assert (await calls[1].replies.get()).already
    await second
    assert await host.ended(job.job_id) == "completed"
    assert counted(host)["accepted"] == 1
