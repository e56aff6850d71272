"""Restoring backups: every blob is checked by its name, and each restore begins a greater epoch."""

import errno
import hashlib
import json
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NoReturn

import pytest
from tests.damage import set_epoch
from tests.unit.rows import a_job, a_model, a_round, an_update

from fedring.codec.digest import name_of
from fedring.server.state.backup import exchange
from fedring.server.state.backup.contents import BackupError, NamedBlob, copy_blob, digest_of
from fedring.server.state.backup.create import FolderSource, back_up
from fedring.server.state.backup.restore import restore
from fedring.server.state.identity import open_state
from fedring.server.state.sql.store import Store

NOW = 1_700_000_000


@dataclass
class Clock:
    """A clock that stands still until it is set."""

    now: float

    def time(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(NOW + 0.5)
    monkeypatch.setattr("fedring.server.state.sql.database.time", clock)
    return clock


def begin(folder: Path) -> Path:
    """Create a state with models and updates that are named by SHA-256 and by BLAKE3; return its folder."""
    store, blobs = open_state(folder)
    row = a_round(store, a_job(store))
    for version, data in enumerate((b"the first", b"the second"), start=1):
        name = hashlib.sha256(data).hexdigest() if version == 1 else name_of(data)
        (folder / "blobs" / name).write_bytes(data)
        store.models.publish(replace(a_model(version), digest=name, blob=name, bytes=len(data)))
    for client, data in (("ann", b"an update"), ("bob", b"another")):
        name = hashlib.sha256(data).hexdigest() if client == "ann" else name_of(data)
        store.updates.accept([replace(an_update(row.round, client), digest=name, blob="", payload=data)])
    store.close()
    blobs.close()
    return folder


@pytest.fixture
def backup(tmp_path: Path) -> Path:
    """A backup of such a state."""
    back_up(begin(tmp_path / "one"), tmp_path / "backup")
    return tmp_path / "backup"


def epoch_of(folder: Path) -> int:
    """Return the epoch that a server in this folder has."""
    store, blobs = open_state(folder)
    epoch = store.epoch
    store.close()
    blobs.close()
    return epoch


def meta(folder: Path) -> dict[str, str]:
    with closing(sqlite3.connect(folder / "facts.sqlite")) as connection:
        return dict(connection.execute("SELECT name, value FROM meta"))


def test_a_restored_state_is_that_of_the_backup_in_a_new_epoch(backup: Path, tmp_path: Path) -> None:
    before = {path: path.read_bytes() for path in backup.rglob("*") if path.is_file()}
    restored = restore(backup, tmp_path / "state")
    assert (restored.replaced, restored.finished) == (None, False)
    old, new = meta(tmp_path / "one"), meta(tmp_path / "state")
    assert new == old | {"epoch": str(NOW), "restored_from": restored.manifest.facts_digest}
    assert "epoch" not in old
    assert epoch_of(tmp_path / "state") == NOW
    first, second = (Store(f"sqlite:///{tmp_path / name / 'facts.sqlite'}") for name in ("one", "state"))
    assert second.run_id == first.run_id
    assert second.models.newest() == first.models.newest()
    assert second.updates.of_round(1) == first.updates.of_round(1)
    assert second.updates.last_accepted() == first.updates.last_accepted()
    first.close()
    second.close()
    assert {path: path.read_bytes() for path in backup.rglob("*") if path.is_file()} == before
    assert digest_of(backup / "facts.sqlite") == restored.manifest.facts_digest


def test_a_backup_that_is_restored_again_begins_another_epoch(backup: Path, tmp_path: Path, clock: Clock) -> None:
    state = tmp_path / "state"
    epochs = []
    for _ in range(3):  # all within one second
        restore(backup, state, replace=True)
        epochs.append(epoch_of(state))
    assert epochs == [NOW, NOW + 1, NOW + 2]
    clock.now += 60
    restore(backup, tmp_path / "elsewhere")
    assert epoch_of(tmp_path / "elsewhere") == NOW + 60


@pytest.mark.parametrize("known", [NOW - 5, NOW, NOW + 1000, 2**40])
def test_an_epoch_is_above_that_of_the_replaced_state(backup: Path, tmp_path: Path, known: int) -> None:
    state = begin(tmp_path / "state")
    set_epoch(state, str(known))
    replaced = restore(backup, state, replace=True).replaced
    assert replaced is not None
    assert meta(replaced)["epoch"] == str(known)
    assert epoch_of(state) == max(NOW, known + 1)


def test_an_epoch_is_above_one_that_is_only_in_the_log_of_the_replaced_state(
    backup: Path, tmp_path: Path, clock: Clock
) -> None:
    clock.now += 1000
    store, blobs = open_state(begin(tmp_path / "state"))
    store.begin_epoch()  # as with --accept-older; then the server is killed
    clock.now = NOW
    restore(backup, tmp_path / "state", replace=True)
    store.close()
    blobs.close()
    assert epoch_of(tmp_path / "state") == NOW + 1001


@pytest.mark.parametrize("now", [0.0, 5.0, NOW])
def test_an_epoch_is_above_that_of_the_backup_even_if_the_clock_is_wrong(
    backup: Path, tmp_path: Path, clock: Clock, now: float
) -> None:
    restore(backup, tmp_path / "two")
    back_up(tmp_path / "two", tmp_path / "again")
    clock.now = now
    restored = restore(tmp_path / "again", tmp_path / "three")
    assert epoch_of(tmp_path / "three") == NOW + 1
    assert meta(tmp_path / "three")["restored_from"] == restored.manifest.facts_digest
    assert meta(tmp_path / "three")["restored_from"] != meta(tmp_path / "two")["restored_from"]


def test_the_first_epoch_is_above_0_even_if_the_clock_is_wrong(backup: Path, tmp_path: Path, clock: Clock) -> None:
    clock.now = -3.0
    restore(backup, tmp_path / "state")
    assert epoch_of(tmp_path / "state") == 1


@pytest.mark.parametrize("text", ["", "soon", "-7", "1e3"])
def test_an_epoch_that_is_not_a_number_is_ignored_in_the_replaced_state(
    backup: Path, tmp_path: Path, text: str
) -> None:
    state = begin(tmp_path / "state")
    set_epoch(state, text)
    restore(backup, state, replace=True)
    assert epoch_of(state) == NOW


def test_a_state_that_cannot_be_read_can_be_replaced(backup: Path, tmp_path: Path) -> None:
    state = begin(tmp_path / "state")
    (state / "facts.sqlite").write_bytes(b"not a database" * 100)
    restore(backup, state, replace=True)
    assert epoch_of(state) == NOW


def test_a_restore_is_done_although_what_it_leaves_cannot_be_removed(
    backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EROFS, "Read-only file system")

    state = tmp_path / "state"
    with monkeypatch.context() as patched:
        patched.setattr(os, "rmdir", refuse)
        assert not restore(backup, state).finished
    assert epoch_of(state) == NOW
    assert restore(backup, state, replace=True).replaced is not None
    assert epoch_of(state) == NOW + 1


@pytest.fixture
def interrupted(backup: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A state whose restore was killed before the exchange."""

    def die(state_dir: Path) -> Path:
        raise KeyboardInterrupt

    state = begin(tmp_path / "state")
    with monkeypatch.context() as patch:
        patch.setattr(exchange, "finish", die)
        with pytest.raises(KeyboardInterrupt):
            restore(backup, state, replace=True)
    assert exchange.is_pending(state)
    return state


def test_an_interrupted_restore_is_finished_in_the_epoch_that_it_began(
    backup: Path, interrupted: Path, clock: Clock
) -> None:
    clock.now += 60
    restored = restore(backup, interrupted)
    assert restored.finished
    assert epoch_of(interrupted) == NOW
    assert meta(interrupted)["restored_from"] == restored.manifest.facts_digest


def test_restoring_another_backup_finishes_the_interrupted_restore_and_then_replaces_it(
    tmp_path: Path, interrupted: Path
) -> None:
    back_up(begin(tmp_path / "other"), tmp_path / "another backup")
    restored = restore(tmp_path / "another backup", interrupted, replace=True)
    assert not restored.finished
    assert epoch_of(interrupted) == NOW + 1  # the interrupted one had NOW
    assert meta(interrupted)["restored_from"] == restored.manifest.facts_digest
    assert meta(interrupted)["run_id"] == meta(tmp_path / "other")["run_id"]


@pytest.mark.parametrize("algorithm", ["sha256", "blake3"])
def test_a_blob_is_copied_only_if_it_has_the_digest_in_its_name(tmp_path: Path, algorithm: str) -> None:
    data = bytes(range(256)) * 10_000
    name = hashlib.sha256(data).hexdigest() if algorithm == "sha256" else name_of(data)
    blob = NamedBlob(name, "model 3", len(data))
    source, target, steps = tmp_path / "source", tmp_path / "target", list[int]()
    source.write_bytes(data)
    assert copy_blob(source, target, blob, steps.append) == sum(steps) == len(data)
    assert target.read_bytes() == data
    target.unlink()
    for damaged, what in ((data[:-1], "cut short"), (data[:-1] + b"?", "does not hold what was written to it")):
        source.write_bytes(damaged)
        with pytest.raises(BackupError, match=f"blobs/{name}, of model 3, .*{what}"):
            copy_blob(source, target, blob, steps.append)
        assert not target.exists()


@pytest.mark.parametrize("place", ["the first", "the second", "an update", "another"])
def test_every_blob_and_update_of_a_backup_is_checked(backup: Path, tmp_path: Path, place: str) -> None:
    damage, wanted = place.encode(), place.encode()[:-1] + b"?"
    if place.startswith("the"):
        (path,) = [path for path in (backup / "blobs").iterdir() if path.read_bytes() == damage]
        path.write_bytes(wanted)
    else:
        with closing(sqlite3.connect(backup / "facts.sqlite")) as connection:
            connection.execute("UPDATE updates SET payload = ? WHERE payload = ?", (wanted, damage))
            connection.commit()
        text = (backup / "backup.json").read_text()
        old = json.loads(text)["facts_digest"]
        (backup / "backup.json").write_text(text.replace(old, digest_of(backup / "facts.sqlite")))
    with pytest.raises(BackupError, match="does not hold what was written to it"):
        restore(backup, tmp_path / "state")
    assert not (tmp_path / "state" / "facts.sqlite").exists()


class Returning(FolderSource):
    """A state whose server removes each blob before it is copied, and then makes it anew with the same bytes."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._asked = set[str]()

    def copy_blob(self, blob: NamedBlob, target: Path, tell: Callable[[int], None]) -> int:
        if blob.digest not in self._asked:
            self._asked.add(blob.digest)
            raise FileNotFoundError(blob.digest)
        return super().copy_blob(blob, target, tell)


def test_a_blob_that_has_come_again_since_it_was_missed_is_copied(tmp_path: Path) -> None:
    manifest = back_up(Returning(begin(tmp_path / "one")), tmp_path / "backup")
    assert restore(tmp_path / "backup", tmp_path / "state").manifest == manifest
