"""Whose a client id is: a stranger cannot have it while its client is here, and the client itself is let in at once."""

import os
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
from tests.fault.line import Line
from tests.fault.patience import SILENCE, FaultyFleet, Story, patiently
from tests.fleets import Control, Fleet, until_watching
from tests.forks import Daemon
from tests.pki import Pki
from tests.waiting import until

HERE = Path(__file__).parent
SECONDS = 60.0
TRUSTED = {"trusted": ["fedring", "user_trainers"]}
JOB = {"trainer": "user_trainers:gated", "evaluate": False, "deadline_seconds": 240}


@contextmanager
def another(fleet: Fleet, **settings: Any) -> Iterator[Daemon]:
    """One more fl-client with the id of the first, and a state folder of its own."""
    fixed = {"server": fleet.listen, "client_id": "client-0", "state_dir": str(fleet.directory / "another")}
    daemon = Daemon("another", "fedring.client.main", fixed | settings, fleet.directory / "another.log")
    daemon.start()
    try:
        yield daemon
    finally:
        daemon.kill()
        daemon.close()


def test_a_stranger_does_not_get_the_id_of_a_client_that_trains(tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    for path in (gate, tmp_path / "gate.began"):
        os.mkfifo(path)
    fleet = FaultyFleet(tmp_path, TRUSTED, [TRUSTED, TRUSTED], env=path_to(HERE))
    fleet.clients[1].env["FL_TEST_GATE"] = str(gate)
    with fleet, Control(fleet.control) as control:
        story = Story(fleet, control, {**JOB, "min_clients": 2})
        assert patiently(fleet, "client 1 at the gate", (tmp_path / "gate.began").read_text) == "began"
        with grpc.insecure_channel(fleet.listen) as channel:
            for secret in ("", "0" * 32):
                request = JoinRequest(client_id="client-1", protocol=PROTOCOL, resume_secret=secret)
                with pytest.raises(grpc.RpcError) as refused:
                    TrainCmdServiceStub(channel).Join(request, timeout=SECONDS)
                assert isinstance(refused.value, grpc.Call)
                assert refused.value.code() is grpc.StatusCode.ALREADY_EXISTS
                assert reason_of(refused.value) == "id_in_use"
                assert retry_seconds_of(refused.value) == 2 * SILENCE
        assert story.until("client_refused").client_id == "client-1"
        patiently(fleet, "the opening of the gate", lambda: gate.write_text("go on"))
        assert story.until("round_published").state.delivered == 2
        story.until("job_ended")
        assert control.job(story.job_id).state == "completed"
        assert control.status().refused["id_in_use"] == 2
        assert all(client.running for client in fleet.clients)


@pytest.mark.parametrize("how", ["cut", "killed"])
def test_a_client_whose_old_connection_is_half_open_comes_back_without_waiting(tmp_path: Path, how: str) -> None:
    fleet = Fleet(tmp_path, {}, [{}])  # the old session would live for another minute
    line = Line(fleet.server.settings["listen"])
    fleet.clients[0].flags = ["--server", line.address]
    with fleet, Control(fleet.control) as control, line:
        until_watching(control, 1)
        events = control.events()
        if how == "cut":
            line.cut()
        else:
            fleet.restart(0)
        news = (event for event in events if event.kind.startswith("client_"))
        assert patiently(fleet, "news of the client", lambda: next(news)).kind == "client_joined"
        assert control.status().refused["id_in_use"] == 0
        events.cancel()


def test_a_second_client_of_the_same_id_gives_up_and_the_first_goes_on(tmp_path: Path) -> None:
    keys = {**TRUSTED, "heartbeat_seconds": 0.3, "lost_after_seconds": 3.0}
    with Fleet(tmp_path, keys, [TRUSTED], env=path_to(HERE)) as fleet, Control(fleet.control) as control:
        until_watching(control, 1)
        events = control.events()
        with another(fleet) as second:
            assert second.wait(SECONDS) == Exit.CONFIG
            assert second.log.read_text().count("has another session of 'client-0'; trying for 6 s") == 1
            assert "give each client an id of its own" in second.tail()
        job_id = control.start_job({**JOB, "min_clients": 1, "rounds": 1}).job_id
        told = [event.kind for event in control.follow_job(job_id, events)]
        assert [kind for kind in told if kind.startswith("client_")] == ["client_refused"]
        assert control.job(job_id).state == "completed"
        assert fleet.clients[0].running


def test_an_id_whose_client_never_watches_is_free_again_after_a_while(tmp_path: Path) -> None:
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


def test_a_proven_client_takes_over_and_the_older_process_ends(tmp_path: Path) -> None:
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
        with another(fleet, **tls) as second:
            assert fleet.clients[0].wait(SECONDS) == Exit.CONFIG
            assert "another process has joined as 'client-0'" in fleet.clients[0].tail()
            news = (event for event in events if event.kind.startswith("client_"))
            assert patiently(fleet, "news of the client", lambda: next(news)).kind == "client_joined"
            assert second.running
        events.cancel()


def test_a_secret_is_private_and_outlives_both_processes(tmp_path: Path) -> None:
    with Fleet(tmp_path, {}, [{}]) as fleet, Control(fleet.control) as control:
        file = tmp_path / "state" / "client-0" / "resume_secret"
        until_watching(control, 1)
        secret = file.read_text()
        assert RESUME_SECRET.fullmatch(secret.strip())
        events = control.events()
        fleet.restart(0)
        patiently(fleet, "the client", lambda: next(event for event in events if event.kind == "client_joined"))
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
