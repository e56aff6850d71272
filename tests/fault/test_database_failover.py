"""The database of two servers fails over to a replica: what that may have lost is told, and counted in a new epoch."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url

from fedring.server.state.shared.replication import TABLE, is_synchronous, may_have_lost_commits, note_timeline
from tests import postgres
from tests.conftest import SEED
from tests.fault.counted_job import NAMES, ROUNDS_EACH, SETTINGS, CountedJob
from tests.fault.counted_updates import SharedState, check_models
from tests.fault.killable_clients import KillableClients
from tests.fault.leader_ends import TwoAddresses, ask
from tests.waiting import until


@contextmanager
def primary_and_replica() -> Iterator[tuple[postgres.Cluster, postgres.Cluster, str]]:
    """Provide two clusters, of which the second one follows the first, and the address of a database."""
    with ExitStack() as stack:
        primary = postgres.Cluster(postgres.folder_for_anybody())
        stack.callback(primary.stop)
        database = primary.new_database()
        replica = postgres.Cluster(postgres.folder_for_anybody(), source=primary)
        stack.callback(replica.stop)
        until(lambda: ask(database, "SELECT 1 FROM pg_stat_replication WHERE state = 'streaming'"))
        yield primary, replica, database


def in_cluster(database: str, cluster: postgres.Cluster) -> str:
    """Return the address of the same database in another cluster."""
    return make_url(database).set(query={"host": str(cluster.folder)}).render_as_string()


@pytest.mark.parametrize("synchronous", [True, False], ids=["synchronous", "asynchronous"])
def test_a_failover_of_the_database_is_told_if_it_may_have_lost_updates(tmp_path: Path, *, synchronous: bool) -> None:
    job = CountedJob(SEED, 3 * ROUNDS_EACH)
    with (
        primary_and_replica() as (primary, replica, database),
        TwoAddresses(tmp_path, database, settings=SETTINGS) as fleet,
        KillableClients(fleet, job.update_log, NAMES) as clients,
    ):
        if synchronous:
            primary.set("synchronous_standby_names", "*")
            until(lambda: ask(database, "SELECT 1 FROM pg_stat_replication WHERE sync_state = 'sync'"))
            until(lambda: ask(database, "SELECT 1 FROM database_timeline WHERE synchronous"))
        job.start(fleet)
        clients.allow_rounds(ROUNDS_EACH)
        published = "SELECT 1 FROM models WHERE version > {}"
        until(lambda: ask(database, published.format(ROUNDS_EACH)))
        if not synchronous:  # the replica lacks what is accepted from here on
            until(lambda: ask(in_cluster(database, replica), published.format(2)))
            replica.stop()
        clients.allow_rounds(2 * ROUNDS_EACH)
        until(lambda: ask(database, published.format(ROUNDS_EACH + 1)))
        clients.server_is_up.clear()
        primary.stop()
        fleet.server.wait()
        fleet.standby.kill()  # it would wait for the same database
        for server in (fleet.server, fleet.standby):
            server.settings["state_url"] = in_cluster(database, replica)
        if not synchronous:
            replica.start()
        replica.promote()
        fleet.start_server()
        fleet.start_standby()
        clients.server_is_up.set()
        job.end(fleet, clients)
        log = fleet.server.log.read_text()
        state = SharedState(fleet.database, str(fleet.server.settings["blob_url"]))
        if synchronous:
            job.check(state)
        else:  # what the replica lacked is trained again, or lost
            assert job.update_log.surprises == []
            check_models(state, job.update_log, job.rounds)
        epochs = state.ask("SELECT value FROM meta WHERE name = 'epoch'")
        assert ("database_failed_over" in log, bool(epochs)) == (not synchronous, not synchronous)


def test_the_timeline_needs_no_rights_and_a_restart_does_not_change_it() -> None:
    cluster = postgres.Cluster(postgres.folder_for_anybody())
    try:
        database = cluster.new_database()
        name = make_url(database).database
        ask(database, "CREATE ROLE ann LOGIN")
        ask(database, f"ALTER DATABASE {name} OWNER TO ann")
        engine = create_engine(make_url(database).set(username="ann"))
        with engine.begin() as connection:
            connection.execute(text(TABLE))
        assert not may_have_lost_commits(engine), "nobody has led before"
        note_timeline(engine)
        engine.dispose()
        cluster.stop()
        cluster.start()
        assert not may_have_lost_commits(engine)
        assert ask(database, "SELECT timeline, synchronous FROM database_timeline") == [(1, False)]
        assert not is_synchronous(engine)
        engine.dispose()
    finally:
        cluster.stop()


def test_a_recovery_to_an_earlier_time_is_told_also_if_there_was_a_synchronous_standby() -> None:
    with ExitStack() as stack:
        primary = postgres.Cluster(postgres.folder_for_anybody())
        stack.callback(primary.stop)
        database = primary.new_database()
        ask(database, TABLE)
        ask(database, "INSERT INTO database_timeline VALUES (1, 1, true)")
        earlier = postgres.Cluster(postgres.folder_for_anybody(), source=primary)
        stack.callback(earlier.stop)
        there = in_cluster(database, earlier)
        for statement in ("SELECT pg_create_restore_point('monday')", "CREATE TABLE later ()"):
            ask(database, statement)
        until(lambda: ask(there, "SELECT 1 WHERE to_regclass('later') IS NOT NULL"))
        earlier.stop()
        (earlier.folder / "data" / "standby.signal").rename(earlier.folder / "data" / "recovery.signal")
        with (earlier.folder / "data" / "postgresql.auto.conf").open("a") as file:
            file.write(
                "restore_command = 'false'\nrecovery_target_name = 'monday'\nrecovery_target_action = 'promote'\n"
            )
        earlier.start()
        until(lambda: ask(there, "SELECT 1 WHERE NOT pg_is_in_recovery()"))
        assert not ask(there, "SELECT 1 WHERE to_regclass('later') IS NOT NULL")
        engine = create_engine(there)
        assert may_have_lost_commits(engine)
        note_timeline(engine)
        assert not may_have_lost_commits(engine)
        engine.dispose()
