"""What a server and its clients have told is there after a power loss, whatever of their unsynced writes is lost."""

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import SEED, missing
from tests.once import made_once
from tests.power.losses import Recording, record_in
from tests.power.recording import JOBS
from tests.power.records import Record, build_layer

QUICK = ("secure and [dp]", "private", "[dp]", "pipeline")
UNSYNCED: dict[str, Callable[[Record], bool]] = {
    "blobs are not synced before they get their names": lambda record: "/server/partial/" in record.name,
    "the names of blobs are not synced": lambda record: record.name.endswith("/server/blobs"),
    "the database's log is not synced": lambda record: record.name.endswith("-wal"),
    "the names in a client's folder are not synced": lambda record: record.name.rpartition("/")[2][:7] == "client-",
    "a client's files are not synced": lambda record: (
        "/client-" in record.name and record.name[-4:] in (".new", "left")
    ),
    "the folders of a worker's checkpoints are not synced": lambda record: record.name.endswith("/checkpoints"),
    "a backup's files are not synced": lambda record: "/backups/" in record.name,
    "the folders of all machines are not synced": lambda record: record.name.endswith("/state"),
}
"""Programs that leave out a sync."""


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Record a fleet that trains a few jobs."""
    return made_once(tmp_path_factory, "power", lambda folder: recorded(folder, QUICK)) / "fleet"


def recorded(folder: Path, jobs: tuple[str, ...]) -> None:
    """Record a fleet that trains these jobs, in `fleet` of a folder."""
    if (library := build_layer(folder)) is None:
        missing("a C compiler for Linux, with which a layer under programs is built,")
    record_in(folder / "fleet", library, jobs)


@pytest.mark.slow
def test_what_was_told_is_there_after_a_power_loss(quick: Path, tmp_path: Path) -> None:
    recording = Recording(quick)
    assert recording.differences() == [], "the layer has not seen everything"
    losses = list(recording.losses(40, SEED, tmp_path / "lost"))
    assert [each for each in losses if each.faults] == []
    assert {each.machine for each in losses} == set(recording.machines)


@pytest.mark.soak
def test_a_fleet_whose_power_fails_ends_what_it_had_begun(quick: Path, tmp_path: Path) -> None:
    recording = Recording(quick)
    at = random.Random(SEED).randrange(len(recording.records))
    assert recording.go_on(at, SEED, tmp_path / "blackout") == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "unsynced", [pytest.param(each, marks=[] if at < 3 else pytest.mark.soak) for at, each in enumerate(UNSYNCED)]
)
def test_a_missing_sync_is_found(quick: Path, tmp_path: Path, unsynced: str) -> None:
    losses = Recording(quick, without=UNSYNCED[unsynced]).losses(400, SEED, tmp_path / "lost")
    assert any(each.faults for each in losses)


@pytest.mark.soak
def test_what_was_told_is_there_after_hundreds_of_power_losses(tmp_path: Path) -> None:
    recorded(tmp_path, tuple(JOBS))
    recording = Recording(tmp_path / "fleet")
    assert recording.differences() == []
    assert [each for each in recording.losses(600, SEED, tmp_path / "lost") if each.faults] == []
    rng = random.Random(SEED)
    for number in range(10):
        at = rng.randrange(len(recording.records))
        assert recording.go_on(at, SEED + number, tmp_path / f"blackout-{number}") == [], at
