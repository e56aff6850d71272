"""Who may use a client id: nobody else while its client is in session, and the client itself at once."""

import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest

from fedring.daemon.exits import Exit
from fedring.rpc.channel import open_sync_channel
from fedring.rpc.contract import PROTOCOL, RESUME_SECRET
from fedring.rpc.errors import reason_of, retry_seconds_of
from fedring.v1.federation_pb2 import JoinRequest
from fedring.v1.federation_pb2_grpc import TrainCmdServiceStub
from tests.conftest import path_to
from tests.fault.faulty_fleet import LOST_AFTER, FaultyFleet, StartedJob, wait_for
from tests.fault.gate import Gate
from tests.fleets import Control, Fleet, until_watching
from tests.forks import Daemon
from tests.pki import Pki
from tests.proxy import Proxy
from tests.waiting import until

HERE = Path(__file__).parent
SECONDS = 60.0
TRUSTED = {"trusted": ["fedring", "user_trainers"]}
JOB = {"trainer": "user_trainers:gated", "evaluate": False, "deadline_seconds": 240}


@contextmanager
def second_client(fleet: Fleet, **settings: Any) -> Iterator[Daemon]:
    """Start a second fl-client with the id of the first one, and with its own state folder."""
    fixed = {"server": fleet.listen, "client_id": "client-0", "state_dir": str(fleet.directory / "another")}
    daemon = Daemon("another", "fedring.client.main", fixed | settings, fleet.directory / "another.log")
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.kill()
        daemon.close()


def test_nobody_else_gets_the_id_of_a_client_that_trains(tmp_path: Path) -> None:
    fleet, gate = FaultyFleet(tmp_path, TRUSTED, [TRUSTED, TRUSTED], env=path_to(HERE)), Gate(tmp_path)
    gate.close_for(fleet.clients[1])
    with fleet, Control(fleet.control) as control:
        started = StartedJob(fleet, control, {**JOB, "min_clients": 2})
        gate.wait(fleet)
        with grpc.insecure_channel(fleet.listen) as channel:
            for secret in ("", "0" * 32):
                request = JoinRequest(client_id="client-1", protocol=PROTOCOL, resume_secret=secret)
                with pytest.raises(grpc.RpcError) as refused:
                    TrainCmdServiceStub(channel).Join(request, timeout=SECONDS)
                assert isinstance(refused.value, grpc.Call)
                assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
                assert reason_of(refused.value) == "id_in_use"
                assert retry_seconds_of(refused.value) == 2 * LOST_AFTER
        assert started.until("client_refused").client_id == "client-1"
        gate.let_through(fleet)
        assert started.until("round_published").state.delivered == 2
        started.until("job_ended")
        assert control.job(started.job_id).state == "completed"
        assert control.status().refused["id_in_use"] == 2
        assert all(client.running for client in fleet.clients)


@pytest.mark.parametrize("how", ["cut", "killed"])
def test_a_client_whose_old_connection_is_half_open_rejoins_without_waiting(tmp_path: Path, how: str) -> None:
    fleet = Fleet(tmp_path, {}, [{}])  # the server would keep the old session for another minute
    proxy = Proxy(fleet.server.settings["listen"], half_open=True)
    fleet.clients[0].flags = ["--server", proxy.address]
    with fleet, Control(fleet.control) as control, proxy:
        until_watching(control, 1)
        events = control.events()
        if how == "cut":
            proxy.cut()
        else:
            fleet.restart(0)
        news = (event for event in events if event.kind.startswith("client_"))
        assert wait_for(fleet, "news of the client", lambda: next(news)).kind == "client_joined"
        assert control.status().refused["id_in_use"] == 0
        events.cancel()


def test_a_second_client_with_the_same_id_gives_up_and_the_first_goes_on(tmp_path: Path) -> None:
    keys = {**TRUSTED, "heartbeat_seconds": 0.3, "lost_after_seconds": 3.0}
    with Fleet(tmp_path, keys, [TRUSTED], env=path_to(HERE)) as fleet, Control(fleet.control) as control:
        until_watching(control, 1)
        events = control.events()
        with second_client(fleet) as second:
            assert second.wait(SECONDS) == Exit.CONFIG
            assert second.log.read_text().count("has another session of 'client-0'; trying for 6 s") == 1
            assert "give each client an id of its own" in second.tail()
        job_id = control.start_job({**JOB, "min_clients": 1, "rounds": 1}).job_id
        kinds = [event.kind for event in control.follow_job(job_id, events)]
        assert [kind for kind in kinds if kind.startswith("client_")] == ["client_refused"]
        assert control.job(job_id).state == "completed"
        assert fleet.clients[0].running


def test_the_id_of_a_client_that_never_watches_becomes_free_again(tmp_path: Path) -> None:
    keys = {"heartbeat_seconds": 0.2, "lost_after_seconds": 1.0}
    with Fleet(tmp_path, keys) as fleet, grpc.insecure_channel(fleet.listen) as channel:
        commands, request = TrainCmdServiceStub(channel), JoinRequest(client_id="a", protocol=PROTOCOL)
        first = commands.Join(request).session_id
        refusals: list[str] = []

        def joined() -> str:
            try:
                return commands.Join(request).session_id
            except grpc.RpcError as error:
                refusals.append(reason_of(error))
                return ""

        until(lambda: joined() not in ("", first))
        assert set(refusals) <= {"id_in_use"}


def test_a_client_with_a_certificate_takes_its_session_over_and_the_older_process_ends(tmp_path: Path) -> None:
    pki = Pki(tmp_path / "pki")
    pki.issue("client-0")
    tls = {"tls": pki.table("client-0")}
    with (
        Fleet(tmp_path, {"tls": pki.table("server")}, [tls]) as fleet,
        open_sync_channel(fleet.control, pki.tls("operator")) as channel,
        Control(fleet.control, channel=channel) as control,
    ):
        until_watching(control, 1)
        events = control.events()
        with second_client(fleet, **tls) as second:
            assert fleet.clients[0].wait(SECONDS) == Exit.CONFIG
            assert "another process has joined as 'client-0'" in fleet.clients[0].tail()
            news = (event for event in events if event.kind.startswith("client_"))
            assert wait_for(fleet, "news of the client", lambda: next(news)).kind == "client_joined"
            assert second.running
        events.cancel()


def test_the_resume_secret_is_private_and_survives_restarts_of_both_processes(tmp_path: Path) -> None:
    with Fleet(tmp_path, {}, [{}]) as fleet, Control(fleet.control) as control:
        file = tmp_path / "state" / "client-0" / "resume_secret"
        until_watching(control, 1)
        secret = file.read_text()
        assert RESUME_SECRET.fullmatch(secret.strip())
        events = control.events()
        fleet.restart(0)
        wait_for(fleet, "the client", lambda: next(event for event in events if event.kind == "client_joined"))
        events.cancel()
        fleet.restart_server()
        until_watching(control, 1)
        assert file.read_text() == secret
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        assert control.status().refused["id_in_use"] == 0
        state = (tmp_path / "state" / "server").rglob("*")
        assert not any(secret.strip().encode() in path.read_bytes() for path in state if path.is_file())
        logs = (tmp_path / "logs").iterdir()
        assert not any(secret.strip() in path.read_text() for path in logs)
