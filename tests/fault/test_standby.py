"""A server that waits: everybody sees who leads and who waits, and what cannot work is refused with a sentence."""

import json
import re
import urllib.request
from pathlib import Path
from typing import Any

import grpc
import obstore
import pytest
from grpc_health.v1.health_pb2 import HealthCheckRequest, HealthCheckResponse
from grpc_health.v1.health_pb2_grpc import HealthStub
from sqlalchemy import NullPool, create_engine, text

from fedring.client import connect
from fedring.control.failure import Failure
from fedring.ctl.main import main
from fedring.daemon.exits import Exit
from fedring.rpc.contract import PROTOCOL
from fedring.rpc.errors import leader_in, reason_of, status_of
from fedring.rpc.probe import Listener, listener_at
from fedring.server.state.shared.object_blobs import open_objects
from fedring.v1.federation_pb2 import JoinRequest
from fedring.v1.federation_pb2_grpc import TrainCmdServiceStub
from tests import postgres
from tests.fault.faulty_fleet import SECONDS, StartedJob, wait_for
from tests.fault.two_servers import TwoServers, terms
from tests.fleets import Control, until_watching
from tests.metrics_page import Page
from tests.ports import free_port
from tests.s3 import KEYS, s3_server
from tests.waiting import until

JOB: dict[str, Any] = {"rounds": 6, "min_clients": 2, "deadline_seconds": 240, "subset_size": 20}


@pytest.fixture
def database() -> str:
    return postgres.shared().new_database()


def test_operators_see_who_leads_and_who_waits(
    tmp_path: Path, database: str, capsys: pytest.CaptureFixture[str]
) -> None:
    ports = {"metrics_listen": "127.0.0.1:0"}
    with TwoServers(tmp_path, database, settings=ports, apart=True) as fleet:
        names = [fleet.listen, f"standby:{str(fleet.standby.settings['listen']).rpartition(':')[2]}"]
        with Control(fleet.control) as control:
            until(lambda: list(control.status().leadership.standbys) == names[1:])
            lead = control.status().leadership
        assert (lead.leader, lead.control, lead.here) == (names[0], fleet.control, True)
        assert lead.term == terms(database)
        assert main(["status", "--server", fleet.control]) == Exit.OK
        assert f"{names[0]}, since {lead.since}, term {lead.term}; waiting: {names[1]}" in capsys.readouterr().out
        page = Page(fleet.ready["metrics"])
        assert (page("fl_server_leads"), page("fl_server_standbys")) == (1, 1)
        assert page("fl_server_leader_term") == lead.term
        fleet.server.kill()
        fleet.until_the_standby_leads()
        with Control(fleet.control) as control:
            later = control.status().leadership
        assert (later.leader, list(later.standbys)) == (names[1], [])
        assert later.term > lead.term
        assert later.since > lead.since


def test_two_servers_of_one_name_are_refused(tmp_path: Path, database: str) -> None:
    with TwoServers(tmp_path, database) as fleet:
        fleet.standby.kill()
        del fleet.standby.settings["name"]
        fleet.standby.start()
        assert fleet.standby.wait() == Exit.CONFIG
        said = f"another server that is called {fleet.listen} leads: give each a name of its own (name)"
        assert fleet.standby.log.read_text().splitlines()[-1] == f"fl-server: {said}"


def test_a_standby_answers_what_can_be_read_and_names_the_leader_for_the_rest(tmp_path: Path, database: str) -> None:
    ports = {"web_port": free_port(), "metrics_listen": f"127.0.0.1:{free_port()}"}
    with TwoServers(tmp_path, database, [{}, {}], apart=True) as fleet:
        fleet.standby.kill()
        fleet.standby.settings |= ports
        fleet.standby.start()
        address, public = str(fleet.standby.settings["control_listen"]), str(fleet.standby.settings["listen"])
        with Control(fleet.control) as leader, Control(address) as standby:
            until_watching(leader, 2)
            wait_for(fleet, "the standby", lambda: standby.status(wait_seconds=SECONDS))
            news = standby.events()
            job = StartedJob(fleet, leader, {**JOB, "rounds": 2})
            job.rest()
            for event in news:
                if event.kind == "job_ended":
                    break
            until(lambda: standby.status().model_version == leader.status().model_version > 0)
            for read in (Control.jobs, Control.rounds, Control.models):
                assert read(standby) == read(leader)
            assert {(each.client_id, each.state, each.updates) for each in standby.clients()} == {
                (each.client_id, "unknown", each.updates) for each in leader.clients()
            }
            now = standby.status()
            assert (now.leadership.leader, now.leadership.here) == (fleet.listen, False)
            assert now.not_serving == f"it waits as a standby: {fleet.listen} leads"
            with pytest.raises(Failure, match=f"waits as a standby: give --server {fleet.control}") as refused:
                standby.start_job(JOB)
            assert refused.value.exit_code == Exit.UNAVAILABLE
            assert len(leader.jobs()) == 1
        with grpc.insecure_channel(public) as channel:
            with pytest.raises(grpc.RpcError) as error:
                TrainCmdServiceStub(channel).Join(JoinRequest(client_id="x", protocol=PROTOCOL))
            assert (status_of(error.value), reason_of(error.value)) == (grpc.StatusCode.UNAVAILABLE, "standby")
            assert leader_in(error.value) == fleet.listen
            stub: Any = HealthStub(channel)
            assert stub.Check(HealthCheckRequest()).status == HealthCheckResponse.NOT_SERVING
        with urllib.request.urlopen(f"http://127.0.0.1:{ports['web_port']}/api/state", timeout=SECONDS) as answer:
            page = json.load(answer)
        assert page["server"]["leadership"]["leader"] == fleet.listen
        assert [each["state"] for each in page["jobs"]] == ["completed"]
        assert Page(str(ports["metrics_listen"]))("fl_server_leads") == 0
        fleet.server.kill()
        fleet.until_the_standby_leads()
        with Control(fleet.control) as control:
            until_watching(control, 2)
            assert control.status().leadership.here
            assert control.start_job({**JOB, "rounds": 1}).job_id == 2


def test_a_client_goes_on_from_a_standby_to_the_leader(tmp_path: Path, database: str) -> None:
    with TwoServers(tmp_path, database, apart=True) as fleet:
        standby = str(fleet.standby.settings["listen"])
        until(lambda: listener_at(standby) is Listener.PLAINTEXT)
        others = [f"127.0.0.1:{free_port()}", fleet.listen]
        with (
            connect(server=standby, other_servers=others, client_id="a", state_dir=tmp_path / "a"),
            Control(fleet.control) as control,
        ):
            until_watching(control, 1)


def test_a_standby_answers_nothing_where_the_leader_has_its_addresses(tmp_path: Path, database: str) -> None:
    with TwoServers(tmp_path, database) as fleet:
        until(lambda: "answers nothing while it waits" in fleet.standby.log.read_text())
        fleet.server.kill()
        fleet.until_the_standby_leads()


def refused(fleet: TwoServers, **settings: object) -> str:
    """Return the sentence with which the standby refuses to start with other settings."""
    fleet.standby.kill()
    fleet.standby.settings |= settings
    fleet.standby.start()
    assert fleet.standby.wait() == Exit.CONFIG
    return fleet.standby.log.read_text().splitlines()[-1].removeprefix("fl-server: ")


def changed(database: str, statement: str) -> None:
    engine = create_engine(database, poolclass=NullPool)
    with engine.begin() as connection:
        connection.execute(text(statement))


def test_a_role_that_may_not_end_the_leaders_session_is_refused(tmp_path: Path, database: str) -> None:
    changed(database, "CREATE ROLE weak LOGIN")
    weak = database.replace("fedring@", "weak@")
    with TwoServers(tmp_path, database) as fleet:
        said = refused(fleet, state_url=weak)
    changed(database, "DROP ROLE weak")
    assert said == (
        "the role weak may not end the session of fedring, whose server leads: give both servers one role in "
        "state_url, or grant pg_signal_backend to weak"
    )


@pytest.mark.parametrize("what", ["a newer schema", "another run's objects"])
def test_what_belongs_to_others_is_refused_before_anything_is_written(tmp_path: Path, database: str, what: str) -> None:
    with TwoServers(tmp_path, database) as fleet:
        term = terms(database)
        (other := tmp_path / "other").mkdir()
        (other / "state_id").write_text("0" * 32)
        if what == "a newer schema":
            fleet.standby.kill()
            fleet.server.kill()
            changed(database, "UPDATE meta SET value = '999' WHERE name = 'schema_version'")
            assert "the state was written by a newer version: schema 999" in refused(fleet)
        else:
            assert "belong to different states" in refused(fleet, blob_url=other.as_uri())
    assert terms(database) == term
    assert [path.name for path in other.iterdir()] == ["state_id"]


def test_a_bucket_that_may_not_be_written_is_refused(
    tmp_path: Path, database: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "s3").mkdir()
    rights = {"reader": ["Read", "List"], KEYS["AWS_ACCESS_KEY_ID"]: ["Admin", "Read", "List", "Write"]}
    identities = [
        {
            "name": name,
            "actions": actions,
            "credentials": [{"accessKey": name, "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}],
        }
        for name, actions in rights.items()
    ]
    (tmp_path / "identities.json").write_text(json.dumps({"identities": identities}))
    with s3_server(tmp_path / "s3", "models", f"-s3.config={tmp_path / 'identities.json'}") as env:
        fleet = TwoServers(tmp_path, database, settings={"blob_url": "s3://models/fedring"})
        fleet.server.env |= env | {"AWS_ACCESS_KEY_ID": "reader"}
        fleet.server.log.parent.mkdir(exist_ok=True)
        fleet.server.start()
        assert fleet.server.wait() == Exit.CONFIG
        said = fleet.server.log.read_text().splitlines()[-1]
        assert said.startswith("fl-server: blob_url s3://models/fedring may not be written with these keys: ")
        fleet.server.env |= env
        fleet.server.start()
        fleet.server.first_line(SECONDS)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        kept = [meta["path"] for batch in obstore.list(open_objects("s3://models/fedring")) for meta in batch]
        fleet.stop()
    assert "state_id" in kept
    assert not [path for path in kept if re.fullmatch("probe-[0-9a-f]{32}", path)]
