"""Who is here: whoever says something, in whatever call, and nobody else."""

import queue
from collections.abc import Iterator
from contextlib import suppress

import grpc
import pytest

from fedring.rpc.contract import PROTOCOL
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import federation_pb2_grpc as rpc
from tests.fleets import Control, Fleet

BEATS = {"heartbeat_seconds": 0.5, "lost_after_seconds": 6.0}
MANY = 16
"""Heartbeats that take longer than a silent client is waited for."""
MOST = 2 * 12 + 2
"""Heartbeats until a client is lost that begins to be silent as late as it may."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """One fl-server that loses patience soon."""
    with Fleet(tmp_path_factory.mktemp("liveness"), BEATS) as fleet:
        yield fleet


class Quiet:
    """A client that watches, and says so once; what it says later goes through `calls`."""

    def __init__(self, address: str, client_id: str) -> None:
        channel = grpc.insecure_channel(address)
        commands = rpc.TrainCmdServiceStub(channel)
        joined = commands.Join(pb.JoinRequest(client_id=client_id, protocol=PROTOCOL))
        said: queue.Queue[pb.WatchRequest] = queue.Queue()
        said.put(pb.WatchRequest(matched=True))
        self._metadata = (("fl-session", joined.session_id),)
        self.events: Iterator[pb.ServerEvent] = commands.Watch(iter(said.get, None), metadata=self._metadata)
        self._models = rpc.ModelBlobServiceStub(channel)

    def speak(self) -> None:
        """Make a call of the session, whatever its answer."""
        with suppress(grpc.RpcError):
            list(self._models.FetchModel(pb.FetchModelRequest(version=777), metadata=self._metadata))


def lost(control: Control, client_id: str) -> bool:
    """Whether the server has told that it lost the client."""
    return client_id not in {client.client_id for client in control.clients() if client.state == "watching"}


def test_who_says_nothing_more_is_lost_though_it_is_spoken_to(server: Fleet, control: Control) -> None:
    events = control.events()
    quiet = Quiet(server.listen, "quiet")
    heard = [event.WhichOneof("event") for event in quiet.events]  # until the server ends the stream
    assert set(heard) == {"heartbeat"}
    assert 2 <= len(heard) <= MOST
    assert next(event.client_id for event in events if event.kind == "client_lost") == "quiet"
    events.cancel()


def test_any_call_of_the_session_counts_as_a_heartbeat(server: Fleet, control: Control) -> None:
    busy = Quiet(server.listen, "busy")
    for _ in range(MANY):
        assert next(busy.events).WhichOneof("event") == "heartbeat"
        busy.speak()
    assert not lost(control, "busy")
    assert len(list(busy.events)) <= MOST  # it says nothing more
    assert lost(control, "busy")
