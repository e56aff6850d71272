"""Who asks a daemon whether it serves is told the truth, also just before it stops."""

import json
import signal
import subprocess
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
from tests.fleets import Fleet

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
PUBLIC = {f"fedring.v1.{name}" for name in ("TrainCmdService", "ModelBlobService", "ClientUpdateService")}
SECONDS = 120.0
WAITING = ("--timeout", "60")


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short one: the path of a Unix socket has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="fl-") as folder:
        yield Path(folder)


@pytest.fixture
def fleet(folder: Path) -> Iterator[Fleet]:
    """A server and a client that both listen for health checks."""
    settings = {"reflection": True, "health_listen": f"unix:{folder}/server"}
    client = {"reflection": True, "health_listen": f"unix:{folder}/client"}
    with Fleet(folder, settings, [client]) as fleet:
        yield fleet


def check(address: str, service: str = "") -> Any:
    """What the port says of the service now."""
    with grpc.insecure_channel(address) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest(service=service)
        return stub.Check(request, timeout=SECONDS, wait_for_ready=True).status


class Watched:
    """A port's statuses, as they come."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        self._call = stub.Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS, wait_for_ready=True)

    def until(self, status: int) -> None:
        """The port says so."""
        assert any(reply.status == status for reply in self._call)

    def close(self) -> None:
        self._call.cancel()
        self._channel.close()


def flctl(*arguments: str) -> subprocess.CompletedProcess[str]:
    return forks.run("fedring.ctl.main", *arguments, timeout=SECONDS)


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
    strangers = [(fleet.control, "fedring.v1.TrainCmdService"), (fleet.listen, "fedring.v1.ControlService")]
    for address, service in strangers:
        with pytest.raises(grpc.RpcError) as caught:
            check(address, service)
        assert status_of(caught.value) is grpc.StatusCode.NOT_FOUND


def test_the_server_says_that_it_stops_serving_before_it_stops(fleet: Fleet, folder: Path) -> None:
    watched = Watched(f"unix:{folder}/server")
    watched.until(SERVING)
    fleet.server.send(signal.SIGTERM)
    watched.until(NOT_SERVING)
    watched.close()
    assert fleet.server.wait(SECONDS) == 0


def test_a_client_serves_while_it_is_in_session(fleet: Fleet, folder: Path) -> None:
    address = f"unix:{folder}/client"
    watched = Watched(address)
    watched.until(SERVING)
    fleet.server.kill()
    watched.until(NOT_SERVING)
    assert check(address, ALIVE) == SERVING
    fleet.start_server()
    watched.until(SERVING)
    watched.close()


def test_flctl_tells_people_programs_and_orchestrators(fleet: Fleet, folder: Path) -> None:
    both = flctl("health", *WAITING, "--server", fleet.control, "--listen", fleet.listen)
    assert (both.returncode, both.stdout.count("serving")) == (0, 2)
    watched = Watched(f"unix:{folder}/client")
    watched.until(SERVING)
    one = flctl("health", *WAITING, "--at", f"unix:{folder}/client", "--output", "json")
    assert one.returncode == 0
    assert json.loads(one.stdout)["ports"] == [
        {"port": "health", "address": f"unix:{folder}/client", "status": "serving"}
    ]
    fleet.server.kill()
    watched.until(NOT_SERVING)
    watched.close()
    assert flctl("health", *WAITING, "--at", f"unix:{folder}/client").returncode == 1
    assert flctl("health", "--at", f"unix:{folder}/nobody").returncode == 69


def test_reflection_lists_the_services_where_it_is_wanted(fleet: Fleet, folder: Path) -> None:
    with grpc.insecure_channel(fleet.listen) as channel:
        assert set(ProtoReflectionDescriptorDatabase(channel).get_services()) > PUBLIC
    with grpc.insecure_channel(f"unix:{folder}/client") as channel:
        grpc.channel_ready_future(channel).result(SECONDS)
        assert set(ProtoReflectionDescriptorDatabase(channel).get_services()) == {
            "grpc.health.v1.Health",
            "grpc.reflection.v1alpha.ServerReflection",
        }


def test_there_is_no_reflection_unless_it_is_wanted(server: Fleet) -> None:
    with grpc.insecure_channel(server.listen) as channel, pytest.raises(grpc.RpcError) as caught:
        ProtoReflectionDescriptorDatabase(channel).get_services()
    assert status_of(caught.value) is grpc.StatusCode.UNIMPLEMENTED


def test_a_health_port_that_is_taken_ends_the_daemon_with_78(server: Fleet, tmp_path: Path) -> None:
    for module in ("fedring.server.main", "fedring.client.main"):
        ports = ["listen=127.0.0.1:0", "control_listen=127.0.0.1:0"] if "server" in module else ["client_id=a"]
        keys = [f"health_listen={server.listen}", f"state_dir={tmp_path / module}", *ports]
        done = forks.run(module, *keys, timeout=SECONDS)
        assert (done.returncode, "health_listen" in done.stderr) == (78, True), done.stderr
