"""The health checks of daemons tell the truth, also just before a daemon stops."""

import json
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from fedring.rpc.errors import status_of
from fedring.rpc.health import ALIVE
from tests import forks
from tests.fleets import Flctl, Fleet
from tests.system.health_watch import NOT_SERVING, SECONDS, SERVING, HealthWatch

PUBLIC = {f"fedring.v1.{name}" for name in ("TrainCmdService", "ModelBlobService", "ClientUpdateService")}
WAITING = ("--timeout", "60")


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Make a folder with a short path: that of a Unix socket has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="fl-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def started(folder: Path) -> Iterator[Fleet]:
    """Start a server and a client that both have a port for health checks."""
    settings = {"reflection": True, "health_listen": f"unix:{folder}/server"}
    client = {"health_listen": f"unix:{folder}/client"}
    with Fleet(folder, settings, [client]) as fleet:
        yield fleet


@pytest.fixture
def fleet(started: Fleet) -> Iterator[Fleet]:
    """Yield the running fleet, whose server the test may end: it is started again."""
    yield started
    if not started.server.running:
        started.start_server()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start a server with the default settings."""
    with Fleet(tmp_path_factory.mktemp("plain")) as fleet:
        yield fleet


def check(address: str, service: str = "") -> Any:
    """Return the present status of a service at a port."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        return stub.Check(request, timeout=SECONDS, wait_for_ready=True).status


def test_each_service_of_a_port_has_a_status(fleet: Fleet, folder: Path) -> None:
    for service in ("", ALIVE, *PUBLIC, "fedring.v1.RendezvousService"):
        assert check(fleet.listen, service) == SERVING
    assert check(fleet.control, "fedring.v1.ControlService") == SERVING
    for service in ("", ALIVE, *PUBLIC, "fedring.v1.ControlService"):
        assert check(f"unix:{folder}/server", service) == SERVING
    with pytest.raises(grpc.RpcError) as caught:
        check(fleet.listen, "fedring.v1.NoService")
    assert status_of(caught.value) is grpc.StatusCode.NOT_FOUND


def test_a_port_does_not_answer_for_the_services_of_another(fleet: Fleet) -> None:
    foreign = [(fleet.control, "fedring.v1.TrainCmdService"), (fleet.listen, "fedring.v1.ControlService")]
    for address, service in foreign:
        with pytest.raises(grpc.RpcError) as caught:
            check(address, service)
        assert status_of(caught.value) is grpc.StatusCode.NOT_FOUND


def test_a_server_reports_not_serving_before_it_stops(fleet: Fleet, folder: Path) -> None:
    watch = HealthWatch(f"unix:{folder}/server")
    watch.until(SERVING)
    fleet.server.send(signal.SIGTERM)
    watch.until(NOT_SERVING)
    watch.close()
    assert fleet.server.wait(SECONDS) == 0


def test_a_client_serves_while_it_is_in_session(fleet: Fleet, folder: Path) -> None:
    address = f"unix:{folder}/client"
    watch = HealthWatch(address)
    watch.until(SERVING)
    fleet.server.kill()
    watch.until(NOT_SERVING)
    assert check(address, ALIVE) == SERVING
    fleet.start_server()
    watch.until(SERVING)
    watch.close()


def test_flctl_health_has_a_table_json_and_an_exit_code(fleet: Fleet, folder: Path, flctl: Flctl) -> None:
    both = flctl("health", *WAITING, "--server", fleet.control, "--listen", fleet.listen)
    assert (both.returncode, both.stdout.count("serving")) == (0, 2)
    watch = HealthWatch(f"unix:{folder}/client")
    watch.until(SERVING)
    one = flctl("health", *WAITING, "--at", f"unix:{folder}/client", "--output", "json")
    assert one.returncode == 0
    assert json.loads(one.stdout)["ports"] == [
        {"port": "health", "address": f"unix:{folder}/client", "status": "serving"}
    ]
    fleet.server.kill()
    watch.until(NOT_SERVING)
    watch.close()
    assert flctl("health", *WAITING, "--at", f"unix:{folder}/client").returncode == 1
    assert flctl("health", "--at", f"unix:{folder}/nobody").returncode == 69


def test_reflection_lists_the_services_if_it_is_configured(fleet: Fleet, folder: Path) -> None:
    with grpc.insecure_channel(fleet.listen) as channel:
        assert set(ProtoReflectionDescriptorDatabase(channel).get_services()) > PUBLIC
    with grpc.insecure_channel(f"unix:{folder}/client") as channel:
        grpc.channel_ready_future(channel).result(SECONDS)
        with pytest.raises(grpc.RpcError) as caught:  # a client has no such key: its one service is health
            ProtoReflectionDescriptorDatabase(channel).get_services()
    assert status_of(caught.value) is grpc.StatusCode.UNIMPLEMENTED


def test_there_is_no_reflection_by_default(server: Fleet) -> None:
    with grpc.insecure_channel(server.listen) as channel, pytest.raises(grpc.RpcError) as caught:
        ProtoReflectionDescriptorDatabase(channel).get_services()
    assert status_of(caught.value) is grpc.StatusCode.UNIMPLEMENTED


def test_a_daemon_whose_health_port_is_taken_ends_with_78(server: Fleet, tmp_path: Path) -> None:
    for module in ("fedring.server.main", "fedring.client.main"):
        ports = ["listen=127.0.0.1:0", "control_listen=127.0.0.1:0"] if "server" in module else ["client_id=a"]
        keys = [f"health_listen={server.listen}", f"state_dir={tmp_path / module}", *ports]
        done = forks.run(module, *keys, timeout=SECONDS)
        assert (done.returncode, "health_listen" in done.stderr) == (78, True), done.stderr
