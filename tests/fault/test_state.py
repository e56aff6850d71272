"""A state folder whose parts are missing, exchanged, or in use: the server refuses it and changes nothing."""

import os
import shutil
import sqlite3
import time
from collections.abc import Callable
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from fedring.daemon.exits import Exit
from fedring.train import load_model
from fedring.train.models import vector
from tests import forks
from tests.damage import ask, write
from tests.fault import state_folder
from tests.fault.faulty_fleet import SECONDS
from tests.fleets import Control, Fleet
from tests.system.wire import SIZE, WireClient, deliver, outcome, run

ROUNDS_OF_LOG = 12


def train(fleet: Fleet) -> None:
    """Train one round, which must be published."""
    with Control(fleet.control) as control, WireClient(fleet.listen, "a") as client:
        job_id, events = run(control)
        deliver(client)
        assert outcome(control, job_id, events).state == "completed"


@pytest.fixture(scope="module")
def states(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make two states, `one` and `other`, of servers that have published two models and were killed."""
    folder = tmp_path_factory.mktemp("states")
    for name in ("one", "other"):
        with Fleet(folder / name) as fleet:
            train(fleet)
            fleet.server.kill()
    return folder


@pytest.fixture
def state(states: Path, tmp_path: Path) -> Path:
    """Copy the first of them for a test that changes it."""
    shutil.copytree(states / "one", tmp_path, dirs_exist_ok=True)
    return tmp_path / "state" / "server"


def files(state: Path) -> dict[str, int]:
    """Return the sizes of all files that must not change, by path."""
    return {str(path.relative_to(state)): path.stat().st_size for path in (state / "blobs").rglob("*")}


def refusal(folder: Path, *flags: str) -> str:
    """Start a server, which must refuse its state; return the last line of its log."""
    fleet = Fleet(folder)
    fleet.server.flags = list(flags)
    (folder / "logs").mkdir(exist_ok=True)
    fleet.server.start()
    assert fleet.server.wait(SECONDS) == Exit.CONFIG, fleet.server.tail()
    fleet.server.close()
    words = fleet.server.log.read_text()
    assert "Traceback" not in words
    return words.splitlines()[-1]


def lose_facts(state: Path, _: Path) -> None:
    for path in state.glob("facts.sqlite*"):
        path.unlink()


def empty_facts(state: Path, other: Path) -> None:
    lose_facts(state, other)
    (state / "facts.sqlite").touch()


def exchange_facts(state: Path, other: Path) -> None:
    lose_facts(state, other)
    for path in other.glob("facts.sqlite*"):
        shutil.copy(path, state)


def lose_blobs(state: Path, _: Path) -> None:
    shutil.rmtree(state / "blobs")


def exchange_blobs(state: Path, other: Path) -> None:
    lose_blobs(state, other)
    shutil.copytree(other / "blobs", state / "blobs")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lose_facts, "facts.sqlite is missing, empty or new"),
        (empty_facts, "facts.sqlite is missing, empty or new"),
        (exchange_facts, "belong to different states"),
        (lose_blobs, "blobs/ is missing or belongs to another state"),
        (exchange_blobs, "belong to different states"),
    ],
)
def test_a_state_with_missing_or_foreign_parts_is_refused_and_not_changed(
    change: Callable[[Path, Path], None], words: str, state: Path, states: Path, tmp_path: Path
) -> None:
    change(state, states / "other" / "state" / "server")
    before = files(state)
    last = refusal(tmp_path)
    assert words in last
    assert "Nothing was changed" in last
    assert files(state) == before


@pytest.fixture(scope="module")
def made_older(states: Path) -> Path:
    """Train another round on a copy of the first state, and put the database from before that round back."""
    folder = states / "older"
    shutil.copytree(states / "one", folder)
    with Fleet(folder) as fleet:
        train(fleet)
        fleet.server.kill()
    exchange_facts(folder / "state" / "server", states / "one" / "state" / "server")
    return folder


@pytest.fixture
def older(made_older: Path, tmp_path: Path) -> Path:
    """Copy that state for a test that changes it."""
    shutil.copytree(made_older, tmp_path, dirs_exist_ok=True)
    return tmp_path / "state" / "server"


@pytest.mark.parametrize("given", [(), ("--check-config",), ("--check-config", "--accept-older")])
def test_a_database_that_does_not_know_the_newest_model_is_refused(
    older: Path, tmp_path: Path, given: tuple[str, ...]
) -> None:
    before = files(older)
    words = refusal(tmp_path, *given)
    assert "is a model of round 2, which the database does not know" in words
    assert "fl-server --accept-older falls back to round 1 with 1 accepted updates and model 2" in words
    assert files(older) == before
    assert not (older / "unnamed").exists()


def test_an_older_database_is_accepted_in_a_new_epoch_and_the_models_that_it_lost_are_kept(
    older: Path, tmp_path: Path
) -> None:
    lost = sorted(files(older))
    fleet = Fleet(tmp_path)
    fleet.server.flags = ["--accept-older"]
    with fleet:
        words = fleet.server.log.read_text()
        train(fleet)
        fleet.server.flags = []
        fleet.restart_server()
        train(fleet)
    assert "goes on all the same: lost_commits: blobs/" in words
    ((epoch,),) = ask(older, "SELECT value FROM meta WHERE name = 'epoch'")
    assert int(str(epoch)) > 0
    unnamed = {path.name for path in (older / "unnamed").iterdir()}
    assert unnamed
    assert {f"blobs/{name}" for name in unnamed} <= set(lost)
    assert ask(older, "SELECT version FROM models ORDER BY version") == [(1,), (2,), (3,), (4,)]


def test_a_model_whose_row_was_never_committed_is_put_aside_at_the_next_start(state: Path, tmp_path: Path) -> None:
    """So a kill between the two leaves it. Its round is known, so nothing was lost."""
    ask(state, "DELETE FROM models WHERE version = 2")
    with Fleet(tmp_path) as fleet:
        train(fleet)
    assert len(list((state / "unnamed").iterdir())) >= 1


def test_what_was_put_aside_is_deleted_some_days_later(state: Path, tmp_path: Path) -> None:
    (state / "unnamed").mkdir()
    for name, days in (("old", 8), ("new", 6)):
        (state / "unnamed" / name).touch()
        then = time.time() - days * 86_400
        os.utime(state / "unnamed" / name, (then, then))
    with Fleet(tmp_path) as fleet:
        assert [path.name for path in (state / "unnamed").iterdir()] == ["new"]
        fleet.server.kill()
    with Fleet(tmp_path, {"keep_unnamed_days": 0}):
        assert list((state / "unnamed").iterdir()) == []


@pytest.mark.parametrize("reads", [False, True])
def test_the_log_is_emptied_after_each_round_that_was_published(tmp_path: Path, reads: bool) -> None:
    log = tmp_path / "state" / "server" / "facts.sqlite-wal"
    with (
        Fleet(tmp_path, {"database_log_bytes": 1 << 30}) as fleet,
        Control(fleet.control) as control,
        ExitStack() as stack,
    ):
        client = stack.enter_context(WireClient(fleet.listen, "a"))
        if reads:
            reader = stack.enter_context(closing(sqlite3.connect(log.with_name("facts.sqlite"), isolation_level=None)))
            reader.execute("BEGIN")
            reader.execute("SELECT * FROM meta").fetchall()
        job_id, events = run(control, rounds=ROUNDS_OF_LOG)
        for _ in range(ROUNDS_OF_LOG):
            deliver(client)
        assert outcome(control, job_id, events).state == "completed"
        # A round writes some ten pages of 16 KiB and more.
        assert (log.stat().st_size > ROUNDS_OF_LOG * 10 * (1 << 14)) == reads


def damage_schema(state: Path) -> None:
    facts = state / "facts.sqlite"
    facts.write_bytes(facts.read_bytes().replace(b"CREATE TABLE models", b"CREATE TABL\xe5 models"))


def damage_value(state: Path) -> None:
    ask(state, "UPDATE models SET delta_packets = '['")


def test_a_newest_model_whose_row_has_no_valid_blob_name_is_refused(state: Path, tmp_path: Path) -> None:
    write(state, "UPDATE models SET blob = upper(blob)")
    last = refusal(tmp_path)
    assert "model 2 is damaged" in last
    assert "is missing" in last


@pytest.mark.parametrize("change", [damage_schema, damage_value])
def test_a_database_with_an_unreadable_value_is_refused(
    change: Callable[[Path], None], state: Path, tmp_path: Path
) -> None:
    ask(state, "PRAGMA wal_checkpoint(TRUNCATE)")
    change(state)
    assert "corrupt: the database is damaged (" in refusal(tmp_path)


def make_0_1_0(state: Path) -> None:
    """Turn the state into one of fedring 0.1.0, whose tables lack the digests of rows."""
    for (table,) in ask(state, "SELECT name FROM sqlite_master WHERE sql LIKE '%row_digest%'"):
        ask(state, f"ALTER TABLE {table} DROP COLUMN row_digest")
    ask(state, "PRAGMA user_version = 13")


@pytest.mark.parametrize("flags", [(), ("--accept-older",), ("--drop-damaged",), ("--check-config",)], ids=str)
def test_a_state_of_fedring_0_1_0_is_refused_and_not_changed(
    flags: tuple[str, ...], state: Path, tmp_path: Path
) -> None:
    make_0_1_0(state)
    before = state_folder.files(state)
    last = refusal(tmp_path, *flags)
    assert "older_state: the state was written by fedring 0.1.0 or before (schema 13)" in last
    assert "go on with fedring 0.1.0, or give the server an empty folder; nothing was changed" in last
    assert state_folder.files(state) == before


def test_flctl_refuses_a_state_of_fedring_0_1_0_and_does_not_change_it(state: Path, tmp_path: Path) -> None:
    make_0_1_0(state)
    before = state_folder.files(state)
    for words in (("backup", tmp_path / "copy"), ("token", "create", "--name", "ann", "--role", "operator")):
        done = forks.run("fedring.ctl.main", *words, "--state-dir", state, timeout=SECONDS)
        assert done.returncode not in (0, 1), done.stderr
        assert "fedring 0.1.0" in done.stderr
    assert state_folder.files(state) == before


def forget_id(state: Path) -> None:
    """Remove the id on both sides, as if a database had been lost and another one made."""
    (state / "blobs" / "state_id").unlink()
    ask(state, "DELETE FROM meta WHERE name = 'state_id'")


def test_a_database_without_the_id_of_its_blobs_is_refused(state: Path, tmp_path: Path) -> None:
    forget_id(state)
    assert "facts.sqlite is missing, empty or new" in refusal(tmp_path)


def test_the_blobs_of_a_state_without_id_and_database_are_not_deleted(state: Path, tmp_path: Path) -> None:
    forget_id(state)
    lose_facts(state, state)
    before = files(state)
    assert "facts.sqlite is missing, empty or new" in refusal(tmp_path)
    assert files(state) == before


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the state of a server that was killed after its first start."""
    folder = tmp_path_factory.mktemp("started")
    with Fleet(folder) as fleet:
        fleet.server.kill()
    return folder


def killed_first_start(written: str, started: Path, folder: Path) -> Path:
    """Make what a first start leaves that is killed when so much of the state's id is written."""
    shutil.copytree(started, folder, dirs_exist_ok=True)
    state = folder / "state" / "server"
    (state / "blobs" / "state_id").rename(state / "blobs" / "state_id.new")
    if written == "half a draft":
        (state / "blobs" / "state_id.new").write_text("0123")
    if written != "draft and row":
        ask(state, "DELETE FROM meta WHERE name = 'state_id'")
    return state


@pytest.mark.parametrize("written", ["half a draft", "draft", "draft and row"])
def test_a_killed_first_start_can_be_repeated(written: str, started: Path, tmp_path: Path) -> None:
    state = killed_first_start(written, started, tmp_path)
    with Fleet(tmp_path) as fleet:
        train(fleet)
        assert (state / "blobs" / "state_id").exists()
        assert not (state / "blobs" / "state_id.new").exists()


def test_check_config_does_not_change_the_state(started: Path, tmp_path: Path) -> None:
    state = killed_first_start("draft", started, tmp_path)
    fleet = Fleet(tmp_path)
    fleet.server.flags = ["--check-config"]
    fleet.server.start()
    assert fleet.server.wait(SECONDS) == Exit.OK, fleet.server.tail()
    fleet.server.close()
    assert not (state / "blobs" / "state_id").exists()
    assert ask(state, "SELECT value FROM meta WHERE name = 'state_id'") == []


def test_a_folder_with_other_files_beside_the_blobs_is_a_new_state(tmp_path: Path) -> None:
    (tmp_path / "state" / "server" / "blobs" / "lost+found").mkdir(parents=True)
    with Fleet(tmp_path) as fleet:
        train(fleet)


def test_a_second_server_does_not_start_even_if_the_lock_file_was_deleted(tmp_path: Path) -> None:
    with Fleet(tmp_path / "one") as fleet:
        train(fleet)
        state = tmp_path / "one" / "state" / "server"
        (state / "lock").unlink()
        second = Fleet(tmp_path / "two", {"state_dir": str(state)})
        (tmp_path / "two" / "logs").mkdir(parents=True)
        second.server.start()
        assert second.server.wait(SECONDS) == Exit.CONFIG
        second.server.close()
        assert "is in use" in second.server.tail(1)
        load_model(0, vector(SIZE), state_dir=state)
        train(fleet)
