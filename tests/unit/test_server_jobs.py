"""The queue of jobs: a job that was stopped does not run, whenever it was stopped."""

import asyncio
import threading
from pathlib import Path

from fedring.server.config import ServerConfig
from fedring.server.model.models import Models
from fedring.server.parts import assemble
from fedring.server.round.sessions import Sessions
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.facts import Facts
from fedring.server.state.rows import JobRow
from fedring.server.state.store import SqlStore
from fedring.train.job import Job


class SlowStore(SqlStore):
    """A store that returns a job only when the test lets it."""

    def __init__(self) -> None:
        super().__init__("sqlite://")
        self.asked, self.answers = threading.Event(), threading.Event()

    def job(self, job_id: int) -> JobRow | None:
        row = super().job(job_id)
        self.asked.set()
        self.answers.wait(60)
        return row


async def test_a_job_that_is_stopped_just_before_its_turn_does_not_run(tmp_path: Path) -> None:
    store, blobs, config = SlowStore(), FileBlobs(tmp_path), ServerConfig.model_validate({"state_dir": tmp_path})
    facts = Facts(store, blobs, threads=1)
    models = Models(blobs, facts.pool, config, store.run_id)
    parts = assemble(config, facts, models, Sessions(1))
    jobs, events = parts.jobs, parts.journal.follow(0)
    job, _ = await jobs.start(Job.model_validate({"model": "fedring.train.models:digits_mlp"}), "")
    stop = asyncio.create_task(jobs.stop(job.job_id))
    await asyncio.to_thread(store.asked.wait, 60)  # `stop` has asked the store for the job, which is queued
    run = asyncio.create_task(jobs.run())
    await asyncio.sleep(0)  # `run` has asked for the queued jobs
    store.answers.set()
    async with asyncio.timeout(60):
        assert await stop == (job.job_id, 0)
        assert [(await anext(events)).kind for _ in range(2)] == ["job_started", "job_ended"]
    run.cancel()
    kept = await facts.db(store.job, job.job_id)
    assert kept is not None
    assert kept.state == "stopped"
    facts.close()
