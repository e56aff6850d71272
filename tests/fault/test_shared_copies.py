"""flctl backup and restore of a state in a database and an object store: complete, or nothing has changed."""

import json
import os
import random
import shutil
import tracemalloc
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import NullPool, create_engine, insert
from sqlalchemy.dialects.postgresql.psycopg import PGDialect_psycopg

from fedring.codec.digest import name_of
from fedring.control.calls import Events
from fedring.daemon.config import ConfigError
from fedring.daemon.crash import PLACING, REPLACING
from fedring.daemon.exits import Exit
from fedring.server.state.backup.contents import (
    BackupError,
    Contents,
    Manifest,
    NamedBlob,
    digest_of,
    read_contents,
)
from fedring.server.state.backup.create import back_up
from fedring.server.state.backup.restore import restore
from fedring.server.state.failures import StorageFailed
from fedring.server.state.rows import RoundRow, UpdateRow
from fedring.server.state.shared import placing
from fedring.server.state.shared.leadership import open_session
from fedring.server.state.shared.object_blobs import open_objects
from fedring.server.state.shared.opening import check_same_state
from fedring.server.state.shared.placing import SharedPlace, led_place
from fedring.server.state.shared.restoring import restore_shared
from fedring.server.state.shared.source import shared_source, writing
from fedring.server.state.sql.copying import copy_tables, count
from fedring.server.state.sql.sealed import values_of
from fedring.server.state.sql.tables import METADATA, updates
from tests import forks
from tests.damage import flip
from tests.fault.faulty_fleet import SECONDS
from tests.fault.shared_place import Place, kill
from tests.fault.state_folder import JOB, made_while_publishing, make_state_with_open_round, push, rows
from tests.fault.test_restore import check_restored
from tests.fleets import Control, Fleet
from tests.s3 import s3_server
from tests.system.wire import WireClient, run
from tests.waiting import until

MOVES = ("ALTER TABLE", "LOCK TABLE", "ROLLBACK TO SAVEPOINT")
"""How the queries begin by which the present tables are moved aside."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder with `copy` and `other`, backups of two servers in the middle of a round."""
    folder = tmp_path_factory.mktemp("made")
    for name, rounds in (("copy", 2), ("other", 1)):
        back_up(make_state_with_open_round(folder / f"of-{name}", rounds), folder / name)
    return folder


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path / "place")


@pytest.fixture(scope="module")
def restored(made: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Place]:
    """Restore both backups, each into a place of its own, for tests to copy."""
    places = {name: Place(tmp_path_factory.mktemp(name) / "place") for name in ("copy", "other")}
    for name, place in places.items():
        restore_shared(made / name, place.state_url, place.blob_url)
    return places


@pytest.fixture
def with_copy(restored: dict[str, Place], tmp_path: Path) -> Place:
    """Return a place where `copy` has been restored."""
    return Place(tmp_path / "with copy", restored["copy"])


@pytest.fixture
def with_other(restored: dict[str, Place], tmp_path: Path) -> Place:
    """Return a place where `other` has been restored."""
    return Place(tmp_path / "with other", restored["other"])


def back_up_shared(place: Place, copy: Path) -> Manifest:
    with shared_source(place.state_url, place.blob_url) as source:
        return back_up(source, copy)


def without_meta(found: dict[str, list[object]]) -> dict[str, list[object]]:
    return {name: each for name, each in found.items() if name != "meta"}


def test_a_state_goes_from_a_folder_to_a_database_and_back_row_by_row(made: Path, place: Place, tmp_path: Path) -> None:
    manifest = restore_shared(made / "copy", place.state_url, place.blob_url).manifest
    again = back_up_shared(place, tmp_path / "again")
    assert without_meta(rows(tmp_path / "again")) == without_meta(rows(made / "copy"))
    same = ("run_id", "state_id", "models", "newest_model", "rounds", "open_round", "blobs")
    assert [getattr(again, name) for name in same] == [getattr(manifest, name) for name in same]
    restore(tmp_path / "again", tmp_path / "state")
    check_restored(tmp_path / "state", tmp_path / "again")


def test_a_server_goes_on_with_the_round_of_a_backup_in_either_kind(made: Path, place: Place, tmp_path: Path) -> None:
    digests = []
    restore_shared(made / "copy", place.state_url, place.blob_url)
    restore(made / "copy", tmp_path / "folder" / "state" / "server")
    for name, settings in (("folder", {}), ("shared", place.settings)):
        with (
            Fleet(tmp_path / name, settings) as fleet,
            Control(fleet.control) as control,
            WireClient(fleet.listen, "b") as b,
        ):
            events = control.events()
            push(b, 5)
            until_published(control, events, 4)
            digests.append(control.models(limit=1)[0].digest)
    assert digests[0] == digests[1]


def until_published(control: Control, events: Events, version: int) -> None:
    assert next(event for event in events if control.models(limit=1)[0].version == version)


def go_on(place: Place, folder: Path) -> None:
    """Publish versions 4 and 5 of a state that has three."""
    with (
        Fleet(folder, place.settings) as fleet,
        Control(fleet.control) as control,
        WireClient(fleet.listen, "a") as a,
        WireClient(fleet.listen, "b") as b,
    ):
        events = control.events()
        for seed, client in enumerate((b, a, b)):
            push(client, seed)
        until_published(control, events, 5)


def test_a_backup_is_complete_while_the_leader_publishes_and_prunes(place: Place, tmp_path: Path) -> None:
    settings = {"keep_models": 1, "keep_update_rounds": 1, **place.settings}
    with Fleet(tmp_path / "one", settings) as fleet, Control(fleet.control) as control:
        found = made_while_publishing(
            fleet, control, 3, lambda number: back_up_shared(place, tmp_path / f"copy-{number}")
        )
    newest = [manifest.newest_model for manifest in found]
    assert newest == sorted(newest)
    for number, manifest in enumerate(found):
        assert restore(tmp_path / f"copy-{number}", tmp_path / f"restored-{number}").manifest == manifest


def test_a_server_starts_on_an_older_backup_of_its_own_run(place: Place, tmp_path: Path) -> None:
    with Fleet(tmp_path / "one", place.settings) as fleet, Control(fleet.control) as control:
        with WireClient(fleet.listen, "a") as a, WireClient(fleet.listen, "b") as b:
            run(control, **JOB)
            push(a, 0)
            push(b, 1)
            push(a, 2)
            manifest = back_up_shared(place, tmp_path / "copy")
            push(b, 3)
            push(a, 4)
            push(b, 5)
            push(a, 100)
        fleet.server.kill()
    restore_shared(tmp_path / "copy", place.state_url, place.blob_url, replace=True)
    with Fleet(tmp_path / "two", place.settings) as fleet, Control(fleet.control) as control:
        assert control.models(limit=1)[0].version == manifest.newest_model


@pytest.mark.parametrize("point", REPLACING)
def test_a_server_starts_after_a_killed_restore_of_an_older_backup_of_its_own_run(
    made: Path, with_copy: Place, tmp_path: Path, point: str
) -> None:
    """If it is killed behind its commit, the models that it has replaced are no lost commits of the older state."""
    go_on(with_copy, tmp_path / "one")
    kill(point, "restore", made / "copy", *with_copy.words, "--replace")
    committed = REPLACING.index(point) >= REPLACING.index("shared_rows_committed")
    with Fleet(tmp_path / "two", with_copy.settings) as fleet, Control(fleet.control) as control:
        assert control.models(limit=1)[0].version == (3 if committed else 5)
    named = {str(name) for (name,) in with_copy.ask("SELECT blob FROM models")}
    kept = {Path(key).name for key in with_copy.objects() if key.startswith("blobs/")}
    assert named <= kept
    assert ("placing" in with_copy.objects()) is not committed, "one that was not committed might still be running"


@pytest.mark.parametrize("point", [point for point in PLACING if point != "shared_rows_committed"])
def test_a_server_starts_after_a_killed_restore_of_a_newer_backup_of_its_own_run(
    made: Path, with_copy: Place, tmp_path: Path, point: str
) -> None:
    """The newer models, which no row names, are no lost commits."""
    go_on(with_copy, tmp_path / "one")
    back_up_shared(with_copy, tmp_path / "newer")
    restore_shared(made / "copy", with_copy.state_url, with_copy.blob_url, replace=True)
    for _ in range(2):
        kill(point, "restore", tmp_path / "newer", *with_copy.words, "--replace")
    cut_a_blob(tmp_path / "newer")
    with pytest.raises(BackupError, match="is damaged"):
        restore_shared(tmp_path / "newer", with_copy.state_url, with_copy.blob_url, replace=True)
    with Fleet(tmp_path / "two", with_copy.settings) as fleet, Control(fleet.control) as control:
        assert control.models(limit=1)[0].version == 3


def test_numbers_go_on_after_those_that_were_given_and_removed(with_copy: Place, tmp_path: Path) -> None:
    with with_copy.led() as store:
        job = store.jobs.get(1)
        assert job is not None
        given = store.rounds.create(RoundRow(0, job.job_id, 9, "waiting", 1.0)).round
    with_copy.ask(f"DELETE FROM rounds WHERE round = {given}")
    back_up_shared(with_copy, tmp_path / "copy")
    other = Place(tmp_path / "other")
    restore_shared(tmp_path / "copy", other.state_url, other.blob_url)
    with other.led() as store:
        assert store.rounds.create(RoundRow(0, job.job_id, 9, "waiting", 1.0)).round == given + 1


@pytest.mark.parametrize("point", PLACING)
def test_a_killed_restore_into_an_empty_database_leaves_nothing_or_all(made: Path, place: Place, point: str) -> None:
    kill(point, "restore", made / "copy", *place.words)
    if point == "shared_rows_committed":
        with place.led() as store:
            assert store.models.newest(1)[0].version == 3
        assert without_meta(place.rows()) == without_meta(rows(made / "copy"))
        return
    with pytest.raises(ConfigError, match="there is no state"):
        place.rows()
    restore_shared(made / "copy", place.state_url, place.blob_url)
    assert without_meta(place.rows()) == without_meta(rows(made / "copy"))


@pytest.mark.parametrize("point", [point for point in PLACING if point != "shared_rows_committed"])
@pytest.mark.parametrize("then", ["another backup", "a server"])
def test_an_empty_database_into_which_a_restore_was_killed_is_still_free(
    made: Path, place: Place, point: str, then: str
) -> None:
    kill(point, "restore", made / "copy", *place.words)
    if then == "another backup":
        restore_shared(made / "other", place.state_url, place.blob_url)
        assert without_meta(place.rows()) == without_meta(rows(made / "other"))
        return
    session = open_session(place.state_url)
    check_same_state(session, open_objects(place.blob_url))
    session.close()
    with place.led() as store:
        assert not store.models.newest(1)
    assert (place.folder / "objects" / "state_id").read_text() == place.meta()["state_id"]


@pytest.mark.parametrize("replace", [False, True], ids=["empty", "replace"])
def test_a_restore_that_fails_leaves_nothing(
    replace: bool, made: Path, place: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def copied(*_: object) -> None:
        raise StorageFailed("disk_full", "no space is left for the database")

    if replace:
        restore_shared(made / "other", place.state_url, place.blob_url)
    before = place.objects()
    with monkeypatch.context() as patch:
        patch.setattr(placing, "copy_tables", copied)
        with pytest.raises(BackupError, match="no space is left"):
            restore_shared(made / "copy", place.state_url, place.blob_url, replace=replace)
    assert place.objects() == before
    if replace:
        assert (place.folder / "objects" / "state_id").read_text() == place.meta()["state_id"]
    restore_shared(made / "other", place.state_url, place.blob_url, replace=replace)
    assert without_meta(place.rows()) == without_meta(rows(made / "other"))


def test_a_restore_that_fails_behind_its_commit_is_done_and_says_what_is_left(
    made: Path, with_other: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    def put(*_: object) -> None:
        raise StorageFailed("disk_error", "the bucket does not answer")

    former = with_other.objects()
    with monkeypatch.context() as patch:
        patch.setattr(placing, "move_aside", put)
        done = restore_shared(made / "copy", with_other.state_url, with_other.blob_url, replace=True)
    assert "the bucket does not answer" in done.left
    assert without_meta(with_other.rows()) == without_meta(rows(made / "copy"))
    assert former <= with_other.objects()
    with with_other.led() as store:
        assert store.models.newest(1)[0].version == 3
        assert {Path(key).name for key in with_other.objects() if key.startswith("blobs/")} == set(store.named_blobs())


@pytest.mark.parametrize("committed", [False, True], ids=["old", "new"])
def test_a_restore_whose_commit_is_in_doubt_says_so_and_can_be_repeated(
    made: Path, with_other: Place, monkeypatch: pytest.MonkeyPatch, committed: bool
) -> None:
    commit = PGDialect_psycopg.do_commit

    def end(dialect: Any, connection: Any) -> None:
        patch.setattr(PGDialect_psycopg, "do_commit", commit)
        if committed:
            connection.commit()
        with_other.end_session()
        connection.execute("SELECT 1")

    def break_commits(name: str) -> None:
        if name == "shared_rows_written":
            patch.setattr(PGDialect_psycopg, "do_commit", end)

    with monkeypatch.context() as patch:
        patch.setattr(placing, "crashpoint", break_commits)
        with pytest.raises(BackupError, match="has the new state, or still what was there before: repeat") as caught:
            restore_shared(made / "copy", with_other.state_url, with_other.blob_url, replace=True)
    assert caught.value.exit_code is Exit.TRY_AGAIN
    assert without_meta(with_other.rows()) == without_meta(rows(made / ("copy" if committed else "other")))
    assert not restore_shared(made / "copy", with_other.state_url, with_other.blob_url, replace=True).left
    assert without_meta(with_other.rows()) == without_meta(rows(made / "copy"))


def test_a_server_starts_after_a_restore_that_has_lost_the_lead_went_on_and_was_killed(
    made: Path, with_copy: Place, tmp_path: Path
) -> None:
    """The newer models that it has written after another server began to lead are no lost commits."""
    go_on(with_copy, tmp_path / "one")
    back_up_shared(with_copy, tmp_path / "newer")
    restore_shared(made / "copy", with_copy.state_url, with_copy.blob_url, replace=True)
    contents = read_contents(tmp_path / "newer" / "facts.sqlite")
    with pytest.MonkeyPatch.context() as patch, suppress(KeyError):
        patch.setattr(SharedPlace, "discard", lambda place: None)  # it is killed
        with led_place(with_copy.state_url, with_copy.blob_url) as led:
            led.announce(contents.state_id)
            with_copy.end_session()
            with with_copy.led():
                pass
            led.put_blobs(tmp_path / "newer" / "blobs", contents.blobs, lambda done, total: None)
            raise KeyError
    for name in ("two", "three"):
        with Fleet(tmp_path / name, with_copy.settings) as fleet, Control(fleet.control) as control:
            assert control.models(limit=1)[0].version == 3


@pytest.mark.parametrize("point", PLACING)
def test_a_killed_restore_leaves_the_old_state_or_the_new_one(made: Path, with_other: Place, point: str) -> None:
    kill(point, "restore", made / "copy", *with_other.words, "--replace")
    committed = point == "shared_rows_committed"
    there = made / ("copy" if committed else "other")
    assert without_meta(with_other.rows()) == without_meta(rows(there))
    with with_other.led() as store:  # a server starts on it, whichever it is
        newest = store.models.newest(1)[0].version
    assert newest == (3 if committed else 2)
    done = restore_shared(made / "copy", with_other.state_url, with_other.blob_url, replace=True)
    assert without_meta(with_other.rows()) == without_meta(rows(made / "copy"))
    kept = with_other.ask(f"SELECT max(version) FROM {done.replaced_schema}.models")
    assert kept == [(newest,)]


def test_a_state_in_a_database_is_replaced_only_with_the_flag(made: Path, with_copy: Place) -> None:
    before = with_copy.rows()
    with pytest.raises(ConfigError, match="with --replace it is moved to a schema"):
        restore_shared(made / "copy", with_copy.state_url, with_copy.blob_url)
    assert with_copy.rows() == before
    epoch = with_copy.meta()["epoch"]
    done = restore_shared(made / "copy", with_copy.state_url, with_copy.blob_url, replace=True)
    meta = with_copy.meta()
    assert int(meta["epoch"]) > int(epoch)
    assert meta["restored_from"] == digest_of(made / "copy" / "facts.sqlite")
    assert done.replaced_schema.startswith("replaced_2")


def cut_a_blob(copy: Path) -> None:
    path = next(path for path in sorted((copy / "blobs").iterdir()) if path.name != "state_id")
    os.truncate(path, 100)


def lose_a_blob(copy: Path) -> None:
    next(path for path in sorted((copy / "blobs").iterdir()) if path.name != "state_id").unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (cut_a_blob, "is damaged: blobs/"),
        (lose_a_blob, "is missing: use another backup"),
        (lambda copy: flip(copy / "facts.sqlite"), "facts.sqlite does not hold what was written to it"),
        (lambda copy: (copy / "blobs" / "state_id").unlink(), "state_id is missing"),
    ],
)
def test_a_damaged_backup_changes_nothing_in_a_database(
    damage: Callable[[Path], object], words: str, made: Path, with_other: Place, tmp_path: Path
) -> None:
    before = with_other.rows(), with_other.objects()
    shutil.copytree(made / "copy", tmp_path / "copy")
    damage(tmp_path / "copy")
    with pytest.raises(BackupError, match=words):
        restore_shared(tmp_path / "copy", with_other.state_url, with_other.blob_url, replace=True)
    assert (with_other.rows(), with_other.objects()) == before


def object_of(place: Place, name: object) -> Path:
    return next((place.folder / "objects").glob(f"blobs/*/{name}"))


@pytest.mark.parametrize("how", ["flipped", "cut", "missing"])
def test_a_backup_of_a_damaged_object_fails(how: str, with_copy: Place, tmp_path: Path) -> None:
    ((name,),) = with_copy.ask("SELECT blob FROM models WHERE version = 2")
    file = object_of(with_copy, name)
    if how == "flipped":
        flip(file)
    elif how == "cut":
        os.truncate(file, file.stat().st_size - 1)
    else:
        file.unlink()
    with pytest.raises(BackupError, match=f"blobs/{name}, of model 2, "):
        back_up_shared(with_copy, tmp_path / "copy")
    assert not list(tmp_path.glob("copy*"))


def test_a_backup_during_restores_that_fail_is_that_of_the_state_that_stays(
    made: Path, with_other: Place, tmp_path: Path
) -> None:
    """It has listed the objects that a failing restore then deletes, again and again."""
    before = with_other.rows()
    with shared_source(with_other.state_url, with_other.blob_url) as source:

        class DuringRestores:
            size_of, copy_blob = source.size_of, source.copy_blob

            def snapshot(self, copy: Path) -> Contents:
                found = source.snapshot(copy)
                with suppress(KeyError), led_place(with_other.state_url, with_other.blob_url) as led:
                    led.announce(found.state_id)
                    led.put_blobs(with_other.folder / "examined" / "blobs", found.blobs, lambda done, total: None)
                    found = source.snapshot(copy)
                    raise KeyError
                return found

        back_up(DuringRestores(), tmp_path / "copy")
    assert rows(tmp_path / "copy") == before


@pytest.mark.parametrize("fails", [True, False], ids=["fails", "is done"])
def test_a_backup_that_begins_while_a_restore_ends_is_that_of_the_state_that_is_there(
    made: Path, with_other: Place, tmp_path: Path, fails: bool
) -> None:
    waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    contents = read_contents(made / "copy" / "facts.sqlite")
    with ThreadPoolExecutor(1) as threads:
        backups = list[Future[Manifest]]()

        def begin() -> None:
            backups.append(threads.submit(back_up_shared, with_other, tmp_path / "copy"))
            until(lambda: with_other.ask(waiting))
            if fails:
                raise KeyError

        with suppress(KeyError), led_place(with_other.state_url, with_other.blob_url) as led:
            led.announce(contents.state_id)
            led.put_blobs(made / "copy" / "blobs", contents.blobs, lambda done, total: None)
            led.put_rows(made / "copy" / "facts.sqlite", (), begin)
            led.tidy(contents.state_id, contents.blobs)
        assert backups[0].result().newest_model == (2 if fails else 3)


def test_a_backup_takes_an_older_object_if_the_newest_one_is_damaged(with_copy: Place, tmp_path: Path) -> None:
    ((name,),) = with_copy.ask("SELECT blob FROM models WHERE version = 2")
    file = object_of(with_copy, name)
    later = file.parents[1] / str(int(file.parent.name) + 1) / file.name
    later.parent.mkdir()
    later.write_bytes(file.read_bytes())
    flip(later)
    back_up_shared(with_copy, tmp_path / "copy")
    assert (tmp_path / "copy" / "blobs" / str(name)).read_bytes() == file.read_bytes()


def test_a_backup_of_a_changed_row_fails(with_copy: Place, tmp_path: Path) -> None:
    with_copy.ask("UPDATE updates SET num_samples = num_samples + 1 WHERE round = 3")
    with pytest.raises(BackupError, match="the row of round 3, client_id 'a' in the table updates"):
        back_up_shared(with_copy, tmp_path / "copy")


def test_nothing_is_restored_while_a_server_leads_or_among_the_objects_of_another_state(
    made: Path, place: Place, tmp_path: Path
) -> None:
    with Fleet(tmp_path / "one", place.settings) as fleet:
        done = forks.run("fedring.ctl.main", "restore", made / "copy", *place.words, "--replace", timeout=60)
        assert done.returncode == Exit.CONFIG
        assert f"{fleet.listen} leads: stop all its servers first" in done.stderr
    other = Place(tmp_path / "other")
    with pytest.raises(ConfigError, match="blob_url holds the objects of another state"):
        restore_shared(made / "copy", other.state_url, place.blob_url)
    other.state_url = place.state_url
    with pytest.raises(ConfigError, match="belong to different states"):
        back_up_shared(other, tmp_path / "copy")


@pytest.mark.parametrize("replace", [False, True], ids=["empty", "replace"])
def test_a_server_that_starts_during_a_restore_waits_and_then_leads(
    replace: bool, made: Path, place: Place, tmp_path: Path
) -> None:
    if replace:
        restore_shared(made / "other", place.state_url, place.blob_url)
    fleet = Fleet(tmp_path / "one", place.settings)
    for name in ("logs", "state"):
        (fleet.directory / name).mkdir(parents=True)

    def begin(done: int, total: int) -> None:
        if not fleet.server.running:
            fleet.server.start()
            until(lambda: "waits as a standby: flctl on" in fleet.server.log.read_text())

    try:
        restore_shared(made / "copy", place.state_url, place.blob_url, replace=replace, tell=begin)
        fleet.server.first_line(SECONDS)
        with Control(str(fleet.server.settings["control_listen"])) as control:
            assert control.models(limit=1)[0].version == 3
    finally:
        fleet.stop()


def test_a_restore_and_a_reader_of_all_tables_do_not_block_each_other(made: Path, with_other: Place) -> None:
    here = "SELECT query FROM pg_stat_activity WHERE datname = current_database()"
    engine = create_engine(with_other.state_url, poolclass=NullPool)
    with ThreadPoolExecutor(1) as threads, engine.connect() as reader:
        count(reader, METADATA.sorted_tables[-1])
        restored = threads.submit(
            restore_shared, made / "copy", with_other.state_url, with_other.blob_url, replace=True
        )
        until(lambda: any(query.startswith(MOVES) for (query,) in with_other.ask(here)))
        for table in METADATA.sorted_tables:
            count(reader, table)
        assert not restored.done()
        reader.rollback()
        assert restored.result().replaced_schema
    assert without_meta(with_other.rows()) == without_meta(rows(made / "copy"))


def test_flctl_backs_up_and_restores_a_shared_state(made: Path, place: Place, tmp_path: Path) -> None:
    done = forks.run("fedring.ctl.main", "restore", made / "copy", *place.words, timeout=60)
    assert done.returncode == 0, done.stderr
    done = forks.run("fedring.ctl.main", "backup", tmp_path / "copy", *place.words, "-o", "json", timeout=60)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["open_round"] == 3
    done = forks.run("fedring.ctl.main", "restore", made / "copy", *place.words, "--replace", "-o", "json", timeout=60)
    assert json.loads(done.stdout)["replaced"].startswith("replaced_2")
    for wrong in (place.words[:2], (*place.words, "--state-dir", str(tmp_path))):
        done = forks.run("fedring.ctl.main", "backup", tmp_path / "another", *wrong, timeout=60)
        assert done.returncode == Exit.USAGE, done.stderr


def test_a_backup_is_restored_into_a_bucket_and_comes_back_from_it(
    made: Path, place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "weed").mkdir()
    large = random.randbytes(20 << 20)  # in several parts
    with s3_server(tmp_path / "weed", "bucket") as keys:
        for name, value in keys.items():
            monkeypatch.setenv(name, value)
        place.blob_url = "s3://bucket/state"
        restore_shared(made / "copy", place.state_url, place.blob_url)
        back_up_shared(place, tmp_path / "again")
        (tmp_path / "large").mkdir()
        blob = NamedBlob(name_of(large), "model 9", len(large))
        (tmp_path / "large" / blob.digest).write_bytes(large)
        with led_place(place.state_url, place.blob_url) as led:
            led.put_blobs(tmp_path / "large", [blob], lambda done, total: None)
        with shared_source(place.state_url, place.blob_url) as source:
            source.snapshot(tmp_path / "facts.sqlite")
            assert source.copy_blob(blob, tmp_path / "copied", lambda count: None) == len(large)
    assert without_meta(rows(tmp_path / "again")) == without_meta(rows(made / "copy"))
    assert (tmp_path / "copied").read_bytes() == large


def test_a_copy_of_many_updates_holds_few_of_them_in_memory(with_copy: Place, tmp_path: Path) -> None:
    payload = bytes(60_000)
    engine = create_engine(with_copy.state_url, poolclass=NullPool)
    with engine.begin() as connection:
        for number in range(600):
            row = UpdateRow(3, f"c{number}", name_of(payload), f"n{number}", (), 1, len(payload), 1.0, 1.0, 1.0)
            connection.execute(insert(updates), values_of(row) | {"payload": payload})
    with engine.connect() as source, writing(tmp_path / "facts.sqlite") as target:
        tracemalloc.start()
        copy_tables(source, target)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert count(target, updates) >= 600
    assert peak < 600 * len(payload) / 2
