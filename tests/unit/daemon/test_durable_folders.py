"""Folders whose names are on the disk before anything in them counts: see also tests/fault/test_power_loss.py."""

import os
from pathlib import Path

import pytest

from fedring.client.secure.state import RoundName, RoundRecord, SecureState
from fedring.daemon.durable import create_durably, make_folder
from fedring.daemon.lock import StateLock


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the list of the paths that are synced from now on."""
    paths: list[Path] = []
    sync = os.fsync

    def fsync(fd: int) -> None:
        paths.append(Path(f"/proc/self/fd/{fd}").readlink())
        sync(fd)

    monkeypatch.setattr(os, "fsync", fsync)
    return paths


def test_each_new_folder_is_synced_in_the_one_above_it(tmp_path: Path, synced: list[Path]) -> None:
    make_folder(tmp_path / "a" / "b")
    assert set(synced) == {tmp_path / "a", tmp_path}
    assert (tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700


def test_a_folder_that_is_there_is_synced_once_more(tmp_path: Path, synced: list[Path]) -> None:
    (tmp_path / "a").mkdir()  # by a process that was killed before it could
    make_folder(tmp_path / "a")
    assert synced == [tmp_path]


def test_the_folders_of_states_and_secrets_are_durable(tmp_path: Path, synced: list[Path]) -> None:
    with StateLock(tmp_path / "state", client="alice"):
        assert tmp_path in synced
    synced.clear()
    create_durably(tmp_path / "secrets" / "one", b"secret")
    assert {tmp_path, tmp_path / "secrets"} <= set(synced)


def test_the_folder_of_secure_aggregation_is_durable_before_a_round_counts(tmp_path: Path, synced: list[Path]) -> None:
    SecureState(tmp_path).save(RoundName("run", 0, 1), RoundRecord(b"", b"", b"", b""))
    assert {tmp_path, tmp_path / "secure"} <= set(synced)
    synced.clear()
    SecureState(tmp_path).released.add("model", ["a", "b", "c"])
    assert {tmp_path, tmp_path / "secure"} <= set(synced)


def test_a_folder_above_that_nobody_may_read_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> None:
        raise PermissionError

    monkeypatch.setattr("fedring.daemon.durable.sync", refuse)
    make_folder(tmp_path / "a")
    assert (tmp_path / "a").is_dir()
