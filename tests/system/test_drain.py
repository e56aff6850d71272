"""A server that is told to stop lets calls in progress end, but does not wait for them for ever."""

import queue
import signal
import time
from collections.abc import Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from fedring.rpc.errors import status_of
from fedring.v1 import federation_pb2 as pb
from tests.fleets import Control, Fleet
from tests.system.wire import SIZE, WireClient, offer_of, payload_of, run

SECONDS = 60.0


class Watched:
    """The server's health as it changes; a call in progress as long as it is open."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        self.replies = stub.Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS)
        assert next(self.replies).status == health_pb2.HealthCheckResponse.SERVING

    def wait_for_the_stop(self) -> None:
        assert next(self.replies).status == health_pb2.HealthCheckResponse.NOT_SERVING

    def close(self) -> None:
        self.replies.cancel()
        self._channel.close()


def test_an_upload_in_progress_is_accepted_before_the_server_ends(server: Fleet, control: Control) -> None:
    watched = Watched(server.listen)
    with WireClient(server.listen, "late") as client:
        run(control)
        command = client.expect("train")
        payload = payload_of(np.ones(SIZE, np.float32))
        offsets: queue.Queue[int] = queue.Queue()

        def messages() -> Iterator[pb.ClientUpdate]:
            yield pb.ClientUpdate(offer=offer_of(client.header(command, payload), payload))
            offsets.get(timeout=SECONDS)
            server.server.send(signal.SIGTERM)
            watched.wait_for_the_stop()
            watched.close()
            yield pb.ClientUpdate(chunk=pb.Chunk(data=payload))

        reply = client.push_raw(messages(), offsets)
        assert reply is not None
        assert reply.HasField("accepted")
        assert server.server.wait(SECONDS) == 0


@pytest.mark.alone
def test_a_call_that_does_not_end_is_ended_at_the_limit(server: Fleet) -> None:
    server.server.settings["drain_seconds"] = 1.0
    server.restart_server()
    watched = Watched(server.listen)
    began = time.monotonic()
    server.server.send(signal.SIGTERM)
    watched.wait_for_the_stop()
    with pytest.raises(grpc.RpcError) as caught:
        next(watched.replies)
    assert status_of(caught.value) in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
    assert server.server.wait(SECONDS) == 0
    assert 0.9 < time.monotonic() - began < 10
    watched.close()
