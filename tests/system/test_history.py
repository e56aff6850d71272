"""The history of a large fleet can be listed."""

from pathlib import Path

from fedring.server.state.rows import JobRow, RoundRow
from fedring.server.state.sql.store import Store
from tests.fleets import Control, Fleet

CLIENTS, ROUNDS = 1000, 60


def test_many_rounds_of_many_clients_are_listed_in_several_messages(tmp_path: Path) -> None:
    state = tmp_path / "state" / "server"
    state.mkdir(parents=True)
    names = [f"hospital-{number:04}.example.org" for number in range(CLIENTS)]
    one = {"num_samples": 6000, "train_seconds": 12.5, "encoding": "packed", "upload_bytes": 40_000}
    stats = {"seconds": 20.0, "clients": {name: {**one, "metrics": {"loss": 0.5, "accuracy": 0.9}} for name in names}}
    store = Store(f"sqlite:///{state / 'facts.sqlite'}")
    job = store.jobs.create(JobRow(0, "large", {}, ROUNDS, 1.0, state="completed"))
    for number in range(1, ROUNDS + 1):
        store.rounds.create(
            RoundRow(0, job.job_id, number, "published", 1.0, selected=tuple(names), ended_at=2.0, stats=stats)
        )
    store.close()
    with Fleet(tmp_path) as fleet, Control(fleet.control) as control:
        rounds = control.rounds()
        assert [round_.round for round_ in rounds] == list(range(ROUNDS, 0, -1))
        assert sum(round_.ByteSize() for round_ in rounds) > 4 << 20  # more than gRPC allows in one message
        assert [len(round_.clients) for round_ in rounds] == [CLIENTS] * ROUNDS
        assert [round_.round for round_ in control.rounds(limit=25)] == list(range(ROUNDS, ROUNDS - 25, -1))
        assert [round_.round for round_ in control.rounds(number=7)] == [7]
        assert control.rounds(job_id=2) == []
