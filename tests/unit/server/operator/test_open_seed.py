"""The seed of a job with secure aggregation that sets none: chosen when the job starts, and durable with it."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from tests.unit.host import Host, running, spec

from fedring.server.operator.job_requests import _defaults_for, _is_of
from fedring.server.state.failures import StorageFailed, StoreError
from fedring.server.state.rows import ModelRow
from fedring.train.jobs.job import Job
from fedring.v1 import federation_pb2 as pb

NAMES = ("a", "b", "c")
SECURE: dict[str, Any] = {
    "model": "fedring.train.models:digits_mlp",
    "model_args": {"hidden": 4},
    "min_clients": 3,
    "min_clients_to_aggregate": 3,
    "secure_aggregation": {},
    "weights": "uniform",
    "evaluate": False,
    "start": "fresh",
}


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    async with running(tmp_path) as host:
        yield host


async def begun(host: Host, **keys: Any) -> tuple[int, pb.TrainCmd]:
    """Start a job, and return its id and the command of its first round."""
    first, *_ = [host.join(name) for name in NAMES]
    job, _ = await host.jobs.start(spec(**SECURE | keys), "")
    return job.job_id, await host.command(first)


async def seed_of(host: Host, job_id: int) -> int | None:
    """Return the seed in the stored specification of a job."""
    row = await host.facts.db(host.store.jobs.get, job_id)
    assert row is not None
    return row.spec.get("seed")


async def stop(host: Host, job_id: int) -> None:
    await host.jobs.stop(job_id)
    assert await host.ended(job_id) == "stopped"


async def test_each_job_begins_with_a_model_of_its_own_and_tells_its_seed(host: Host) -> None:
    found = set()
    for _ in range(2):
        job_id, command = await begun(host)
        seed = await seed_of(host, job_id)
        assert seed is not None
        assert command.job.seed == seed
        assert command.seed == seed * 1_000_003 + 1
        made = await host.facts.heavy(host.parts.models.maker.first, spec(**SECURE, seed=seed), 99)
        assert command.model_digest == made.digest
        found.add((seed, command.model_digest))
        await stop(host, job_id)
    assert len({seed for seed, _ in found}) == len({digest for _, digest in found}) == 2


@pytest.mark.parametrize(
    ("keys", "seed"), [({"seed": 0}, 0), ({"seed": 5}, 5), ({"secure_aggregation": None}, 0)], ids=str
)
async def test_a_seed_that_is_set_stays_and_so_does_that_of_a_job_without_secure_aggregation(
    host: Host, keys: dict[str, Any], seed: int
) -> None:
    digests = set()
    for _ in range(2):
        job_id, command = await begun(host, **keys)
        assert (await seed_of(host, job_id), command.job.seed) == (seed, seed)
        digests.add(command.model_digest)
        await stop(host, job_id)
    assert len(digests) == 1


async def test_a_job_that_continues_a_version_has_its_seed(host: Host) -> None:
    first, command = await begun(host)
    await stop(host, first)
    second, same = await begun(host, start="newest")
    assert await seed_of(host, second) == await seed_of(host, first)
    assert same.model_digest == command.model_digest
    await stop(host, second)
    third, _ = await begun(host, start=str(command.model_version), seed=9)
    assert await seed_of(host, third) == 9


async def test_a_restarted_server_goes_on_with_the_seed_that_was_told(tmp_path: Path) -> None:
    async with running(tmp_path) as host:
        job_id, command = await begun(host)
        seed = await seed_of(host, job_id)
    async with running(tmp_path) as again:
        first, *_ = [again.join(name) for name in NAMES]
        repeated = await again.command(first)
        assert (repeated.job.seed, repeated.seed) == (seed, command.seed)
        assert repeated.model_digest == command.model_digest
        assert await seed_of(again, job_id) == seed


async def test_a_seed_that_was_not_committed_was_told_to_nobody(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[int] = []

    def refuses(job: Any, *_: Any) -> None:
        drawn.append(job.spec["seed"])
        raise StoreError("database", "database is locked")

    async with running(tmp_path) as host:
        with monkeypatch.context() as patched:
            patched.setattr(host.store.jobs, "begin", refuses)
            job, _ = await host.jobs.start(spec(**SECURE), "")
            assert await host.ended(job.job_id) == "failed"
        assert (len(drawn), await seed_of(host, job.job_id)) == (1, None)
        assert await host.facts.db(host.store.models.newest, 9) == []


@pytest.mark.parametrize("start", ["fresh", "newest"])
async def test_a_disk_that_fails_after_a_seed_was_chosen_does_not_change_it(
    host: Host, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    first, _ = await begun(host)
    await stop(host, first)
    versions, begin, fails = host.parts.models.versions, host.store.jobs.begin, [True]
    remember = versions.remember

    def noted(*args: Any) -> None:
        begin(*args)
        monkeypatch.setattr(versions, "remember", once)

    def once(row: ModelRow) -> None:
        if fails:
            fails.clear()
            raise StorageFailed("disk_error", "the disk cannot be read for a moment")
        remember(row)

    monkeypatch.setattr(host.store.jobs, "begin", noted)
    async with host.mending():
        job_id, command = await begun(host, start=start)
    seed = await seed_of(host, job_id)
    assert seed
    assert (command.job.seed, command.seed) == (seed, seed * 1_000_003 + 1)


def test_a_request_that_is_repeated_is_the_same_although_a_seed_was_chosen_meanwhile() -> None:
    table = {key: value for key, value in spec(**SECURE).model_dump(mode="json").items() if key != "seed"}
    queued, begun = dict(table), {**table, "seed": 123}
    for stored in (queued, begun):
        assert _is_of(stored, spec(**SECURE))
        assert not _is_of(stored, spec(**SECURE, seed=0))
        assert not _is_of(stored, spec(**SECURE, rounds=2))
    assert _is_of(begun, spec(**SECURE, seed=123))


def test_a_server_fixes_the_seed_if_its_own_configuration_does() -> None:
    for defaults, fixed in ((Job.model_validate({}), False), (Job.model_validate({"seed": 3}), True)):
        job = Job.model_validate({**_defaults_for(SECURE, defaults), **SECURE})
        assert job.seed_is_open is not fixed
