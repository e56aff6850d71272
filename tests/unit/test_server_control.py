"""What the control service reads of the store for one answer."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from fedring.server import control as control_module
from fedring.server.blobs import FileBlobs
from fedring.server.config import ServerConfig
from fedring.server.control import ControlService
from fedring.server.coordinator import Coordinator
from fedring.server.facts import Facts
from fedring.server.jobs import Jobs
from fedring.server.journal import Journal
from fedring.server.models import Models
from fedring.server.rows import JobRow, RoundRow
from fedring.server.sessions import Sessions
from fedring.server.store import SqlStore
from fedring.v1 import control_pb2 as pb


class CountingStore(SqlStore):
    """A store that remembers how many rounds each transaction read."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.read: list[int] = []

    def rounds(self, limit: int = 100, job_id: int = 0, below: int = 0) -> list[RoundRow]:
        found = super().rounds(limit, job_id, below)
        self.read.append(len(found))
        return found

    def fill(self, rounds: int, *, clients: int) -> None:
        """Add ended rounds of so many clients each."""
        job = self.create_job(JobRow(0, "job", {}, rounds, 1.0, state="completed"))
        names = tuple(f"hospital-{i:04}" for i in range(clients))
        stats = {"clients": {name: {"num_samples": 600, "upload_bytes": 40_000} for name in names}}
        for number in range(1, rounds + 1):
            row = RoundRow(0, job.job_id, number, "published", 1.0, selected=names, ended_at=2.0, stats=stats)
            self.create_round(row)


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(f"sqlite:///{tmp_path / 'facts.sqlite'}")


@pytest.fixture
def service(store: CountingStore, tmp_path: Path) -> Iterator[ControlService]:
    config = ServerConfig.model_validate({"state_dir": tmp_path})
    facts = Facts(store, FileBlobs(tmp_path), threads=1)
    models = Models(facts.blobs, facts.pool, config, store.run_id)
    coordinator = Coordinator(facts, models, Sessions(10), Journal(), config)
    yield ControlService(coordinator, Jobs(coordinator), config.job, "1", refused=dict)
    facts.close()


async def listed(service: ControlService, *, limit: int = 0, below: int = 0) -> list[int]:
    answer = await service.ListRounds(pb.ListRequest(limit=limit, below=below), None)
    return [round_.round for round_ in answer.rounds]


async def test_many_small_rounds_take_few_transactions(service: ControlService, store: CountingStore) -> None:
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


async def test_an_answer_ends_where_it_is_full_though_more_was_read(
    service: ControlService, store: CountingStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.fill(20, clients=200)
    store.fill(20, clients=2)
    monkeypatch.setattr(control_module, "PAGE_BYTES", 20_000)
    answer = await service.ListRounds(pb.ListRequest(limit=40), None)
    assert answer.ByteSize() < 20_000 + 2 * answer.rounds[-1].ByteSize()
    assert max(store.read) > 20  # of both kinds
    numbers = [round_.round for round_ in answer.rounds]
    while numbers[-1] > 1:
        numbers += await listed(service, limit=40, below=numbers[-1])
    assert numbers == list(range(40, 0, -1))
