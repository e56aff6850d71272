"""The queue of jobs: a job that was stopped does not run, and a failure ends only the job in which it happens."""

import asyncio
import logging
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Connection
from tests.journal_events import each_event
from tests.unit.host import Host, running, spec

from fedring.codec.schema import Schema
from fedring.rpc.errors import NoSuchJob
from fedring.server.config import ServerConfig
from fedring.server.jobs.runner import JobRunner
from fedring.server.model.models import Models
from fedring.server.parts import assemble
from fedring.server.round.report import round_message
from fedring.server.sessions.sessions import Sessions
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.facts import Facts
from fedring.server.state.failures import FsyncFailed, StorageFailed, StoreError
from fedring.server.state.rows import JobRow
from fedring.server.state.sql import sealed
from fedring.server.state.sql.jobs import JobStore
from fedring.server.state.sql.models import ModelStore
from fedring.server.state.sql.store import Store
from fedring.server.state.sql.transactions import Database
from fedring.train.jobs.job import Job


class SlowStore(Store):
    """A store that returns a job only when the test lets it."""

    def __init__(self) -> None:
        super().__init__("sqlite://")
        self.slow = SlowJobs(self._database)
        self.jobs: JobStore = self.slow


class SlowJobs(JobStore):
    def __init__(self, database: Database) -> None:
        super().__init__(database)
        self.asked, self.answers = threading.Event(), threading.Event()

    def get(self, job_id: int) -> JobRow | None:
        row = super().get(job_id)
        self.asked.set()
        self.answers.wait(60)
        return row


async def test_a_job_that_is_stopped_just_before_its_turn_does_not_run(tmp_path: Path) -> None:
    store, blobs, config = SlowStore(), FileBlobs(tmp_path), ServerConfig.model_validate({"state_dir": tmp_path})
    facts = Facts(store, blobs, threads=1)
    models = Models(blobs, facts.pool, config, store.run_id)
    parts = assemble(config, facts, models, Sessions(1))
    jobs, events = parts.jobs, each_event(parts.journal, 0)
    job, _ = await jobs.start(Job.model_validate({"model": "fedring.train.models:digits_mlp"}), "")
    stop = asyncio.create_task(jobs.stop(job.job_id))
    await asyncio.to_thread(store.slow.asked.wait, 60)  # `stop` has asked the store for the job, which is queued
    run = asyncio.create_task(jobs.run())
    await asyncio.sleep(0)  # `run` has asked for the queued jobs
    store.slow.answers.set()
    async with asyncio.timeout(60):
        assert await stop == (job.job_id, 0)
        assert [(await anext(events)).kind for _ in range(2)] == ["job_started", "job_ended"]
    run.cancel()
    kept = await facts.db(store.jobs.get, job.job_id)
    assert kept is not None
    assert kept.state == "stopped"
    facts.close()


async def test_a_stop_that_is_confirmed_as_a_jobs_turn_comes_stays_in_the_store(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        host.gate.close("first model")
        job, _ = await host.jobs.start(spec(rounds=4), "")
        stop = asyncio.create_task(host.jobs.stop(job.job_id))
        assert await stop == (job.job_id, 0)
        await host.gate.reached()
        kept = await host.facts.db(host.store.jobs.get, job.job_id)
        assert kept is not None
        assert kept.state == "stopped"  # as a restart would find it
        host.gate.open()
        assert await host.ended(job.job_id) == "stopped"


@pytest.mark.parametrize("read", ["ended_of", "unended"])
async def test_a_store_that_somebody_else_holds_as_a_job_starts_fails_the_job_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: str
) -> None:
    def locked(*_: int) -> None:
        raise StoreError("database", "database is locked")

    async with running(tmp_path) as host:
        with monkeypatch.context() as patched:
            patched.setattr(host.store.rounds, read, locked)
            job, _ = await host.jobs.start(spec(), "")
            assert await host.ended(job.job_id) == "failed"
        row = await host.facts.db(host.store.jobs.get, job.job_id)
        assert row is not None
        assert "locked" in row.reason
        session = host.join("a")
        job, _ = await host.jobs.start(spec(), "")
        await host.offer(host.update(await host.command(session), "a"))
        assert await host.ended(job.job_id) == "completed"


async def test_a_queued_job_stays_in_the_queue_if_the_disk_refuses_its_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = sealed.put

    def refuse(connection: Connection, row: Any) -> None:
        if getattr(row, "state", "") == "stopped":
            raise StorageFailed("disk_full", "no space left on device")
        put(connection, row)

    async with running(tmp_path) as host:
        session = host.join("a")
        (first, _), (second, _) = [await host.jobs.start(spec(), "") for _ in range(2)]
        command = await host.command(session)
        with monkeypatch.context() as patched:
            patched.setattr(sealed, "put", refuse)
            with pytest.raises(StorageFailed):
                await host.jobs.stop(second.job_id)
        host.facts.storage.mend()
        await host.offer(host.update(command, "a"))
        assert await host.ended(first.job_id) == "completed"
        await host.offer(host.update(await host.command(session), "a"))
        assert await host.ended(second.job_id) == "completed"


def refuse_stop(self: JobStore, job_id: int) -> bool:
    raise StorageFailed("disk_full", "no space left on device")


@asynccontextmanager
async def refused_stop(
    host: Host, monkeypatch: pytest.MonkeyPatch, gate: str
) -> AsyncIterator[tuple[JobRow, asyncio.Task[tuple[int, int]]]]:
    """Stop a job that waits at a gate in the store, while the disk refuses its stop; then open the gate."""
    session = host.join("a")
    job, _ = await host.jobs.start(spec(), "")
    command = await host.command(session)
    monkeypatch.setattr(JobStore, "stop", refuse_stop)
    host.gate.close(gate)
    await host.offer(host.update(command, "a"))
    await host.gate.reached()
    async with host.mending():
        stop = asyncio.create_task(host.jobs.stop(job.job_id))
        await asyncio.sleep(0)  # it has asked the store, which is busy
        host.gate.open()
        yield job, stop


async def test_a_job_whose_stop_the_disk_refuses_ends_as_stopped_though_its_last_model_is_being_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An operator was told so."""
    publish = ModelStore.publish

    def slow(*args: Any) -> None:
        host.gate.pass_("publish")
        publish(*args)

    async with running(tmp_path) as host:
        monkeypatch.setattr(ModelStore, "publish", slow)
        async with refused_stop(host, monkeypatch, "publish") as (job, stop):
            assert await stop == (job.job_id, 0)
            assert await host.ended(job.job_id) == "stopped"


async def test_a_job_whose_stop_the_disk_refuses_as_its_end_is_being_noted_ends_as_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wind_up, stops = JobRunner.wind_up, list[asyncio.Task[tuple[int, int]]]()

    async def stop_behind(runner: JobRunner, row: JobRow, state: str, reason: str) -> tuple[str, str]:
        found = await wind_up(runner, row, state, reason)
        stops.append(asyncio.create_task(host.jobs.stop(row.job_id)))
        await asyncio.sleep(0)  # it has asked the store, before the job's end is noted
        return found

    async with running(tmp_path) as host:
        session = host.join("a")
        job, _ = await host.jobs.start(spec(), "")
        command = await host.command(session)
        monkeypatch.setattr(JobRunner, "wind_up", stop_behind)
        monkeypatch.setattr(JobStore, "stop", refuse_stop)
        async with host.mending():
            await host.offer(host.update(command, "a"))
            assert await host.ended(job.job_id) == "stopped"
            assert await stops[0] == (job.job_id, 0)


@pytest.mark.parametrize("which", ["it", "the only one"])
async def test_a_job_that_a_restart_interrupted_can_be_stopped_before_it_goes_on(tmp_path: Path, which: str) -> None:
    async with running(tmp_path) as host:
        session = host.join("a")
        job, _ = await host.jobs.start(spec(rounds=4), "")
        await host.command(session)
    async with running(tmp_path) as host:
        stopped, _ = await host.jobs.stop(job.job_id if which == "it" else 0)  # begins before the queue is looked at
        assert stopped == job.job_id
        assert await host.ended(job.job_id) == "stopped"
        assert host.rounds.interrupted.rows == {}


async def test_a_job_whose_end_was_noted_just_before_the_disk_refuses_its_stop_is_not_said_to_be_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_state = JobStore.set_state

    def slow(self: JobStore, *args: Any) -> JobRow:
        found = set_state(self, *args)
        host.gate.pass_("its end is noted")
        return found

    async with running(tmp_path) as host:
        monkeypatch.setattr(JobStore, "set_state", slow)
        async with refused_stop(host, monkeypatch, "its end is noted") as (job, stop):
            with pytest.raises(NoSuchJob, match=f"job {job.job_id} has just ended"):
                await stop
            assert await host.ended(job.job_id) == "completed"


async def test_a_job_that_has_just_ended_is_not_stopped_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as host:
        end_orphans = host.store.rounds.end_orphans

        def slow(job_id: int = 0) -> None:
            host.gate.pass_("its end is noted")
            end_orphans(job_id)

        monkeypatch.setattr(host.store.rounds, "end_orphans", slow)
        session = host.join("a")
        job, _ = await host.jobs.start(spec(), "")
        host.gate.close("its end is noted")
        await host.offer(host.update(await host.command(session), "a"))
        await host.gate.reached()
        stop = asyncio.create_task(host.jobs.stop(job.job_id))
        await asyncio.sleep(0)  # it has asked the store, which is busy
        host.gate.open()
        with pytest.raises(NoSuchJob, match=f"job {job.job_id} has just ended"):
            await stop
        assert await host.ended(job.job_id) == "completed"


async def test_a_stop_that_is_repeated_before_the_job_has_ended_is_confirmed_again(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        job, _ = await host.jobs.start(spec(), "")
        host.gate.close("first model")
        assert await host.jobs.stop(job.job_id) == (job.job_id, 0)
        await host.gate.reached()
        assert [await host.jobs.stop(job.job_id) for _ in range(2)] == [(job.job_id, 0)] * 2
        host.gate.open()
        assert await host.ended(job.job_id) == "stopped"


@pytest.mark.parametrize("place", ["publish", "prune"])
async def test_a_job_that_is_stopped_while_it_makes_its_last_model_ends_as_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Or just after that: an operator was told so."""
    async with running(tmp_path) as host:
        stored: Any = {"publish": host.store.models, "prune": host.store}[place]
        work = getattr(stored, place)

        def slow(*args: Any) -> Any:
            host.gate.pass_(place)
            return work(*args)

        session = host.join("a")
        job, _ = await host.jobs.start(spec(), "")
        command = await host.command(session)
        monkeypatch.setattr(stored, place, slow)
        host.gate.close(place)
        await host.offer(host.update(command, "a"))
        await host.gate.reached()
        stop = asyncio.create_task(host.jobs.stop(job.job_id))
        await asyncio.sleep(0)  # it has asked the store, which is busy
        host.gate.open()
        assert await stop == (job.job_id, 0)
        assert await host.ended(job.job_id) == "stopped"
        row = await host.facts.db(host.store.jobs.get, job.job_id)
        assert row is not None
        assert row.rounds_done == 1
        (told,) = [event.text for event in host.journal.recent() if event.kind == "job_ended"]
        assert told.endswith("was stopped")


@pytest.mark.parametrize(
    ("where", "state"),
    [("init", "failed"), ("configure", "failed"), ("combine", "failed"), ("evaluate", "completed")],
)
async def test_words_that_cannot_be_kept_end_no_more_than_their_job(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, where: str, state: str
) -> None:
    caplog.set_level(logging.CRITICAL + 1)  # such words cannot be sent to the process that shows them, either
    async with running(tmp_path, trusted=["fedring", "tests.unit.spinning"]) as host:
        session, rule = host.join("a"), {"rule": "tests.unit.spinning:Mumbles", "args": {"where": where}}
        job, _ = await host.jobs.start(spec(aggregation=rule, max_abandoned=1), "")
        if where in ("combine", "evaluate"):
            await host.offer(host.update(await host.command(session), "a"))
        assert await host.ended(job.job_id) == state
        row = await host.facts.db(host.store.jobs.get, job.job_id)
        assert row is not None
        (ended,) = await host.facts.db(host.store.rounds.newest, 1)
        told = row.reason if state == "failed" else round_message(ended).warnings[0]
        assert "  and  , which no database takes" in told


async def test_a_version_that_is_removed_while_a_job_chooses_it_is_not_chosen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running(tmp_path) as host:
        session = host.join("a")
        job, _ = await host.jobs.start(spec(start="fresh"), "")
        await host.offer(host.update(await host.command(session), "a"))
        assert await host.ended(job.job_id) == "completed"
        newest, before = [row.version for row in await host.facts.db(host.store.models.newest)]
        models = host.parts.models.maker.job_models
        schema_of = models.schema_of

        def slow(job: Job) -> Schema:
            monkeypatch.setattr(models, "schema_of", schema_of)
            host.facts.drop_models([newest])  # as the rounds of another job do if few are kept
            return schema_of(job)

        monkeypatch.setattr(models, "schema_of", slow)
        job, _ = await host.jobs.start(spec(start="newest"), "")
        await host.offer(host.update(await host.command(session), "a"))
        assert await host.ended(job.job_id) == "completed"
        row = await host.facts.db(host.store.jobs.get, job.job_id)
        assert row is not None
        assert row.start_version == before


@pytest.mark.parametrize("place", ["opens", "starts"])
async def test_a_disk_that_cannot_be_trusted_ends_the_daemon_and_not_only_the_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    def broken(*_: object) -> None:
        raise FsyncFailed("the disk lost pages")

    host = Host(tmp_path)
    monkeypatch.setattr(host.store.rounds, {"opens": "create", "starts": "replace"}[place], broken)
    host.join("a")
    await host.jobs.start(spec(), "")
    with pytest.raises(FsyncFailed):
        await host.jobs.run()
    host.facts.close()
