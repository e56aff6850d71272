"""The control service: how much it reads from the store for one reply, and when it forgets a client."""

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest
from tests.journal_events import each_event
from tests.unit.host import Host, running, spec

from fedring.daemon.config import merge
from fedring.rpc.errors import ClientInUse, NoSuchClient, Unavailable
from fedring.rpc.identity import IDENTITY, LOCAL
from fedring.server.config import ServerConfig
from fedring.server.model.models import Models
from fedring.server.operator import listings
from fedring.server.operator.client_records import ClientRecords
from fedring.server.operator.control import ControlService
from fedring.server.operator.job_requests import _defaults_for
from fedring.server.operator.listings import MOST_ROWS
from fedring.server.parts import Parts, assemble
from fedring.server.recovery import reload
from fedring.server.round.events import Left
from fedring.server.services import control_service, model_streams
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.facts import Facts
from fedring.server.state.rows import EventRow, JobRow, Pruned, RoundRow
from fedring.server.state.sql.rounds import RoundStore
from fedring.server.state.sql.store import Store
from fedring.server.state.sql.transactions import Database
from fedring.train.jobs.job import Job
from fedring.v1 import control_pb2 as pb
from fedring.v1 import federation_pb2 as fed


class CountingStore(Store):
    """A store that remembers how many rounds each transaction read."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        counting = CountingRounds(self._database)
        self.rounds: RoundStore = counting
        self.read = counting.read

    def fill(self, rounds: int, *, clients: int) -> None:
        """Add a job with this number of ended rounds, each of which had this number of clients."""
        job = self.jobs.create(JobRow(0, "job", {}, rounds, 1.0, state="completed"))
        names = tuple(f"hospital-{i:04}" for i in range(clients))
        stats = {"clients": {name: {"num_samples": 600, "upload_bytes": 40_000} for name in names}}
        for number in range(1, rounds + 1):
            row = RoundRow(0, job.job_id, number, "published", 1.0, selected=names, ended_at=2.0, stats=stats)
            self.rounds.create(row)


class CountingRounds(RoundStore):
    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.read: list[int] = []

    def newest(self, limit: int = 100, job_id: int = 0, below: int = 0) -> list[RoundRow]:
        found = super().newest(limit, job_id, below)
        self.read.append(len(found))
        return found


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(f"sqlite:///{tmp_path / 'facts.sqlite'}")


@pytest.fixture
def service(store: CountingStore, tmp_path: Path) -> Iterator[ControlService]:
    config = ServerConfig.model_validate({"state_dir": tmp_path})
    facts = Facts(store, FileBlobs(tmp_path), threads=1)
    models = Models(facts.blobs, facts.pool, config, store.run_id)
    yield control_of(assemble(config, facts, models, Sessions(10)), config)
    facts.close()


async def listed(service: ControlService, *, limit: int = 0, below: int = 0) -> list[int]:
    """Return the numbers of the rounds that the service lists."""
    answer = await service.ListRounds(pb.ListRequest(limit=limit, below=below), None)
    return [round_.round for round_ in answer.rounds]


async def test_many_small_rounds_are_read_in_few_transactions(service: ControlService, store: CountingStore) -> None:
    store.fill(300, clients=2)
    assert await listed(service, limit=1000) == list(range(300, 0, -1))
    assert len(store.read) < 30
    assert max(store.read) <= 32
    store.read.clear()
    assert await listed(service, limit=70, below=200) == list(range(199, 129, -1))
    assert sum(store.read) == 70


async def test_rounds_of_many_clients_are_read_one_by_one(service: ControlService, store: CountingStore) -> None:
    store.fill(5, clients=1500)
    assert await listed(service) == [5, 4, 3, 2, 1]
    assert set(store.read) <= {0, 1}


async def test_a_reply_ends_where_it_is_full_even_if_more_rounds_were_read(
    service: ControlService, store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.fill(20, clients=200)
    store.fill(20, clients=2)
    monkeypatch.setattr(listings, "PAGE_BYTES", 20_000)
    answer = await service.ListRounds(pb.ListRequest(limit=40), None)
    assert answer.ByteSize() < 20_000 + 2 * answer.rounds[-1].ByteSize()
    assert max(store.read) > 20  # this transaction read small and large rounds
    numbers = [round_.round for round_ in answer.rounds]
    while numbers[-1] > 1:
        numbers += await listed(service, limit=40, below=numbers[-1])
    assert numbers == list(range(40, 0, -1))


def control_of(parts: Parts, config: ServerConfig) -> ControlService:
    return control_service(parts, model_streams(parts), config, refused=dict)


async def test_clients_are_listed_page_by_page_and_by_name_and_state(tmp_path: Path) -> None:
    host = Host(tmp_path)
    for name in ("b-ward", "a-ward", "a-lab"):
        host.join(name)
    IDENTITY.set(LOCAL)
    host.sessions.join(fed.JoinRequest(client_id="c-ward"), "test")  # it does not watch yet
    records = ClientRecords(host.rounds, host.sessions, host.facts, host.journal)

    async def listed(**request: Any) -> tuple[list[str], int]:
        page = await records.list(pb.ListRequest(**request))
        return [client.client_id for client in page.clients], page.total

    assert await listed() == (["a-lab", "a-ward", "b-ward", "c-ward"], 4)
    assert await listed(limit=2, skip=1) == (["a-ward", "b-ward"], 4)
    assert await listed(search="ward", limit=2) == (["a-ward", "b-ward"], 3)
    assert await listed(search="ward", state="joined") == (["c-ward"], 1)
    assert await listed(state="away", skip=2**60) == ([], 0)
    host.facts.close()


async def test_a_client_is_forgotten_once_it_is_away_and_its_round_has_ended(tmp_path: Path) -> None:
    request = pb.ForgetClientRequest(client_id="a")
    async with running(tmp_path) as host:
        control, sessions = control_of(host.parts, host.config), {client: host.join(client) for client in ("a", "b")}
        with pytest.raises(NoSuchClient, match="no update of 'a' was ever accepted"):
            await control.ForgetClient(request, None)
        job, _ = await host.jobs.start(spec(min_clients=2), "")
        command, _ = [await host.command(session) for session in sessions.values()]
        _, row = update = host.update(command, "a")
        await host.offer(update)
        assert host.facts.last_accepted["a"].name == row.name
        with pytest.raises(ClientInUse, match="a is in session: stop its fl-client first"):
            await control.ForgetClient(request, None)
        host.sessions.drop(sessions["a"])
        host.rounds.presence(Left("a"))
        with pytest.raises(
            ClientInUse, match=f"an update of a is in round {command.job_round} of job {job.job_id}: wait until"
        ):
            await control.ForgetClient(request, None)
        await host.offer(host.update(command, "b"))
        assert await host.ended(job.job_id) == "completed"
        assert await control.ForgetClient(request, None) == pb.ForgottenClient(client_id="a", updates=1)
        assert host.facts.last_accepted.keys() == {"b"}
        assert [row.client_id for row in await host.facts.db(host.store.updates.of_round, command.round)] == ["b"]
        forgotten = await first_event(host, "client_forgotten")
        assert (forgotten.client_id, forgotten.text) == ("a", "a was forgotten, with 1 update")
        with pytest.raises(NoSuchClient):
            await control.ForgetClient(request, None)


async def test_a_client_does_not_join_while_it_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    request = pb.ForgetClientRequest(client_id="a")
    async with running(tmp_path) as host:
        control, session = control_of(host.parts, host.config), host.join("a")
        job, _ = await host.jobs.start(spec(), "")
        await host.offer(host.update(await host.command(session), "a"))
        assert await host.ended(job.job_id) == "completed"
        host.sessions.drop(session)
        host.rounds.presence(Left("a"))
        forget = host.store.updates.forget_client

        def slow(client: str) -> Pruned:
            host.gate.pass_("forget")
            return forget(client)

        monkeypatch.setattr(host.store.updates, "forget_client", slow)
        host.gate.close("forget")
        calls = [asyncio.create_task(control.ForgetClient(request, None)) for _ in range(2)]
        await host.gate.reached()
        with pytest.raises(Unavailable, match="a is being forgotten: try again"):
            host.join("a")
        host.join("b")
        host.gate.open()
        assert await calls[0] == pb.ForgottenClient(client_id="a", updates=1)
        with pytest.raises(NoSuchClient):  # not as if it had been forgotten once more
            await calls[1]
        host.join("a")


async def test_an_update_that_is_accepted_meanwhile_is_not_told_as_forgotten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = pb.ForgetClientRequest(client_id="a")
    async with running(tmp_path) as host:
        counts = host.store.updates.counts

        def slow() -> Counter[str]:
            host.gate.pass_("counts")
            return counts()

        monkeypatch.setattr(host.store.updates, "counts", slow)
        control, sessions = control_of(host.parts, host.config), [host.join(client) for client in ("a", "b")]
        job, _ = await host.jobs.start(spec(min_clients=2, rounds=2), "")
        for client, session in zip("ab", sessions, strict=True):
            await host.offer(host.update(await host.command(session), client))
        command = await host.command(sessions[0])
        host.sessions.drop(sessions[0])
        host.rounds.presence(Left("a"))
        host.gate.close("counts")
        forgotten = asyncio.create_task(control.ForgetClient(request, None))
        await host.gate.reached()
        late = host.offer(host.update(command, "a"))
        async with asyncio.timeout(60):
            while host.facts.waiting < 2:  # noqa: ASYNC110 (until the update waits for the store, too)
                await asyncio.sleep(0)
        host.gate.open()
        assert not await late
        assert await forgotten == pb.ForgottenClient(client_id="a", updates=1)
        assert [row.client_id for row in await host.facts.db(host.store.updates.of_round, command.round)] == ["a"]
        assert job.job_id in host.jobs.running


async def test_no_client_is_forgotten_before_interrupted_rounds_go_on(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        sessions = {client: host.join(client) for client in ("a", "b")}
        await host.jobs.start(spec(min_clients=2), "")
        command, _ = [await host.command(session) for session in sessions.values()]
        await host.offer(host.update(command, "a"))
    host = Host(tmp_path)  # which was started again, and whose jobs do not run yet
    await reload(host.parts)
    with pytest.raises(ClientInUse, match="the server has just started, and may still count an update of a: try"):
        await control_of(host.parts, host.config).ForgetClient(pb.ForgetClientRequest(client_id="a"), None)
    assert [row.client_id for row in host.store.updates.of_round(command.round)] == ["a"]
    host.facts.close()


class Watching:
    """The context of a call that watches."""

    async def send_initial_metadata(self, metadata: object) -> None:
        """Do nothing: nobody is there."""


async def test_events_come_together_only_for_a_caller_who_asks(tmp_path: Path) -> None:
    host = Host(tmp_path)
    control = control_of(host.parts, host.config)
    for text in ("0", "1", "2"):
        host.journal.write("job_started", text)

    async def came(request: pb.WatchEventsRequest) -> pb.Event:
        async with asyncio.timeout(60), aclosing(control.WatchEvents(request, Watching())) as events:  # type: ignore[type-var]
            return await anext(events)

    alone = await came(pb.WatchEventsRequest(after=1))
    together = await came(pb.WatchEventsRequest(after=1, gathered=True))
    assert (alone.text, [*alone.later]) == ("0", [])
    assert [event.text for event in (together, *together.later)] == ["0", "1", "2"]
    del together.later[:]
    assert together == alone
    host.facts.close()


async def test_no_stored_event_is_left_out_however_many_there_are(tmp_path: Path) -> None:
    host, count = Host(tmp_path), 2 * MOST_ROWS + 500
    control = control_of(host.parts, host.config)
    host.store.events.append([EventRow(number, 1.0, "job_started", "old") for number in range(1, count + 1)])
    host.journal.begin(count)
    host.journal.write("job_started", "in memory")
    wanted = [*range(2, count + 1), host.journal.last_id]
    async with asyncio.timeout(60), aclosing(control.WatchEvents(pb.WatchEventsRequest(after=1), Watching())) as events:  # type: ignore[type-var]
        assert [(await anext(events)).id for _ in wanted] == wanted
        host.journal.write("job_started", "new")
        assert (await anext(events)).text == "new"
    host.facts.close()


async def test_a_job_is_found_by_its_id_however_old_it_is(service: ControlService, store: CountingStore) -> None:
    for number in range(3):
        store.jobs.create(JobRow(0, f"job-{number}", {}, 1, 1.0))
    for job_id, found in ((0, ["job-2"]), (1, ["job-0"]), (3, ["job-2"]), (4, []), (2**64 - 1, [])):
        answer = await service.ListJobs(pb.ListRequest(limit=1, job_id=job_id), None)
        assert [job.name for job in answer.jobs] == found


async def first_event(host: Host, kind: str) -> pb.Event:
    """Wait for the first event of this kind, and return it."""
    async with asyncio.timeout(60):
        return await anext(event async for event in each_event(host.journal, 1) if event.kind == kind)


@pytest.mark.parametrize("name", ["", "nobody", "x" * 1000, "\x1b[2J"])
async def test_a_client_that_never_delivered_an_update_cannot_be_forgotten(service: ControlService, name: str) -> None:
    with pytest.raises(NoSuchClient) as caught:
        await service.ForgetClient(pb.ForgetClientRequest(client_id=name), None)
    assert len(str(caught.value)) < 300
    assert "\x1b" not in str(caught.value)


DEFAULT_KRUM = {"rule": "krum", "malicious": 1, "bucketing": 2}


@pytest.mark.parametrize(
    ("default", "given", "result"),
    [
        ({"clients": {"site": "eu"}}, {}, {"clients": {"site": "eu"}}),
        ({"clients": {"site": "eu"}}, {"clients": {}}, {"clients": {}}),
        ({"clients": {"site": "eu"}}, {"clients": {"device": "phone"}}, {"clients": {"device": "phone"}}),
        ({"aggregation": DEFAULT_KRUM}, {"aggregation": {"rule": "mean"}}, {"aggregation": {"rule": "mean"}}),
        (
            {"aggregation": {"rule": "a:b", "args": {"c": 1}}},
            {"aggregation": {"rule": "a:d"}},
            {"aggregation": {"rule": "a:d"}},
        ),
        (
            {"aggregation": DEFAULT_KRUM},
            {"aggregation": {"bucketing": 1}},
            {"aggregation": {**DEFAULT_KRUM, "bucketing": 1}},
        ),
    ],
)
def test_a_job_replaces_the_tables_of_the_servers_default_that_it_does_not_mean(
    default: dict[str, object], given: dict[str, object], result: dict[str, object]
) -> None:
    defaults = Job.model_validate({"min_clients": 20, **default})
    job = Job.model_validate(merge(_defaults_for(given, defaults), given))
    assert job == Job.model_validate({"min_clients": 20, **result})
