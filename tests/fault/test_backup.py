"""flctl backup: a complete copy of a state that a server is using, or no copy."""

import fcntl
import json
import os
import random
import re
import shutil
import stat
from pathlib import Path

import pytest

from fedring.codec.digest import name_of
from fedring.daemon.config import ConfigError
from fedring.daemon.exits import Exit
from fedring.server.state.backup.contents import BackupError, digest_of, read_contents
from fedring.server.state.backup.create import back_up
from fedring.server.state.backup.restore import restore
from fedring.server.state.sql.database import SCHEMA
from fedring.server.state.sql.store import Store
from fedring.server.state.sql.tables import METADATA
from tests import forks
from tests.damage import ask, flip, model_file, write
from tests.fault.state_folder import (
    JOB,
    SIZE,
    blob_kinds,
    is_complete,
    made_while_publishing,
    make_state_with_open_round,
    push,
    rows,
)
from tests.fleets import Control, Fleet
from tests.system.wire import WireClient, parameters, run


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the state of a killed server, with two published rounds and an open one."""
    return make_state_with_open_round(tmp_path_factory.mktemp("made"))


@pytest.fixture
def state(made: Path, tmp_path: Path) -> Path:
    """Copy it for a test that changes it."""
    return Path(shutil.copytree(made, tmp_path / "state"))


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_server_on_a_backup_of_a_running_server_goes_on_with_its_round(tmp_path: Path) -> None:
    digests = []
    state = tmp_path / "one" / "state" / "server"
    words = ("backup", tmp_path / "copy", "--state-dir", state, "-o", "json")
    with (
        Fleet(tmp_path / "one") as fleet,
        Control(fleet.control) as control,
        WireClient(fleet.listen, "a") as a,
        WireClient(fleet.listen, "b") as b,
    ):
        job_id, events = run(control, **JOB | {"rounds": 2})
        for seed, client in enumerate((a, b, a)):
            push(client, seed)
        done = forks.run("fedring.ctl.main", *words, timeout=60)
        push(b, 9)
        assert [event.kind for event in events][-1] == "job_ended"
        digests.append(control.models(limit=1)[0].digest)
    assert done.returncode == 0, done.stderr
    printed = json.loads(done.stdout)
    assert (printed["models"], printed["rounds"], printed["open_round"]) == (2, 2, 2)
    shutil.rmtree(state)
    restore(tmp_path / "copy", state)
    with Fleet(tmp_path / "one") as fleet, Control(fleet.control) as control, WireClient(fleet.listen, "b") as b:
        events = control.follow_job(job_id)
        push(b, 9)
        assert [event.kind for event in events][-1] == "job_ended"
        assert control.rounds(limit=1)[0].delivered == 2
        assert control.job(job_id).state == "completed"
        digests.append(control.models(limit=1)[0].digest)
    assert digests[0] == digests[1]


def test_a_backup_is_complete_while_the_server_publishes_and_prunes(tmp_path: Path) -> None:
    settings = {"keep_models": 1, "keep_update_rounds": 1}
    with Fleet(tmp_path / "one", settings) as fleet, Control(fleet.control) as control:
        state = fleet.directory / "state" / "server"
        found = made_while_publishing(fleet, control, 6, lambda number: back_up(state, tmp_path / f"copy-{number}"))
    newest = [manifest.newest_model for manifest in found]
    assert newest == sorted(newest)
    assert newest[-1] >= 5
    for number, manifest in enumerate(found):
        restored = tmp_path / f"restored-{number}"
        assert restore(tmp_path / f"copy-{number}", restored).manifest == manifest
        assert {path.name for path in (restored / "blobs").iterdir()} == {
            "state_id",
            *(blob.digest for blob in read_contents(restored / "facts.sqlite").blobs),
        }


def delete_model(state: Path, version: int) -> None:
    """Delete a model version, as a server does."""
    names = ask(
        state,
        "SELECT blob, delta_blob, residual_blob, optimizer_blob, control_blob FROM models WHERE version = ?",
        version,
    )
    ask(state, "DELETE FROM models WHERE version = ?", version)
    for name in filter(None, names[0] if names else ()):
        (state / "blobs" / str(name)).unlink()


def test_models_that_are_pruned_during_a_backup_are_not_in_it(state: Path, tmp_path: Path) -> None:
    gone = [name for (name,) in ask(state, "SELECT blob FROM models WHERE version < 3")]

    def prune(done: int, total: int) -> None:
        assert done <= total
        delete_model(state, 1)
        delete_model(state, 2)

    manifest = back_up(state, tmp_path / "copy", prune)
    assert (manifest.models, manifest.newest_model) == (1, 3)
    assert not {path.name for path in (tmp_path / "copy" / "blobs").iterdir()} & {*gone}
    assert restore(tmp_path / "copy", tmp_path / "new").manifest.bytes == manifest.bytes


def test_a_backup_gives_up_when_the_server_prunes_faster_than_it_copies(state: Path, tmp_path: Path) -> None:
    def replace_models(done: int, total: int) -> None:
        for version in (1, 2):  # when the first one is copied, the second one is gone
            old, data = model_file(state, version), random.randbytes(1000)
            name = name_of(data)
            (state / "blobs" / name).write_bytes(data)
            write(state, "UPDATE models SET blob = ?, bytes = ? WHERE version = ?", name, len(data), version)
            old.unlink()

    with pytest.raises(BackupError, match="raise keep_models") as caught:
        back_up(state, tmp_path / "copy", replace_models)
    assert caught.value.exit_code == Exit.TRY_AGAIN
    assert names(tmp_path) == ["state"]


@pytest.mark.parametrize(("query", "words"), list(blob_kinds()))
@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
def test_a_backup_of_a_damaged_blob_fails(query: str, words: str, how: str, state: Path, tmp_path: Path) -> None:
    ((name,),) = ask(state, query)
    file = state / "blobs" / str(name)
    if how == "flipped":
        flip(file)
    elif how == "cut":
        os.truncate(file, file.stat().st_size - 1)
    else:
        file.unlink()
    with pytest.raises(BackupError) as caught:
        back_up(state, tmp_path / "copy")
    assert str(caught.value).startswith(f"blobs/{name}, of {words}, ")
    assert caught.value.exit_code == Exit.FAILED
    assert names(tmp_path) == ["state"]


def test_a_backup_of_a_damaged_update_in_a_row_fails(state: Path, tmp_path: Path) -> None:
    payload = random.randbytes(100)
    write(state, "UPDATE updates SET blob = '', payload = ? WHERE round = 3", payload)
    with pytest.raises(BackupError, match=r"the update of a in round 3, in facts\.sqlite, does not hold"):
        back_up(state, tmp_path / "copy")


def test_a_backup_and_a_restore_of_a_changed_row_fail(state: Path, tmp_path: Path) -> None:
    back_up(state, tmp_path / "copy")
    change = "UPDATE updates SET num_samples = num_samples + 1 WHERE round = 3"
    ask(tmp_path / "copy", change)
    manifest = json.loads((tmp_path / "copy" / "backup.json").read_text())
    changed = manifest | {"facts_digest": digest_of(tmp_path / "copy" / "facts.sqlite")}
    (tmp_path / "copy" / "backup.json").write_text(json.dumps(changed))
    ask(state, change)
    words = "the row of round 3, client_id 'a' in the table updates"
    with pytest.raises(BackupError, match=words):
        restore(tmp_path / "copy", tmp_path / "new")
    with pytest.raises(BackupError, match=words):
        back_up(state, tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_a_backup_of_a_damaged_database_fails(state: Path, tmp_path: Path) -> None:
    ask(state, "PRAGMA wal_checkpoint(TRUNCATE)")
    facts = state / "facts.sqlite"
    data = bytearray(facts.read_bytes())
    data[1 << 14 : (1 << 14) + 64] = bytes(64)  # the header of the second page
    facts.write_bytes(data)
    with pytest.raises(BackupError, match=r"facts\.sqlite"):
        back_up(state, tmp_path / "copy")
    assert names(tmp_path) == ["state"]


def test_an_interrupted_backup_leaves_nothing(state: Path, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        back_up(state, tmp_path / "copy", interrupt)
    assert names(tmp_path) == ["state"]


def test_a_killed_backup_does_not_prevent_the_next_one(state: Path, tmp_path: Path) -> None:
    partial = tmp_path / "copy.partial"
    (partial / "blobs").mkdir(parents=True)
    (partial / "facts.sqlite").write_text("half")
    fd = os.open(partial, os.O_RDONLY)
    fcntl.flock(fd, fcntl.LOCK_EX)
    with pytest.raises(BackupError, match="another backup") as caught:
        back_up(state, tmp_path / "copy")
    assert caught.value.exit_code == Exit.TRY_AGAIN
    os.close(fd)
    back_up(state, tmp_path / "copy")
    assert names(tmp_path) == ["copy", "state"]


def test_only_the_owner_can_read_a_backup_and_the_state_does_not_change(state: Path, tmp_path: Path) -> None:
    before = rows(state)
    blobs = {path.name for path in (state / "blobs").iterdir()}
    back_up(state, tmp_path / "copy")
    for path in [tmp_path / "copy", *(tmp_path / "copy").rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
    assert (rows(state), {path.name for path in (state / "blobs").iterdir()}) == (before, blobs)
    assert is_complete(tmp_path / "copy")


def test_a_backup_contains_rows_that_are_only_in_the_log_of_the_database(state: Path, tmp_path: Path) -> None:
    assert (state / "facts.sqlite-wal").stat().st_size
    back_up(state, tmp_path / "copy")
    assert rows(tmp_path / "copy") == rows(state)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("full", "is not empty"),
        ("file", "is not a folder"),
        ("none/copy", "there is no folder"),
        ("state/copy", "lies in the state folder"),
    ],
)
def test_a_backup_is_not_written_to_a_folder_in_use(target: str, words: str, state: Path, tmp_path: Path) -> None:
    (tmp_path / "full" / "mine").mkdir(parents=True)
    (tmp_path / "file").touch()
    with pytest.raises(BackupError, match=words) as caught:
        back_up(state, tmp_path / target)
    assert caught.value.exit_code == Exit.USAGE
    (tmp_path / "empty").mkdir()
    back_up(state, tmp_path / "empty")


def test_a_folder_that_is_not_a_usable_state_is_not_backed_up(state: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no state in"):
        back_up(tmp_path / "nothing", tmp_path / "copy")
    ask(state, "PRAGMA user_version = 99")
    with pytest.raises(ConfigError, match="schema 99"):
        back_up(state, tmp_path / "copy")
    ask(state, f"PRAGMA user_version = {SCHEMA}")
    (state / "blobs" / "state_id").write_text("0" * 32)
    with pytest.raises(ConfigError, match="belong to different states"):
        back_up(state, tmp_path / "copy")
    assert names(tmp_path) == ["state"]


def test_flctl_lists_what_is_in_a_backup(state: Path, tmp_path: Path) -> None:
    words = ("backup", tmp_path / "copy", "--state-dir", state)
    done = forks.run("fedring.ctl.main", *words, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    lines = [re.split(r" {2,}", line.strip()) for line in done.stdout.splitlines()]
    found = {line[0]: line[1] for line in lines if len(line) == 2 and line[0] != "what"}
    assert found.keys() == {"folder", "taken", "models", "rounds", "open round", "blobs", "size", "time"}
    assert (found["models"], found["rounds"], found["open round"]) == ("3, the newest is 3", "3", "3")
    again = forks.run("fedring.ctl.main", *words, timeout=60)
    assert (again.returncode, again.stdout) == (Exit.USAGE, "")
    assert again.stderr == f"flctl: {tmp_path / 'copy'} is not empty: name another one\n"


def test_a_backup_knows_every_column_that_names_a_blob(state: Path) -> None:
    columns = [column for table in METADATA.tables.values() for column in table.c if column.name.endswith("blob")]
    assert len(columns) == 8
    for number, column in enumerate(columns):
        table = column.table.name
        query = f"UPDATE {table} SET {column.name} = ? WHERE rowid = (SELECT max(rowid) FROM {table})"
        ask(state, query, f"blake3-{number:064x}")
    ask(state, "PRAGMA wal_checkpoint(TRUNCATE)")
    named = {blob.digest for blob in read_contents(state / "facts.sqlite").blobs}
    assert named >= {f"blake3-{number:064x}" for number in range(len(columns))}


def test_a_backup_contains_all_blobs_that_the_store_names(state: Path, tmp_path: Path) -> None:
    back_up(state, tmp_path / "copy")
    found = {blob.digest for blob in read_contents(tmp_path / "copy" / "facts.sqlite").blobs}
    store = Store(f"sqlite:///{state / 'facts.sqlite'}")
    assert found == store.named_blobs()
    store.close()


def test_a_restored_model_is_the_one_that_was_backed_up(state: Path, tmp_path: Path) -> None:
    back_up(state, tmp_path / "copy")
    restore(tmp_path / "copy", tmp_path / "new" / "state" / "server")
    with Fleet(tmp_path / "new") as fleet, WireClient(fleet.listen, "c") as client:
        assert [len(parameters(client, version)) for version in (1, 2, 3)] == [SIZE] * 3
