"""flctl restore: a backup becomes the state, or nothing changes; a restore that was killed can be repeated."""

import json
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from fedring.daemon.config import ConfigError
from fedring.daemon.crash import RESTORING
from fedring.daemon.exits import Exit
from fedring.rpc.identity import Role
from fedring.server.guard.tokens import create_offline
from fedring.server.state import identity
from fedring.server.state.backup.contents import BackupError, digest_of
from fedring.server.state.backup.create import back_up
from fedring.server.state.backup.restore import restore
from fedring.server.state.failures import StorageError
from fedring.server.state.identity import open_state
from tests import forks
from tests.damage import ask, flip, set_epoch, write
from tests.fault.faulty_fleet import SECONDS
from tests.fault.state_folder import files, is_complete, make_state_with_open_round, rows
from tests.fleets import Control, Fleet


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with `copy`, a backup of one server, and `state`, the state of another one."""
    folder = tmp_path_factory.mktemp("made")
    state = make_state_with_open_round(folder / "one", 1)
    back_up(state, folder / "copy")
    shutil.copytree(make_state_with_open_round(folder / "other", 2), folder / "state")
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    """Copy the backup for a test that damages it."""
    return Path(shutil.copytree(made / "copy", tmp_path / "copy"))


@pytest.fixture
def state(made: Path, tmp_path: Path) -> Path:
    """Copy the other server's state for a test that replaces it."""
    return Path(shutil.copytree(made / "state", tmp_path / "state" / "server"))


def a_blob(copy: Path) -> Path:
    return next(path for path in sorted((copy / "blobs").iterdir()) if path.name != "state_id")


def check_restored(state: Path, copy: Path) -> int:
    """Assert that the state has the contents of the backup `copy` and names it; return the epoch of its rounds."""
    found, wanted = rows(state), rows(copy)
    meta, before = ({name: value for name, value, _ in each.pop("meta")} for each in (found, wanted))
    epoch = int(meta["epoch"])
    assert meta == before | {"epoch": str(epoch), "restored_from": digest_of(copy / "facts.sqlite")}
    assert found == wanted
    assert epoch > int(before.get("epoch", "0"))
    assert is_complete(state)
    return epoch


def update_digest(copy: Path) -> None:
    """Write the present digest of the backup's database into its manifest."""
    manifest = json.loads((copy / "backup.json").read_text())
    manifest["facts_digest"] = digest_of(copy / "facts.sqlite")
    (copy / "backup.json").write_text(json.dumps(manifest))


def truncate_facts(copy: Path) -> None:
    os.truncate(copy / "facts.sqlite", (copy / "facts.sqlite").stat().st_size // 2)


def truncate_facts_with_digest(copy: Path) -> None:
    truncate_facts(copy)
    update_digest(copy)


def set_newer_schema(copy: Path) -> None:
    ask(copy, "PRAGMA user_version = 99")
    update_digest(copy)


def damage_epoch(copy: Path) -> None:
    set_epoch(copy, -1)
    update_digest(copy)


def name_blob_outside(copy: Path) -> None:
    write(copy, "UPDATE models SET blob = '../../state_id' WHERE version = 1")
    update_digest(copy)


def refused_restore(copy: Path, state: Path) -> Exception:
    """Restore `copy`, which must fail and change no file of `state`; return the error."""
    before = files(state)
    with pytest.raises((BackupError, ConfigError)) as caught:
        restore(copy, state, replace=True)
    assert files(state) == before
    return caught.value


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda copy: flip(a_blob(copy)), "does not hold what was written to it: use another backup"),
        (lambda copy: os.truncate(a_blob(copy), 100), "blobs/"),
        (lambda copy: a_blob(copy).unlink(), "is missing: use another backup"),
        (lambda copy: (copy / "blobs" / "state_id").write_text("0" * 32 + "\n"), "belong to different states"),
        (lambda copy: (copy / "blobs" / "state_id").unlink(), "state_id is missing"),
        (lambda copy: flip(copy / "facts.sqlite"), "facts.sqlite does not hold what was written to it"),
        (lambda copy: (copy / "facts.sqlite").unlink(), "facts.sqlite is missing"),
        (truncate_facts, "facts.sqlite does not hold"),
        (truncate_facts_with_digest, "is damaged"),
        (damage_epoch, "is damaged, its epoch is not a number: use another backup"),
        (name_blob_outside, "is damaged: it names '../../state_id' as the file of model 1"),
    ],
)
def test_a_damaged_backup_changes_nothing(
    damage: Callable[[Path], object], words: str, copy: Path, state: Path
) -> None:
    damage(copy)
    error = refused_restore(copy, state)
    assert isinstance(error, BackupError)
    assert words in str(error)
    assert error.exit_code == Exit.FAILED


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda copy: (copy / "backup.json").unlink(), "is not a complete backup, it has no backup.json"),
        (lambda copy: (copy / "backup.json").write_text("{"), "is not what flctl backup writes"),
        (lambda copy: (copy / "backup.json").write_text("[]"), "is not what flctl backup writes"),
        (lambda copy: (copy / "backup.json").write_text('{"format": 2}'), "has format 2, this program knows 1"),
        (shutil.rmtree, "is not a complete backup"),
        (set_newer_schema, "written by a newer version: schema 99"),
    ],
)
def test_a_folder_that_is_not_a_backup_is_not_restored(
    damage: Callable[[Path], object], words: str, copy: Path, state: Path
) -> None:
    damage(copy)
    error = refused_restore(copy, state)
    assert isinstance(error, ConfigError)
    assert words in str(error)


def test_a_state_is_replaced_only_with_the_flag_and_is_kept(made: Path, state: Path) -> None:
    before, facts = files(state), rows(state)
    with pytest.raises(ConfigError, match="there is a state in"):
        restore(made / "copy", state)
    assert files(state) == before
    done = restore(made / "copy", state, replace=True)
    epoch = check_restored(state, made / "copy")
    assert done.replaced is not None
    assert done.replaced.parent == state
    assert {name.partition("/")[0] for name in files(done.replaced)} <= {"blobs", "facts.sqlite", "facts.sqlite-wal"}
    assert rows(done.replaced) == facts
    assert is_complete(done.replaced)
    twice = restore(made / "copy", state, replace=True)
    assert twice.replaced not in (None, done.replaced)
    assert check_restored(state, made / "copy") > epoch


def test_a_backup_of_a_restored_state_begins_a_later_epoch_wherever_it_is_restored(made: Path, tmp_path: Path) -> None:
    epochs, copy = [0], made / "copy"
    for number in range(3):
        restore(copy, tmp_path / f"state-{number}")
        epochs.append(check_restored(tmp_path / f"state-{number}", copy))
        copy = tmp_path / f"copy-{number}"
        back_up(tmp_path / f"state-{number}", copy)
    assert epochs == sorted(set(epochs))


def test_the_epoch_is_later_than_that_of_the_replaced_state_even_if_the_clock_is_wrong(
    made: Path, state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    restore(made / "copy", state, replace=True)
    epoch = check_restored(state, made / "copy")
    # A host whose clock has lost the time.
    monkeypatch.setattr("fedring.server.state.sql.database.time.time", lambda: 1.0)
    for later in (1, 2):
        restore(made / "copy", state, replace=True)
        assert check_restored(state, made / "copy") == epoch + later


@pytest.mark.parametrize("epoch", ["x", "9" * 30, "9" * 5000, "\u0661"], ids=["no number", "large", "long", "arabic"])
def test_a_state_whose_epoch_is_damaged_can_be_replaced(made: Path, state: Path, epoch: str) -> None:
    began = int(time.time())
    set_epoch(state, epoch)
    restore(made / "copy", state, replace=True)
    assert began <= check_restored(state, made / "copy") <= time.time()


def test_a_database_with_an_unreadable_epoch_is_refused_as_damaged(state: Path) -> None:
    set_epoch(state, "x")
    with pytest.raises(StorageError, match="the database is damaged") as caught:
        open_state(state)
    assert caught.value.reason == "corrupt"


def test_a_replaced_state_can_be_restored_by_hand(made: Path, state: Path, tmp_path: Path) -> None:
    facts = rows(state)
    replaced = restore(made / "copy", state, replace=True).replaced
    assert replaced is not None
    shutil.copytree(replaced, tmp_path / "again")
    store, blobs = open_state(tmp_path / "again")
    assert {blob.name for blob in (tmp_path / "again" / "blobs").iterdir()} >= store.named_blobs()
    assert {row.version for row in store.models.newest()} == {row[0] for row in facts["models"]}
    store.close()
    blobs.close()


def test_the_state_of_a_running_server_is_not_restored(made: Path, tmp_path: Path) -> None:
    with Fleet(tmp_path) as fleet:
        state = fleet.directory / "state" / "server"
        done = forks.run("fedring.ctl.main", "restore", made / "copy", "--state-dir", state, "--replace", timeout=60)
        assert (done.returncode, done.stdout) == (Exit.CONFIG, "")
        assert (
            done.stderr == f"flctl: state_dir {state} is in use by process {fleet.server.pid}: stop fl-server first\n"
        )


def test_flctl_says_what_was_restored(made: Path, state: Path) -> None:
    words: tuple[str | Path, ...] = ("restore", made / "copy", "--state-dir", state)
    done = forks.run("fedring.ctl.main", *words, timeout=60)
    assert (done.returncode, done.stdout) == (Exit.CONFIG, "")
    assert done.stderr.startswith(f"flctl: there is a state in {state}: with --replace")
    done = forks.run("fedring.ctl.main", *words, "--replace", "--output", "json", timeout=60)
    printed = json.loads(done.stdout)
    assert (printed["models"], printed["newest_model"], printed["rounds"], printed["open_round"]) == (2, 2, 2, 2)
    assert (Path(printed["replaced"]).parent, printed["finished"]) == (state, False)
    done = forks.run("fedring.ctl.main", *words, "--replace", timeout=60)
    assert "earlier state" in done.stdout
    assert f"{state}/replaced-" in done.stdout


def epoch_of(folder: Path) -> int:
    """Return the epoch in the database of a restored state."""
    return int({name: value for name, value, _ in rows(folder)["meta"]}["epoch"])


def refuses_to_start(state: Path) -> bool:
    """Return whether fl-server refuses the state; assert that it changes nothing then but the database's log."""

    def content() -> tuple[object, ...]:
        return {k: v for k, v in files(state).items() if not k.startswith("facts.sqlite")}, rows(state)

    before = content()
    try:
        store, blobs = open_state(state)
    except (ConfigError, StorageError):
        assert content() == before
        return True
    store.close()
    blobs.close()
    return False


def kill_restore(place: str, copy: Path, state: Path, *flags: str) -> None:
    """Run a restore that is killed at this crash point."""
    env = os.environ | {"FL_CRASH_AT": place}
    words: tuple[str | Path, ...] = ("restore", copy, "--state-dir", state, *flags)
    assert forks.run("fedring.ctl.main", *words, timeout=60, env=env).returncode == 137


@pytest.mark.parametrize("place", sorted(RESTORING))
def test_a_killed_restore_leaves_a_complete_state_or_one_that_no_server_starts_on(
    place: str, made: Path, state: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (state / "partial").mkdir(exist_ok=True)
    (state / "partial" / "3-b").write_text("half an upload")
    old, old_blobs = rows(state), {path.name for path in (state / "blobs").iterdir()}
    kill_restore(place, made / "copy", state, "--replace")

    examined = Path(shutil.copytree(state, tmp_path / "examine"))
    whole = not refuses_to_start(examined)
    assert whole == (place in ("restore_staged", "restore_facts_placed"))
    begun = None if whole else epoch_of(state / "restoring")
    monkeypatch.setattr(identity, "refuse_pending", lambda folder: None)  # as an older server that does not check
    examined = Path(shutil.copytree(state, tmp_path / "examine again"))
    if not refuses_to_start(examined):
        assert is_complete(examined)
        assert rows(examined)["models"] in (old["models"], rows(made / "copy")["models"])
    monkeypatch.undo()

    done = restore(made / "copy", state, replace=True)
    epoch = check_restored(state, made / "copy")
    assert begun in (None, epoch)  # a restore that is repeated keeps its epoch
    assert not refuses_to_start(state)
    assert done.finished == (not whole)
    replaced = [path for path in state.glob("replaced-*") if rows(path)["models"] == old["models"]]
    assert len(replaced) == 1
    assert is_complete(replaced[0])
    assert {path.name for path in (replaced[0] / "blobs").iterdir()} == old_blobs
    assert (replaced[0] / "partial" / "3-b").read_text() == "half an upload"


@pytest.mark.parametrize("place", sorted(RESTORING - {"restore_facts_aside", "restore_blob_aside"}))
def test_a_killed_restore_into_an_empty_folder_can_be_repeated(place: str, made: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    kill_restore(place, made / "copy", state)
    if place not in ("restore_staged", "restore_facts_placed"):
        assert refuses_to_start(state)
        with pytest.raises(ConfigError, match="was interrupted: repeat flctl restore"):
            create_offline(state, Role.CLIENT, "a", 0)
    began = [path for path in (state / "restoring", state) if (path / "facts.sqlite").exists()]
    epochs = [epoch_of(path) for path in began]
    done = restore(made / "copy", state, replace=place == "restore_facts_placed")
    if place == "restore_facts_placed":  # the first one was complete when it was killed
        assert check_restored(state, made / "copy") > epochs[0]
    else:
        assert check_restored(state, made / "copy") in (epochs or [epoch_of(state)])
    assert (done.replaced is None) == (place != "restore_facts_placed")


def test_after_a_killed_restore_another_backup_needs_the_replace_flag(made: Path, state: Path, tmp_path: Path) -> None:
    back_up(state, tmp_path / "newer")
    kill_restore("restore_blob_placed", made / "copy", tmp_path / "new")
    with pytest.raises(ConfigError, match="with --replace"):
        restore(tmp_path / "newer", tmp_path / "new")
    epoch = check_restored(tmp_path / "new", made / "copy")
    restore(tmp_path / "newer", tmp_path / "new", replace=True)
    assert check_restored(tmp_path / "new", tmp_path / "newer") > epoch


def test_a_server_refuses_to_start_after_an_unfinished_restore(made: Path, state: Path, tmp_path: Path) -> None:
    kill_restore("restore_facts_aside", made / "copy", state, "--replace")
    before = files(state)
    fleet = Fleet(tmp_path)
    (tmp_path / "logs").mkdir()
    fleet.server.start()
    assert fleet.server.wait(SECONDS) == Exit.CONFIG
    fleet.server.close()
    assert "a restore into" in fleet.server.tail(1)
    assert "Traceback" not in fleet.server.tail(100)
    assert files(state) == before
    restore(made / "copy", state, replace=True)
    with Fleet(tmp_path) as fleet, Control(fleet.control) as control:
        assert [model.version for model in control.models()] == [2, 1]


def test_an_interrupted_restore_leaves_nothing_behind(made: Path, state: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    before = files(state)
    with pytest.raises(KeyboardInterrupt):
        restore(made / "copy", state, replace=True, tell=interrupt)
    assert files(state) == before
    assert not list(state.glob("restoring*"))


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can change the owner of files")
def test_what_root_restores_belongs_to_the_servers_user(made: Path, tmp_path: Path) -> None:
    state = tmp_path / "state"
    state.mkdir()
    os.chown(state, 12345, 12345)
    restore(made / "copy", state)
    assert {path.stat().st_uid for path in [state, *state.rglob("*")]} == {12345}
