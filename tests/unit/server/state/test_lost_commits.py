"""A state whose database has lost commits: nobody opens it by accident, and an operator can go on without them."""

import random
import shutil
import sqlite3
import struct
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from tests.damage import flip, last_commit_of
from tests.unit.rows import a_job, a_round, an_update

from fedring.ctl.admin.doctor_checks import check_database
from fedring.daemon.checks import Level
from fedring.daemon.lock import StateLock
from fedring.server.state.backup.contents import BackupError
from fedring.server.state.backup.create import back_up
from fedring.server.state.failures import StoreError
from fedring.server.state.identity import add_token_offline, open_state
from fedring.server.state.log_check import check_log_at_rest
from fedring.server.state.rows import TokenRow
from fedring.server.state.sql.store import Store

CLIENTS = [f"client-{number:02}" for number in range(32)]
SEED = 20_240_502
FLIPS = 200
LOG = "facts.sqlite-wal"
PAGE = 1 << 14
JOURNAL = struct.pack(">8s5I", bytes.fromhex("d9d505f920a163d7"), 0, 7, 0, 512, PAGE).ljust(512, b"\0")
"""SQLite's journal while it makes a database with such pages: to undo that, the database becomes empty."""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of a state with 32 accepted updates, each in a commit, made while its store was open."""
    folder = tmp_path_factory.mktemp("killed")
    store, blobs = open_state(folder / "live")
    row = a_round(store, a_job(store))
    for client in CLIENTS:
        store.updates.accept([an_update(row.round, client)])
    shutil.copytree(folder / "live", folder / "killed")
    store.close()
    blobs.close()
    return folder / "killed"


@pytest.fixture
def state(killed: Path, tmp_path: Path) -> Path:
    shutil.copytree(killed, tmp_path / "state")
    return tmp_path / "state"


@pytest.fixture
def damaged(state: Path) -> Path:
    """The state with one bit flipped in the middle of its log."""
    flip(state / LOG, 4 * (state / LOG).stat().st_size)
    return state


def files(folder: Path) -> dict[str, bytes]:
    """Return all files but SQLite's index of its log."""
    return {
        path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.suffix != ".sqlite-shm"
    }


def accepted(folder: Path, **options: bool) -> tuple[list[str], int]:
    """Open the state, and return the clients whose updates it has, and its epoch."""
    store, blobs = open_state(folder, **options)
    try:
        return [row.client_id for row in store.updates.of_round(1)], store.epoch
    finally:
        store.close()
        blobs.close()


@pytest.mark.parametrize("written", [False, True])
def test_a_database_whose_making_a_power_loss_has_ended_is_made_anew(tmp_path: Path, written: bool) -> None:
    state, page = tmp_path / "state", bytes(PAGE)
    state.mkdir()
    if written:
        with closing(sqlite3.connect(tmp_path / "made")) as connection:
            connection.execute(f"PRAGMA page_size = {PAGE}")
            connection.execute("PRAGMA journal_mode = WAL")
        page = (tmp_path / "made").read_bytes()
        (state / LOG).touch()
    (state / "facts.sqlite").write_bytes(page)
    (state / "facts.sqlite-journal").write_bytes(JOURNAL)
    assert accepted(state) == ([], 0)
    assert not (state / "facts.sqlite-journal").exists()


def test_without_damage_all_updates_are_there(state: Path) -> None:
    assert accepted(state) == (CLIENTS, 0)


def test_a_flipped_bit_undoes_no_accepted_update_in_silence_but_in_the_last_commit(
    killed: Path, tmp_path: Path
) -> None:
    rng = random.Random(SEED)
    for number in range(FLIPS):
        shutil.rmtree(tmp_path / str(number - 1), ignore_errors=True)
        state = tmp_path / str(number)
        shutil.copytree(killed, state)
        bit = flip(state / LOG, rng.randrange(8 * (state / LOG).stat().st_size))
        if bit >= 8 * last_commit_of(killed / LOG):
            assert accepted(state) == (CLIENTS[:-1], 0), bit
            continue
        before = files(state)
        with pytest.raises(StoreError, match="Nothing was changed") as caught:
            open_state(state)
        assert caught.value.reason == "lost_commits", bit
        assert files(state) == before


def test_the_error_says_how_to_go_on(damaged: Path) -> None:
    with pytest.raises(StoreError) as caught:
        open_state(damaged)
    text = str(caught.value)
    assert "facts.sqlite-wal is damaged at frame " in text
    assert "restore a backup (flctl restore), or go on without them: fl-server --accept-older falls back to " in text
    assert "falls back to round 1 with " in text


def test_what_is_left_is_accepted_only_in_a_new_epoch(damaged: Path) -> None:
    log = (damaged / LOG).read_bytes()
    kept, epoch = accepted(damaged, accept_older=True)
    assert 0 < len(kept) < len(CLIENTS)
    assert kept == CLIENTS[: len(kept)]
    assert epoch > 0, "clients have seen later rounds of the old one"
    assert accepted(damaged) == (kept, epoch)
    (copy,) = (damaged / "unnamed").iterdir()
    assert copy.read_bytes() == log


def test_a_start_that_is_killed_before_the_new_epoch_finds_the_damage_again(
    damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(store: Store) -> None:
        shutil.copytree(damaged, damaged.with_name("died"))
        raise KeyboardInterrupt

    monkeypatch.setattr(Store, "begin_epoch", die)
    with pytest.raises(KeyboardInterrupt):
        open_state(damaged, accept_older=True)
    with pytest.raises(StoreError, match="lost_commits"):
        open_state(damaged.with_name("died"))


def test_a_start_that_is_killed_before_the_log_is_emptied_has_the_new_epoch_or_finds_the_damage(
    damaged: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(store: Store) -> None:
        shutil.copytree(damaged, damaged.with_name("died"))
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "shorten_log", die)
        with pytest.raises(KeyboardInterrupt):
            open_state(damaged, accept_older=True)
    with pytest.raises(StoreError, match="lost_commits"):
        open_state(damaged.with_name("died"))
    kept, epoch = accepted(damaged.with_name("died"), accept_older=True)
    assert 0 < len(kept) < len(CLIENTS)
    assert epoch > 0


def test_accept_older_changes_nothing_where_nothing_is_lost(state: Path) -> None:
    assert accepted(state, accept_older=True) == (CLIENTS, 0)
    assert not (state / "unnamed").exists()


def test_a_header_that_is_damaged_loses_the_whole_log(state: Path) -> None:
    flip(state / LOG, 100)
    with pytest.raises(StoreError, match="damaged at its header"):
        open_state(state)
    assert accepted(state, accept_older=True)[0] == []


def test_a_torn_last_commit_is_not_damage(state: Path) -> None:
    log = state / LOG
    log.write_bytes(log.read_bytes()[:-5000] + bytes(5000))
    assert accepted(state) == (CLIENTS[:-1], 0)


def test_neither_a_token_nor_a_backup_is_made_of_a_damaged_state(damaged: Path, tmp_path: Path) -> None:
    before = files(damaged)
    with pytest.raises(StoreError, match="lost_commits"):
        add_token_offline(damaged, TokenRow("id", "digest", "client", "name", 1.0))
    with pytest.raises(BackupError, match="lost_commits"):
        back_up(damaged, tmp_path / "backup")
    assert not (tmp_path / "backup").exists()
    assert files(damaged) == before


def test_doctor_says_that_a_log_is_damaged(state: Path, damaged: Path) -> None:
    (check,) = check_database(damaged)
    assert check.level is Level.FAIL
    assert "lost_commits" in check.found
    assert list(check_database(state.with_name("none"))) == []


def test_the_log_of_a_server_that_runs_is_not_read(damaged: Path) -> None:
    with StateLock(damaged):
        check_log_at_rest(damaged)  # it changes at any moment
    with pytest.raises(StoreError):
        check_log_at_rest(damaged)


def test_the_look_at_a_sound_log_never_takes_the_lock_of_a_server_that_starts(
    state: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lock(fd: int, operation: int) -> None:
        raise AssertionError("the server would find its folder in use")

    monkeypatch.setattr("fcntl.flock", lock)
    check_log_at_rest(state)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    store = Store(f"sqlite:///{tmp_path / 'facts.sqlite'}", log_bytes=1 << 18)
    yield store
    store.close()


def test_the_log_stays_short(store: Store, tmp_path: Path) -> None:
    row = a_round(store, a_job(store))
    longest = 0
    for number in range(200):
        store.updates.accept([an_update(row.round, f"client-{number}")])
        longest = max(longest, store.log_bytes())
    assert (1 << 17) < longest < (1 << 18) + 20 * (1 << 14), "the bound, and a commit"
    assert store.log_bytes() == (tmp_path / LOG).stat().st_size
    store.shorten_log()
    assert store.log_bytes() == 0
    assert len(store.updates.of_round(row.round)) == 200


def test_a_reader_is_not_waited_for_and_the_log_becomes_short_after_it(store: Store, tmp_path: Path) -> None:
    row = a_round(store, a_job(store))
    with closing(sqlite3.connect(tmp_path / "facts.sqlite", isolation_level=None)) as reader:
        reader.execute("BEGIN")
        ((found,),) = reader.execute("SELECT count(*) FROM updates")
        for number in range(60):
            store.updates.accept([an_update(row.round, f"client-{number}")])
        store.shorten_log()
        assert store.log_bytes() > 1 << 18, "the reader needs what it reads"
        assert reader.execute("SELECT count(*) FROM updates").fetchone() == (found,)
    store.shorten_log()
    assert store.log_bytes() == 0


def test_a_store_in_memory_has_no_log() -> None:
    store = Store("sqlite://")
    store.shorten_log()
    assert store.log_bytes() == 0
    store.close()
