"""States of released versions, kept as their backups: this version migrates them, and goes on with their rounds."""

import resource
import tarfile
from pathlib import Path

import numpy as np
import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.operations import Operations
from safetensors.numpy import load_file
from sqlalchemy import Connection, NullPool, create_engine, text

from fedring.daemon.crash import MIGRATING
from fedring.daemon.exits import Exit
from fedring.server.standby import _open_store
from fedring.server.state.backup.contents import BackupError
from fedring.server.state.backup.restore import restore
from fedring.server.state.failures import StorageError
from fedring.server.state.identity import open_state
from fedring.server.state.lead import Lead
from fedring.server.state.shared.restoring import restore_shared
from fedring.server.state.sql import migrations
from fedring.server.state.sql.database import RELEASED, SCHEMA, VERSION, open_database, read_version
from fedring.server.state.sql.sealed import set_meta
from fedring.server.state.sql.tables import METADATA, ROW_DIGEST
from tests import forks
from tests.damage import ask
from tests.fault.shared_place import Place
from tests.fault.state_folder import files, push
from tests.fault.test_state import refusal
from tests.fleets import Control, Fleet
from tests.system.wire import WireClient

KEPT = Path(__file__).parent.parent / "states"
VERSIONS = sorted(path.name.removesuffix(".tar.xz") for path in KEPT.glob("*.tar.xz"))
OLDEST = "0.2.0"
SIZE, SEED = 300, 5  # of the model, and of the update that the kept round waits for
ADDED: dict[str, dict[str, object]] = {
    "jobs": {"place": 0, "signed": b""},
    "rounds": {"overrides": "{}"},
    "updates": {"staleness": 0},
}
"""What the columns hold that 0.2.0 did not have; `buffer` holds the round."""


def kept(version: str, folder: Path) -> Path:
    """Unpack the backup that a version has made: two models of a job, whose third round waits for an update of b."""
    folder.mkdir(parents=True, exist_ok=True)
    with tarfile.open(KEPT / f"{version}.tar.xz") as packed:
        packed.extractall(folder, filter="data")
    return folder


def old_state(folder: Path, version: str = OLDEST) -> Path:
    """Make a state folder as a server of this version has left it."""
    state = folder / "state" / "server"
    state.parent.mkdir(parents=True)
    kept(version, state)
    (state / "backup.json").unlink()
    (state / "expected.safetensors").unlink()
    ask(state, "PRAGMA journal_mode = WAL")
    return state


def stored(connection: Connection) -> dict[str, list[dict[str, object]]]:
    """Return all rows as they are stored, without their digests."""
    tables = [table.name for table in METADATA.sorted_tables]
    found = {name: connection.execute(text(f"SELECT * FROM {name}")).mappings() for name in tables}
    return {
        name: sorted(({key: row[key] for key in row if key != ROW_DIGEST} for row in each), key=str)
        for name, each in found.items()
    }


def stored_in(state: Path) -> dict[str, list[dict[str, object]]]:
    with create_engine(f"sqlite:///{state / 'facts.sqlite'}", poolclass=NullPool).connect() as connection:
        return stored(connection)


def go_on(fleet: Fleet, copy: Path, out: Path) -> None:
    """Deliver the update that the kept round waits for: the model must be the one that its own version has made."""
    with Control(fleet.control) as control, WireClient(fleet.listen, "b") as client:
        events = control.events()
        push(client, SEED, SIZE)
        assert next(event for event in events if control.models(limit=1)[0].version == 5)
        control.export_model(5, out)
        assert [(job.name, job.state) for job in control.jobs()][-1] == ("private", "completed")
        assert control.privacy().rounds == 1
    expected = load_file(copy / "expected.safetensors")
    for name, values in load_file(out).items():
        np.testing.assert_allclose(values, expected[name], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("version", VERSIONS)
def test_a_server_goes_on_with_the_state_of_an_older_one(version: str, tmp_path: Path) -> None:
    old_state(tmp_path / "one", version)
    with Fleet(tmp_path / "one") as fleet:
        go_on(fleet, kept(version, tmp_path / "kept"), tmp_path / "model.safetensors")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_backup_of_an_older_version_is_restored(version: str, tmp_path: Path) -> None:
    copy = kept(version, tmp_path / "kept")
    before = files(copy)
    restore(copy, tmp_path / "one" / "state" / "server")
    assert files(copy) == before
    with Fleet(tmp_path / "one") as fleet:
        go_on(fleet, copy, tmp_path / "model.safetensors")


def test_a_disk_without_room_to_migrate_a_backup_is_not_told_to_be_a_damaged_backup(tmp_path: Path) -> None:
    copy = kept(OLDEST, tmp_path / "kept")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, ((copy / "facts.sqlite").stat().st_size, before[1]))
    try:
        with pytest.raises(BackupError, match=r"facts\.sqlite cannot be migrated: disk_") as caught:
            restore(copy, tmp_path / "state")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert "damaged" not in str(caught.value)
    restore(copy, tmp_path / "state")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_backup_of_an_older_version_goes_to_a_database(version: str, tmp_path: Path) -> None:
    copy, place = kept(version, tmp_path / "kept"), Place(tmp_path / "place")
    restore_shared(copy, place.state_url, place.blob_url)
    with Fleet(tmp_path / "one", place.settings) as fleet:
        go_on(fleet, copy, tmp_path / "model.safetensors")


def test_all_that_the_tables_held_is_in_the_new_ones(tmp_path: Path) -> None:
    state = old_state(tmp_path)
    before = {
        str(name): [dict(zip(columns, row, strict=True)) for row in ask(state, f"SELECT * FROM {name}")]
        for (name,) in ask(state, "SELECT name FROM sqlite_master WHERE sql LIKE '%row_digest%'")
        for columns in [[str(column) for _, column, *_ in ask(state, f"PRAGMA table_info({name})")]]
    }
    numbers = ask(state, "SELECT * FROM sqlite_sequence")
    store, _ = open_state(state)
    store.close()
    after = stored_in(state)
    assert after.pop("commands") == []
    assert after.pop("events") == []
    for name, rows in after.items():
        wanted: list[dict[str, object]] = [
            {key: value for key, value in row.items() if key != ROW_DIGEST} for row in before[name]
        ]
        for row in wanted:
            row.update(ADDED.get(name, {}))
            if name == "updates":
                row["buffer"] = row["round"]
        assert rows == sorted(wanted, key=str)
    assert ask(state, "SELECT * FROM sqlite_sequence") == numbers


def test_migrated_tables_are_those_that_a_new_state_has(tmp_path: Path) -> None:
    store, _ = open_state(old_state(tmp_path))
    with create_engine(f"sqlite:///{tmp_path / 'state/server/facts.sqlite'}", poolclass=NullPool).connect() as found:
        assert compare_metadata(MigrationContext.configure(found), METADATA) == []
        strict = found.execute(text("SELECT count(*) FROM pragma_table_list WHERE strict AND schema = 'main'"))
        assert strict.scalar() == len(METADATA.tables)
        assert found.execute(text("PRAGMA foreign_key_check")).all() == []
        names = found.execute(text("SELECT name FROM sqlite_master WHERE type = 'table' AND name != 'sqlite_sequence'"))
        assert {name for (name,) in names} == METADATA.tables.keys()
    store.close()


@pytest.mark.parametrize("point", MIGRATING)
def test_a_killed_migration_is_made_again(point: str, tmp_path: Path) -> None:
    state = old_state(tmp_path / "one")
    before = ask(state, "SELECT * FROM updates ORDER BY round, client_id")
    fleet = Fleet(tmp_path / "one")
    fleet.server.env["FL_CRASH_AT"] = point
    (tmp_path / "one" / "logs").mkdir()
    fleet.server.start()
    assert fleet.server.wait(60) == 137
    fleet.server.close()
    committed = point == "migration_committed"
    assert ask(state, "PRAGMA user_version") == [(SCHEMA if committed else 15,)]
    if not committed:
        assert ask(state, "SELECT * FROM updates ORDER BY round, client_id") == before
    with Fleet(tmp_path / "one") as again:
        go_on(again, kept(OLDEST, tmp_path / "kept"), tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    ("query", "where"),
    [
        (
            "UPDATE updates SET num_samples = num_samples + 1 WHERE round = 2 AND client_id = 'a'",
            "round 2, client_id 'a'",
        ),
        ("UPDATE charges SET row_digest = x'00'", "round 1"),
    ],
)
def test_a_damaged_row_is_not_sealed_anew(query: str, where: str, tmp_path: Path) -> None:
    state = old_state(tmp_path)
    ask(state, query)
    before = files(state)
    with pytest.raises(StorageError, match=f"the row of {where}.* is not what was written"):
        open_state(state)
    assert {name: each for name, each in files(state).items() if name in before} == before
    assert ask(state, "PRAGMA user_version") == [(15,)]


@pytest.mark.parametrize("words", [("backup", "copy"), ("token", "create", "--name", "me")], ids=" ".join)
def test_what_only_reads_says_who_migrates(words: tuple[str, ...], tmp_path: Path) -> None:
    state = old_state(tmp_path)
    before = files(state)
    done = forks.run("fedring.ctl.main", *words, "--state-dir", state, timeout=60)
    assert done.returncode == Exit.CONFIG
    assert "written by fedring 0.2.0 (schema 15): start this version's fl-server on it once" in done.stderr
    assert files(state) == before


def test_a_check_of_the_configuration_says_that_it_would_be_migrated(tmp_path: Path) -> None:
    state = old_state(tmp_path)
    before = files(state)
    done = forks.run("fedring.server.main", "--check-config", "--state-dir", state, timeout=60)
    assert (done.returncode, done.stderr.count("Traceback")) == (0, 0), done.stderr
    assert "the state of fedring 0.2.0 is migrated at the next start" in done.stdout
    assert files(state) == before


@pytest.mark.parametrize("number", [14, 16, SCHEMA + 1])
def test_a_version_that_was_not_released_is_refused(number: int, tmp_path: Path) -> None:
    state = old_state(tmp_path / "one")
    ask(state, f"PRAGMA user_version = {number}")
    before = files(state)
    assert f"schema {number}" in refusal(tmp_path / "one")
    assert files(state) == before


def make_old(place: Place) -> dict[str, list[dict[str, object]]]:
    """Give a database the tables that 0.2.0 would have made in it; return the rows that it had before."""
    with create_engine(place.state_url, poolclass=NullPool).begin() as connection:
        before = stored(connection)
        operations = Operations(MigrationContext.configure(connection))
        for table, columns in (("jobs", ["place", "signed"]), ("rounds", ["overrides"])):
            for column in columns:
                operations.drop_column(table, column)
        operations.drop_index("one_of_each_client")
        for column in ("buffer", "staleness"):
            operations.drop_column("updates", column)
        operations.drop_table("commands")
        set_meta(connection, VERSION, "15")
        for layout, old in migrations._layouts(connection):
            migrations._seal(connection, layout, old)
    for job in before["jobs"]:
        job["place"] = 0  # those that wait go on in the order of their numbers
    return before


def test_the_leader_migrates_a_database_and_standbys_wait(tmp_path: Path) -> None:
    place = Place(tmp_path / "place")
    restore_shared(kept(VERSIONS[-1], tmp_path / "kept"), place.state_url, place.blob_url)
    before = make_old(place)
    assert _open_store(place.state_url, Lead(here=False, leader="another")) is None
    with pytest.raises(StorageError, match="start this version's fl-server"):
        open_database(create_engine(place.state_url))
    with place.led():  # as a server that has begun to lead
        pass
    with create_engine(place.state_url, poolclass=NullPool).connect() as connection:
        assert read_version(connection) == SCHEMA
        assert stored(connection) == before
        own = {"include_object": lambda _, name, kind, *__: kind != "table" or name in METADATA.tables}
        assert compare_metadata(MigrationContext.configure(connection, opts=own), METADATA) == []
    store = _open_store(place.state_url, Lead(here=False, leader="another"))
    assert store is not None
    store.close()


def test_a_kept_state_is_of_each_version_that_is_migrated() -> None:
    assert list(RELEASED.values()) == VERSIONS
