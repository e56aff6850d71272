"""The coordinator with a real store and real blobs: what happens at the same time does no harm."""

import asyncio
import hashlib
import threading
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.unit.gate import Gate

from fedring.codec import Encoding, encode
from fedring.rpc.chunks import Piece
from fedring.rpc.contract import SESSION_KEY
from fedring.rpc.errors import OtherUpdate, Overloaded, UnknownRound
from fedring.rpc.identity import IDENTITY, LOCAL
from fedring.rpc.streams import METER, Meter
from fedring.server import rounds as rd
from fedring.server import uploads
from fedring.server.admit import Admitted, check_payload
from fedring.server.blobs import FileBlobs, FilePartial, Partial, StorageError
from fedring.server.config import ServerConfig
from fedring.server.coordinator import Coordinator
from fedring.server.facts import Facts
from fedring.server.jobs import Jobs
from fedring.server.journal import Journal
from fedring.server.models import Models
from fedring.server.packets import lay_out
from fedring.server.recovery import restore
from fedring.server.rows import ModelRow, RoundRow, UpdateRow
from fedring.server.sessions import Session, Sessions
from fedring.server.store import SqlStore
from fedring.server.store_api import Acceptance
from fedring.train.job import Job
from fedring.v1 import federation_pb2 as pb

SIZE = 8
ONES = np.ones(SIZE, np.float32)


def spec(**keys: Any) -> Job:
    fixed = {"model": "fedring.train.models:vector", "model_args": {"size": SIZE}, "evaluate": False, "min_clients": 1}
    return Job.model_validate({**fixed, **keys})


class GatedStore(SqlStore):
    """A store whose transactions can be held up."""

    def __init__(self, path: Path, gate: Gate) -> None:
        super().__init__(f"sqlite:///{path}")
        self._gate = gate

    def update_round(self, row: RoundRow) -> None:
        self._gate.pass_("update_round")
        super().update_round(row)

    def accept_updates(self, rows: Sequence[UpdateRow]) -> list[Acceptance]:
        self._gate.pass_("accept_updates")
        return super().accept_updates(rows)


class GatedModels(Models):
    """Models that take their time to be built."""

    gate: Gate

    def fitting(self, latest: ModelRow | None, job: Job) -> ModelRow:
        self.gate.pass_("fitting")
        return super().fitting(latest, job)


class FullBlobs(FileBlobs):
    """Blobs on a disk that may be full, or slow."""

    full = False
    gate: Gate

    def open_partial(self, name: str, *, fresh: bool = False) -> FilePartial:
        partial = super().open_partial(name, fresh=fresh)
        self.gate.pass_("open_partial")
        return partial

    def seal_many(self, partials: Sequence[Partial]) -> list[str]:
        if self.full:
            for partial in partials:
                partial.close()
            raise StorageError("disk_full", "no space left on device")
        return super().seal_many(partials)

    def drop_partials(self, prefix: str) -> None:
        self.gate.pass_("drop_partials")
        super().drop_partials(prefix)


class Call:
    """What of a call's context is looked at."""

    def __init__(self, session: Session) -> None:
        self._session_id = session.session_id

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ((SESSION_KEY, self._session_id),)

    def add_done_callback(self, callback: object) -> None:
        """It ends with the test."""


class Host:
    """A coordinator, its jobs, and clients that are here."""

    def __init__(self, root: Path) -> None:
        self.gate = Gate()
        self.store, self.blobs = GatedStore(root / "facts.sqlite", self.gate), FullBlobs(root)
        self.blobs.gate = self.gate
        self.config = ServerConfig.model_validate({"state_dir": root})
        self.facts = Facts(self.store, self.blobs, threads=1)
        models = GatedModels(self.blobs, self.facts.pool, self.config, self.store.run_id)
        models.gate = self.gate
        self.coordinator = Coordinator(self.facts, models, Sessions(10), Journal(), self.config)
        self.jobs = Jobs(self.coordinator)
        self.uploads = uploads.ClientUpdateService(self.coordinator, self.config)
        self._names = iter(range(1000))

    def join(self, client: str) -> Session:
        IDENTITY.set(LOCAL)
        session = self.coordinator.sessions.join(pb.JoinRequest(client_id=client), "test")
        self.coordinator.handle(rd.Joined(client))
        session.matched = True
        self.coordinator.matched(client)
        return session

    async def command(self, session: Session) -> pb.TrainCmd:
        """The client's next command."""
        async with asyncio.timeout(60):
            while True:
                event = pb.ServerEvent.FromString(await session.outbox.get())
                if event.WhichOneof("event") == "train":
                    return event.train

    def update(
        self, command: pb.TrainCmd, client: str, values: NDArray[np.float32] = ONES
    ) -> tuple[FilePartial, UpdateRow]:
        """An update, received and checked."""
        payload = encode(values, Encoding("fp32"))
        partial = self.blobs.open_partial(f"update-{next(self._names)}")
        partial.write(payload)
        packets = lay_out([("parameters", "delta", "fp32", len(payload))])
        size, digest = len(payload), partial.digest
        return partial, UpdateRow(command.round, client, digest, packets, 1, size, 0.1, 1.0, time.time(), blob=digest)

    async def push(
        self,
        session: Session,
        command: pb.TrainCmd,
        values: NDArray[np.float32],
        name: str = "fp32",
        *,
        after: asyncio.Event | None = None,
    ) -> pb.UpdateReply:
        """The last reply to an update that goes the whole way; its payload follows its header `after` the event."""
        METER.set(Meter())
        payload = encode(values, Encoding(name))
        packet = pb.Packet(vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_DELTA, encoding=name, bytes=len(payload))
        packet.num_samples = 1
        facts: dict[str, Any] = {"client_id": session.client_id, "packets": [packet], "total_bytes": len(payload)}
        for name in ("run_id", "round", "model_version", "schema_hash"):
            facts[name] = getattr(command, name)
        header = pb.UpdateHeader(digest=hashlib.sha256(payload).digest(), **facts)

        async def messages() -> AsyncIterator[pb.ClientUpdate | Piece]:
            yield pb.ClientUpdate(header=header)
            if after is not None:
                await after.wait()
            yield Piece(0, memoryview(payload))

        return [reply async for reply in self.uploads.PushUpdate(messages(), Call(session))][-1]

    def offer(self, update: tuple[FilePartial, UpdateRow]) -> "asyncio.Task[bool]":
        partial, row = update

        def may() -> None:
            round_ = self.coordinator.state.round
            if round_ is None or round_.number != row.round or round_.phase is not rd.Phase.TRAINING:
                raise UnknownRound("closed", reason="round_closed")

        return asyncio.get_running_loop().create_task(self.coordinator.acceptor.accept(partial, row, may))

    async def ended(self, job_id: int) -> str:
        """The state in which the job ended."""
        async with asyncio.timeout(60):
            async for event in self.coordinator.journal.follow(1):
                if event.kind == "job_ended" and event.job_id == job_id:
                    break
        row = await self.facts.db(self.store.job, job_id)
        assert row is not None
        return row.state


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    host = Host(tmp_path)
    await restore(host.coordinator, keep_models=10)
    async with asyncio.TaskGroup() as tasks:
        parts = (host.coordinator.run(), host.coordinator.acceptor.run(), host.jobs.run())
        running = [tasks.create_task(part) for part in parts]
        yield host
        assert not any(task.done() for task in running)
        host.gate.open()
        for task in running:
            task.cancel()
    host.facts.close()


async def test_a_round_goes_from_the_command_to_the_model(host: Host) -> None:
    session = host.join("a")
    job, _ = await host.jobs.start(spec(), "")
    command = await host.command(session)
    assert not await host.offer(host.update(command, "a"))
    assert await host.ended(job.job_id) == "completed"
    assert host.coordinator.latest is not None
    assert host.coordinator.latest.round == command.round


async def test_a_stop_while_the_round_starts_ends_it(host: Host) -> None:
    host.gate.close("update_round")
    job, _ = await host.jobs.start(spec(max_abandoned=5, rounds=5), "")
    host.join("a")
    await host.gate.reached()  # the row says "training", nobody knows it yet
    stop = asyncio.create_task(host.jobs.stop(job.job_id))
    await asyncio.sleep(0)  # it is on its way
    host.gate.open()
    assert (await stop)[1] == 1
    assert await host.ended(job.job_id) == "stopped"


async def test_a_stop_while_an_update_is_being_accepted_comes_after_it(host: Host) -> None:
    sessions = [host.join(client) for client in ("a", "b")]
    job, _ = await host.jobs.start(spec(min_clients=2), "")
    command, _ = [await host.command(session) for session in sessions]
    host.gate.close("accept_updates")
    offer = host.offer(host.update(command, "a"))
    await host.gate.reached()
    stop = asyncio.create_task(host.jobs.stop(job.job_id))
    await asyncio.sleep(0)
    host.gate.open()
    assert not await offer
    assert (await stop)[1] == command.round
    assert await host.ended(job.job_id) == "stopped"
    late = host.offer(host.update(command, "b"))
    with pytest.raises(UnknownRound):
        await late


async def test_a_deadline_that_falls_into_an_acceptance_counts_it(host: Host) -> None:
    sessions = [host.join(client) for client in ("a", "b")]
    job, _ = await host.jobs.start(spec(min_clients=2, deadline_seconds=600), "")
    command, _ = [await host.command(session) for session in sessions]
    host.gate.close("accept_updates")
    offer = host.offer(host.update(command, "a"))
    await host.gate.reached()
    state = host.coordinator.state
    assert state.round is not None
    host.coordinator.state = replace(state, round=replace(state.round, since=state.round.since - 600))
    assert rd.due(host.coordinator.state, time.monotonic()) == rd.Abandon("too_few_clients")
    host.coordinator.handle(rd.Joined("c"))
    await asyncio.sleep(0)  # what is due is on its way
    host.gate.open()
    assert not await offer
    assert await host.ended(job.job_id) == "completed"


async def test_a_stop_while_the_round_is_being_opened_ends_it(host: Host) -> None:
    host.gate.close("fitting")
    job, _ = await host.jobs.start(spec(rounds=3), "")
    await host.gate.reached()
    assert await host.jobs.stop(job.job_id) == (job.job_id, 0)
    host.gate.open()
    assert await host.ended(job.job_id) == "stopped"


async def test_a_stop_in_the_last_round_of_many_is_a_stop(host: Host) -> None:
    session = host.join("a")
    job, _ = await host.jobs.start(spec(rounds=2), "")
    await host.offer(host.update(await host.command(session), "a"))
    await host.command(session)
    await host.jobs.stop(job.job_id)
    assert await host.ended(job.job_id) == "stopped"


async def test_of_two_updates_of_one_client_the_second_is_refused(host: Host) -> None:
    session = host.join("a")
    host.join("b")
    await host.jobs.start(spec(min_clients=2), "")
    command = await host.command(session)
    first, second = (host.offer(host.update(command, "a", values)) for values in (ONES, 2 * ONES))
    assert not await first
    with pytest.raises(OtherUpdate):
        await second


async def test_a_full_disk_refuses_the_update_and_nothing_else(host: Host) -> None:
    session = host.join("a")
    job, _ = await host.jobs.start(spec(), "")
    command = await host.command(session)
    host.blobs.full = True
    with pytest.raises(Overloaded) as refused:
        await host.offer(host.update(command, "a"))
    assert refused.value.reason == "disk_full"
    host.blobs.full = False
    assert not await host.offer(host.update(command, "a"))
    assert await host.ended(job.job_id) == "completed"


async def test_an_evaluation_that_comes_as_its_round_ends_does_no_harm(host: Host) -> None:
    session = host.join("a")
    job, _ = await host.jobs.start(spec(evaluate=True, evaluate_seconds=0.1), "")
    command = await host.command(session)
    host.gate.close("drop_partials")
    await host.offer(host.update(command, "a"))
    await host.gate.reached()
    report = pb.EvaluationReport(round=command.round, model_version=2, total=1)
    evaluated = asyncio.create_task(host.coordinator.evaluated("a", report))
    await asyncio.sleep(0)  # it is on its way
    host.gate.open()
    await evaluated
    assert await host.ended(job.job_id) == "completed"
    await host.coordinator.evaluated("a", report)
    assert len(await host.facts.db(host.store.evaluations, 2)) == 1


async def test_old_updates_go_while_the_clients_of_a_later_round_train(host: Host) -> None:
    session = host.join("a")
    await host.jobs.start(spec(rounds=5), "")
    first = await host.command(session)
    await host.offer(host.update(first, "a"))
    for _ in range(host.config.keep_update_rounds):
        await host.offer(host.update(await host.command(session), "a"))
    await host.command(session)
    async with asyncio.timeout(60):
        while await host.facts.db(host.store.updates_of, first.round):
            pass
    assert host.coordinator.open is not None


async def test_a_model_whose_loss_is_no_number_is_published_without_a_score(host: Host) -> None:
    session = host.join("a")
    keys = {"model": "fedring.train.models:digits_mlp", "model_args": {}, "evaluate_on_server": True, "rounds": 2}
    job, _ = await host.jobs.start(spec(**keys), "")
    huge = np.full(64 * 64 + 64 + 64 * 10 + 10, 1e28, np.float32)  # below the norm from which updates are refused
    for _ in range(2):
        await host.offer(host.update(await host.command(session), "a", huge))
    assert await host.ended(job.job_id) == "completed"
    assert host.coordinator.last is not None
    assert "server_accuracy" not in host.coordinator.last.stats


async def test_a_client_that_goes_while_its_upload_is_opened_can_come_back(host: Host) -> None:
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
async def test_a_retry_learns_that_the_attempt_before_it_was_accepted_as_the_last_of_its_round(
    host: Host, size: int
) -> None:
    values = np.ones(size, np.float32)
    session = host.join("a")
    await host.jobs.start(spec(rounds=2, model_args={"size": size}), "")
    command = await host.command(session)
    host.gate.close("accept_updates")
    first = asyncio.create_task(host.push(session, command, values))
    await host.gate.reached()
    session, published = host.join("a"), asyncio.Event()
    again = asyncio.create_task(host.push(session, command, values, after=published))
    await asyncio.wait([first])  # the second has been let in, and has ended it
    host.gate.open()
    while (await host.command(session)).round == command.round:
        pass
    published.set()
    assert (await again).accepted.already


async def test_nobody_goes_before_the_thread_that_works_for_him(host: Host) -> None:
    host.gate.close("work")
    caller = asyncio.create_task(host.facts.work(host.gate.pass_, "work"))
    await host.gate.reached()
    for _ in range(3):
        caller.cancel()
        done, _ = await asyncio.wait([caller], timeout=0.05)
        assert not done
    host.gate.open()
    with pytest.raises(asyncio.CancelledError):
        await caller


async def test_few_bytes_that_stand_for_many_values_do_not_hold_up_the_loop(
    host: Host, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked = []

    def check(*given: Any) -> Admitted:
        checked.append(threading.current_thread() is threading.main_thread())
        return check_payload(*given)

    monkeypatch.setattr(uploads, "check_payload", check)
    session = host.join("a")
    for size in (SIZE, 500_000):
        await host.jobs.start(spec(model_args={"size": size}), "")
        await host.push(session, await host.command(session), np.zeros(size, np.float32), "uniform")
    assert checked == [True, False]
