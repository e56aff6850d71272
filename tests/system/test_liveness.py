"""A client is alive as long as it makes any call; a silent client is lost, an idle one that beats seldom later."""

import queue
from collections.abc import Iterator
from contextlib import suppress

import grpc
import pytest

from fedring.rpc.contract import PROTOCOL
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import federation_pb2_grpc as rpc
from tests.fleets import Control, Fleet, until_watching

BEATS = {"heartbeat_seconds": 0.5, "lost_after_seconds": 6.0}
MANY = 16
"""So many heartbeats take longer than a silent client is waited for."""
MOST = 2 * 12 + 2
"""The most heartbeats that a client gets after its last message."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start an fl-server that soon takes silent clients for lost."""
    with Fleet(tmp_path_factory.mktemp("liveness"), BEATS) as fleet:
        yield fleet


class QuietClient:
    """A client that sends one message when it starts to watch, and later only makes the calls of `speak`."""

    def __init__(self, address: str, client_id: str, *, paced: bool = False) -> None:
        channel = grpc.insecure_channel(address)
        commands = rpc.TrainCmdServiceStub(channel)
        joined = commands.Join(pb.JoinRequest(client_id=client_id, protocol=PROTOCOL, paced=paced))
        requests: queue.Queue[pb.WatchRequest] = queue.Queue()
        requests.put(pb.WatchRequest(matched=True))
        self._metadata = (("fl-session", joined.session_id),)
        self.events: Iterator[pb.ServerEvent] = commands.Watch(iter(requests.get, None), metadata=self._metadata)
        self._models = rpc.ModelBlobServiceStub(channel)

    def speak(self) -> None:
        """Make a call of the session, and ignore its answer."""
        with suppress(grpc.RpcError):
            list(self._models.FetchModel(pb.FetchModelRequest(version=777), metadata=self._metadata))


def lost(control: Control, client_id: str) -> bool:
    """Return whether the server has lost the client."""
    return client_id not in {client.client_id for client in control.clients() if client.state == "watching"}


def test_a_client_that_only_receives_heartbeats_is_lost(server: Fleet, control: Control) -> None:
    events = control.events()
    quiet = QuietClient(server.listen, "quiet")
    heard = [event.WhichOneof("event") for event in quiet.events]  # ends when the server ends the stream
    assert set(heard) == {"heartbeat"}
    assert 2 <= len(heard) <= MOST
    assert next(event.client_id for event in events if event.kind == "client_lost") == "quiet"
    events.cancel()


def test_any_call_of_the_session_counts_as_a_heartbeat(server: Fleet, control: Control) -> None:
    busy = QuietClient(server.listen, "busy")
    for _ in range(MANY):
        assert next(busy.events).WhichOneof("event") == "heartbeat"
        busy.speak()
    assert not lost(control, "busy")
    assert len(list(busy.events)) <= MOST  # it makes no more calls
    assert lost(control, "busy")


NEVER = 3600.0
SELDOM = {"heartbeat_seconds": 0.2, "idle_heartbeat_seconds": NEVER, "lost_after_seconds": 6.0}


@pytest.fixture(scope="module")
def patient(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start an fl-server that hears idle clients once an hour, and one client of it."""
    with Fleet(tmp_path_factory.mktemp("patient"), SELDOM, [{}]) as fleet:
        yield fleet


def test_an_idle_client_is_silent_and_one_that_is_drawn_is_soon_lost(patient: Fleet) -> None:
    with Control(patient.control) as control:
        until_watching(control, 1)
        events = control.events()
        heard = {client.client_id: client.last_seen_at for client in control.clients()}
        paced = QuietClient(patient.listen, "paced", paced=True)
        assert next(paced.events).heartbeat.period_seconds == NEVER
        plain = QuietClient(patient.listen, "plain")
        assert len(list(plain.events)) > 2  # it beats no more, and its session ends
        states = {client.client_id: client for client in control.clients()}
        assert states["paced"].state == "watching"
        assert states["client-0"].last_seen_at == heard["client-0"]
        job = {"min_clients": 2, "min_clients_to_aggregate": 1, "epochs": 1, "evaluate": False}
        job_id = control.start_job(job).job_id
        lost = [event.client_id for event in control.follow_job(job_id, events) if event.kind == "client_lost"]
        assert "paced" in lost  # in a round, its silence is noticed
        assert control.job(job_id).state == "completed"
        assert "train" in {event.WhichOneof("event") for event in paced.events}
