"""Two servers of one shared state: one leads, and the other takes over, whatever happens to the first."""

import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from sqlalchemy import NullPool, create_engine, text

from fedring.control.failure import Failure
from fedring.daemon.durable import text_after_digest
from fedring.daemon.exits import Exit
from fedring.rpc.health import ALIVE
from fedring.rpc.leader_term import NewestTerm, refusing_old_terms_sync
from fedring.v1 import control_pb2
from tests import postgres
from tests.fault.counted_updates import SharedState
from tests.fault.faulty_fleet import SECONDS, StartedJob, wait_for
from tests.fault.two_servers import TwoServers, terms
from tests.fleets import Control, until_watching
from tests.waiting import until

JOB: dict[str, Any] = {"rounds": 6, "min_clients": 2, "deadline_seconds": 240, "subset_size": 20}


@pytest.fixture
def database() -> str:
    return postgres.shared().new_database()


def ended(control: Control, job_id: int) -> control_pb2.Job:
    for _ in control.follow_job(job_id):
        pass
    return control.job(job_id)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP], ids=lambda number: number.name)
def test_the_standby_takes_over_and_the_job_goes_on(tmp_path: Path, database: str, number: signal.Signals) -> None:
    frozen = number == signal.SIGSTOP  # it keeps its ports
    with TwoServers(tmp_path, database, [{}, {}], apart=frozen) as fleet:
        with Control(fleet.control) as control:
            until_watching(control, 2)
            started = StartedJob(fleet, control, JOB)
            started.until("round_published")
        fleet.server.send(number)
        fleet.until_the_standby_leads()
        if frozen:
            fleet.server.send(signal.SIGCONT)
            assert fleet.server.wait() == Exit.TRY_AGAIN
        with Control(fleet.control) as control:
            job = wait_for(fleet, "the end of the job", lambda: ended(control, started.job_id))
            assert (job.state, job.rounds_done) == ("completed", 6)


def test_clients_ask_the_other_server_at_its_own_address(tmp_path: Path, database: str) -> None:
    with TwoServers(tmp_path, database, [{}, {}], apart=True) as fleet:
        with Control(fleet.control) as control:
            until_watching(control, 2)
            started = StartedJob(fleet, control, JOB)
            started.until("round_published")
        fleet.server.kill()
        fleet.until_the_standby_leads()
        with Control(fleet.control) as control:
            job = wait_for(fleet, "the end of the job", lambda: ended(control, started.job_id))
    assert (job.state, job.rounds_done) == ("completed", 6)


def test_what_a_leader_has_said_is_refused_once_another_one_leads(tmp_path: Path, database: str) -> None:
    newest = NewestTerm()

    def connected(address: str) -> Control:
        return Control(address, channel=refusing_old_terms_sync(grpc.insecure_channel(address), newest))

    with TwoServers(tmp_path, database, [{}, {}], apart=True) as fleet, connected(fleet.control) as replaced:
        until_watching(replaced, 2)
        unread = replaced.events()
        started = StartedJob(fleet, replaced, JOB)
        for _ in range(2):  # with the second one, the first has also come over the other stream
            started.until("round_published")
        fleet.server.send(signal.SIGSTOP)
        fleet.until_the_standby_leads()
        with connected(fleet.control) as control:
            control.status()
            with pytest.raises(Failure, match="another one has led since"):
                next(iter(unread))
            fleet.server.send(signal.SIGCONT)
            assert fleet.server.wait() == Exit.TRY_AGAIN
            job = wait_for(fleet, "the end of the job", lambda: ended(control, started.job_id))
        files = [Path(str(client.settings["state_dir"])) / "leader_term" for client in fleet.clients]
    assert (job.state, job.rounds_done) == ("completed", 6)
    kept = [text_after_digest(path.read_bytes()).decode() for path in files]
    assert {text.partition("/")[0] for text in kept} == {str(terms(database))}


@pytest.mark.parametrize("address", ["sqlite:///x", "postgresql://ann:secret@db/fl", "postgresql://nowhere.invalid/fl"])
def test_a_database_that_cannot_be_used_is_refused_with_a_sentence(tmp_path: Path, address: str) -> None:
    fleet = TwoServers(tmp_path, address)
    fleet.server.log.parent.mkdir()
    fleet.server.start()
    assert fleet.server.wait() == (Exit.TRY_AGAIN if "nowhere" in address else Exit.CONFIG)
    said = fleet.server.log.read_text().splitlines()[-1]
    assert said.startswith("fl-server: ")
    assert "secret" not in said
    fleet.stop()


def test_a_bucket_of_another_state_is_refused(tmp_path: Path, database: str) -> None:
    with TwoServers(tmp_path, database):
        pass
    objects = tmp_path / "objects"
    (objects / "state_id").write_text("0" * 32)
    fleet = TwoServers(tmp_path, database)
    fleet.server.start()
    assert fleet.server.wait() == Exit.CONFIG
    assert "belong to different states" in fleet.server.log.read_text()
    (objects / "state_id").unlink()
    fleet.server.start()
    fleet.server.first_line(SECONDS)
    fleet.stop()


@pytest.mark.parametrize("mode", ["fast", "immediate"])
def test_a_leader_whose_database_restarts_ends_and_the_standby_waits_for_it_and_leads(
    tmp_path: Path, mode: str
) -> None:
    cluster = postgres.Cluster(postgres.folder_for_anybody())
    try:
        with TwoServers(tmp_path, cluster.new_database(), apart=True) as fleet:
            log = fleet.standby.log
            until(lambda: "answers what can be read" in log.read_text())
            address = str(fleet.standby.settings["control_listen"])
            with Control(address) as standby, grpc.insecure_channel(address) as channel:
                assert standby.status().not_serving == f"it waits as a standby: {fleet.listen} leads"
                cluster.stop(mode)
                assert fleet.server.wait() == Exit.TRY_AGAIN
                until(lambda: "goes on waiting: the database cannot be used now" in log.read_text())
                with pytest.raises(Failure, match="the shared state cannot be read now"):
                    standby.status()
                stub: Any = HealthStub(channel)
                assert stub.Check(HealthCheckRequest()).status == HealthCheckResponse.NOT_SERVING
                assert stub.Check(HealthCheckRequest(service=ALIVE)).status == HealthCheckResponse.SERVING
                cluster.start()
            fleet.until_the_standby_leads()
            assert log.read_text().count("goes on waiting") == 1
            assert log.read_text().count("the database can be used again") == 1
    finally:
        cluster.stop()


def test_a_standby_whose_sessions_are_ended_goes_on_waiting(tmp_path: Path, database: str) -> None:
    with TwoServers(tmp_path, database, apart=True) as fleet:
        log = fleet.standby.log
        until(lambda: "answers what can be read" in log.read_text())
        engine = create_engine(database, poolclass=NullPool)
        with engine.begin() as connection:
            connection.execute(
                text(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = current_database() "
                    "AND pid <> pg_backend_pid() AND pid NOT IN (SELECT pid FROM leader) AND state = 'idle'"
                )
            )
        until(lambda: "the database can be used again" in log.read_text())
        with Control(str(fleet.standby.settings["control_listen"])) as standby:

            def waits() -> bool:
                with suppress(Failure):  # whoever is the first to read over the ended session
                    return standby.status().not_serving == f"it waits as a standby: {fleet.listen} leads"
                return False

            until(waits)
        with Control(fleet.control) as control:
            until(lambda: len(control.status().leadership.standbys) == 1)


def test_a_leader_that_another_one_has_replaced_writes_nothing_more(tmp_path: Path, database: str) -> None:
    with TwoServers(tmp_path, database) as fleet:
        fleet.standby.kill()
        engine = create_engine(database, poolclass=NullPool)
        with engine.begin() as connection:  # as a leader would whose session a proxy has opened anew in silence
            connection.execute(text("UPDATE leader SET term = term + 1"))
        assert fleet.server.wait() == Exit.TRY_AGAIN
        assert "another server leads" in fleet.server.log.read_text()


def test_a_round_whose_noise_the_other_server_has_drawn_is_abandoned(tmp_path: Path, database: str) -> None:
    dp = {"noise_multiplier": 1.0, "clip": 0.5, "adaptive": False}
    fleet = TwoServers(tmp_path, database, [{}, {}])
    fleet.server.env["FL_CRASH_AT"] = "before_publish_commit"  # here a noised model is sealed that no row names yet
    with fleet:
        with Control(fleet.control) as control:
            private = {"rounds": 2, "weights": "uniform", "evaluate": False, "dp": dp}
            started, first_term = StartedJob(fleet, control, {**JOB, **private}), terms(database)
            wait_for(fleet, "the crash", fleet.server.wait)
        fleet.until_the_standby_leads()
        with Control(fleet.control) as control:
            job = wait_for(fleet, "the end of the job", lambda: ended(control, started.job_id))
            rounds = control.rounds()
    assert (job.state, job.rounds_done) == ("completed", 1)
    assert [(row.round, row.reason) for row in rounds if row.reason] == [(1, "restored")]
    first = {path.name for path in (tmp_path / "objects" / "blobs" / str(first_term)).iterdir()}
    named = {name for (name,) in SharedState(database, (tmp_path / "objects").as_uri()).ask("SELECT blob FROM models")}
    assert len(first & named) == 1  # the model that the job began with


def test_a_round_to_which_the_clients_add_the_noise_goes_on_at_the_other_server(tmp_path: Path, database: str) -> None:
    dp = {"noise_multiplier": 1.0, "clip": 0.5, "adaptive": False, "noise_by": "clients"}
    fleet = TwoServers(tmp_path, database, [{}, {}, {}])
    fleet.server.env["FL_CRASH_AT"] = "after_row_commit"
    with fleet:
        with Control(fleet.control) as control:
            until_watching(control, 3)
            private = {"weights": "uniform", "evaluate": False, "dp": dp, "secure_aggregation": {}, "start": "fresh"}
            least = {"min_clients": 3, "min_clients_to_aggregate": 3, "rounds": 1}
            job_id = control.start_job({**JOB, **private, **least}).job_id
            wait_for(fleet, "the crash", fleet.server.wait)
        fleet.until_the_standby_leads()
        with Control(fleet.control) as control:
            job = wait_for(fleet, "the end of the job", lambda: ended(control, job_id))
            reasons = [row.reason for row in control.rounds()]
    assert (job.state, job.reason, reasons) == ("completed", "", [""])
