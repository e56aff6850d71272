"""flctl migrate: a state moves from its folder into a database and an object store, and its job goes on."""

import json
import re
import shutil
from pathlib import Path

import pytest

from fedring.daemon.config import ConfigError
from fedring.daemon.crash import MOVING
from fedring.daemon.exits import Exit
from fedring.server.state.backup.contents import BackupError
from fedring.server.state.backup.create import back_up
from fedring.server.state.backup.restore import restore
from fedring.server.state.failures import StorageError
from fedring.server.state.identity import open_state
from fedring.server.state.shared.moving import move
from tests import forks
from tests.damage import flip
from tests.fault.faulty_fleet import SECONDS
from tests.fault.shared_place import Place, kill
from tests.fault.state_folder import JOB, is_complete, make_state_with_open_round, push, rows
from tests.fleets import Control, Fleet
from tests.system.wire import WireClient, run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the state of a killed server, with two published rounds and an open one."""
    return make_state_with_open_round(tmp_path_factory.mktemp("made"))


@pytest.fixture
def state(made: Path, tmp_path: Path) -> Path:
    """Copy it for a test that moves it, with what stays: a noise secret and the audit log."""
    copy = Path(shutil.copytree(made, tmp_path / "server"))
    (copy / "noise-0-3").write_bytes(b"s" * 32)
    (copy / "audit.jsonl").write_text("{}\n")
    return copy


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "place")


def moved_rows(place: Place) -> dict[str, list[object]]:
    """Return the rows of a moved state, but for the notes of its move."""
    found = place.rows()
    return found | {"meta": [row for row in found["meta"] if row[0] not in ("moved_by", "placed_in")]}


def starts(state: Path) -> bool:
    """Return whether fl-server takes the folder as its state."""
    try:
        store, blobs = open_state(state)
    except (ConfigError, StorageError):
        return False
    store.close()
    blobs.close()
    return True


def last_model(folder: Path, place: Place | None) -> tuple[str, list[int]]:
    """Run a job whose server is stopped in mid-round, move its state to a place, and finish the job there."""
    with (
        Fleet(folder) as fleet,
        Control(fleet.control) as control,
        WireClient(fleet.listen, "a") as a,
        WireClient(fleet.listen, "b") as b,
    ):
        job_id, _ = run(control, **JOB)
        for number in range(2):
            push(a, 2 * number)
            push(b, 2 * number + 1)
        push(a, 100)
    if place:
        words: tuple[str | Path, ...] = (
            "migrate",
            "--state-dir",
            folder / "state" / "server",
            *place.words,
            "-o",
            "json",
        )
        done = forks.run("fedring.ctl.main", *words, timeout=60)
        assert done.returncode == 0, done.stderr
        printed = json.loads(done.stdout)
        assert (printed["open_round"], printed["models"], printed["finished"]) == (3, 3, False)
    with (
        Fleet(folder, place.settings if place else {}) as fleet,
        Control(fleet.control) as control,
        WireClient(fleet.listen, "a") as a,
        WireClient(fleet.listen, "b") as b,
    ):
        events = control.follow_job(job_id)
        push(b, 101)  # a's update of this round was accepted before
        push(a, 200)
        push(b, 201)
        assert [event.kind for event in events][-1] == "job_ended"
        delivered = [row.delivered for row in control.rounds()]
        assert control.job(job_id).state == "completed"
        return control.models(limit=1)[0].digest, delivered


def test_a_moved_job_goes_on_in_mid_round_and_ends_with_the_same_model(place: Place, tmp_path: Path) -> None:
    stayed = last_model(tmp_path / "stays", None)
    moved = last_model(tmp_path / "moves", place)
    assert moved == stayed
    assert moved[1] == [2, 2, 2, 2]


def test_a_move_takes_the_rows_as_they_are_and_leaves_what_is_the_machines_own(
    state: Path, place: Place, tmp_path: Path
) -> None:
    before = rows(state)
    done = move(state, place.state_url, place.blob_url)
    assert moved_rows(place) == before
    assert done.aside.parent == state
    assert rows(done.aside) == before
    assert is_complete(done.aside)
    left = {path.name for path in state.iterdir()}
    assert left == {"audit.jsonl", "refused.jsonl", "noise-0-3", "lock", "moved_to", done.aside.name}
    assert not starts(state)
    with pytest.raises(ConfigError, match="was moved there already"):
        move(state, place.state_url, place.blob_url)
    other = Place(tmp_path / "other")
    with pytest.raises(ConfigError, match=re.escape(f"was moved to {place.state_url}")):
        move(state, other.state_url, other.blob_url)


@pytest.mark.parametrize("point", MOVING)
def test_a_killed_move_never_leaves_two_states_and_can_be_repeated(
    point: str, state: Path, place: Place, tmp_path: Path
) -> None:
    before = rows(state)
    kill(point, "migrate", "--state-dir", state, *place.words)
    examined = Path(shutil.copytree(state, tmp_path / "examined"))
    in_folder = starts(examined)
    assert in_folder == (point in ("shared_blobs_written", "shared_id_added"))
    in_database = bool(place.ask("SELECT to_regclass('models') IS NOT NULL")[0][0])
    assert in_database == (MOVING.index(point) >= MOVING.index("shared_rows_committed"))
    assert not (in_folder and in_database)
    done = move(state, place.state_url, place.blob_url)
    assert (done.contents is None) == in_database
    assert moved_rows(place) == before
    assert rows(done.aside) == before
    with place.led() as store:
        assert store.models.newest(1)[0].version == 3


def test_a_state_is_not_moved_while_it_is_used_or_onto_another_one(
    made: Path, state: Path, place: Place, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="there is no folder"):
        move(tmp_path / "nothing", place.state_url, place.blob_url)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match="there is no state in"):
        move(tmp_path / "empty", place.state_url, place.blob_url)
    with Fleet(tmp_path / "one") as fleet:
        used = fleet.directory / "state" / "server"
        with pytest.raises(ConfigError, match=f"is in use by process {fleet.server.pid}: stop fl-server first"):
            move(used, place.state_url, place.blob_url)
    with Fleet(tmp_path / "two", place.settings), pytest.raises(ConfigError, match="leads: stop all its servers first"):
        move(state, place.state_url, place.blob_url)
    before = rows(state)
    with pytest.raises(ConfigError, match="there is a state in the database"):
        move(state, place.state_url, place.blob_url)
    other = Place(tmp_path / "other")
    with pytest.raises(ConfigError, match="blob_url holds the objects of another state"):
        move(state, other.state_url, place.blob_url)
    assert rows(state) == before
    assert starts(state)


def test_a_damaged_state_is_not_moved(state: Path, place: Place) -> None:
    flip(next(path for path in sorted((state / "blobs").iterdir()) if path.name != "state_id"))
    with pytest.raises(BackupError, match="does not hold what was written to it"):
        move(state, place.state_url, place.blob_url)
    assert place.objects() == set()
    assert starts(state)


def test_a_server_with_state_url_does_not_begin_anew_beside_a_state_in_its_folder(
    state: Path, place: Place, tmp_path: Path
) -> None:
    fleet = Fleet(tmp_path, place.settings | {"state_dir": str(state)})
    fleet.server.log.parent.mkdir(exist_ok=True)
    fleet.server.start()
    assert fleet.server.wait(SECONDS) == Exit.CONFIG
    assert "move it with flctl migrate" in fleet.server.log.read_text()
    fleet.server.close()
    assert place.objects() == set()


def test_a_server_without_state_url_does_not_begin_anew_where_a_state_has_left(
    made: Path, state: Path, place: Place, tmp_path: Path
) -> None:
    move(state, place.state_url, place.blob_url)
    fleet = Fleet(tmp_path, {"state_dir": str(state)})
    fleet.server.log.parent.mkdir(exist_ok=True)
    fleet.server.start()
    assert fleet.server.wait(SECONDS) == Exit.CONFIG
    assert "or give state_url and blob_url" in fleet.server.log.read_text()
    fleet.server.close()
    back_up(made, tmp_path / "copy")
    restore(tmp_path / "copy", state)
    assert starts(state)
