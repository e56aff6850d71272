"""A server that is told to stop waits for calls in progress, but only up to a limit."""

import queue
import signal
import time
from collections.abc import Iterator

import grpc
import numpy as np
import pytest

from fedring.rpc.errors import status_of
from fedring.v1 import federation_pb2 as pb
from tests.fleets import Control, Fleet
from tests.system.health_watch import NOT_SERVING, SERVING, HealthWatch
from tests.system.wire import SIZE, WireClient, offer_of, payload_of, run

SECONDS = 60.0


def test_an_upload_in_progress_is_accepted_before_the_server_ends(server: Fleet, control: Control) -> None:
    watch = HealthWatch(server.listen)
    watch.until(SERVING)
    with WireClient(server.listen, "late") as client:
        run(control)
        command = client.expect("train")
        payload = payload_of(np.ones(SIZE, np.float32))
        offsets: queue.Queue[int] = queue.Queue()

        def messages() -> Iterator[pb.ClientUpdate]:
            yield pb.ClientUpdate(offer=offer_of(client.header(command, payload), payload))
            offsets.get(timeout=SECONDS)
            server.server.send(signal.SIGTERM)
            watch.until(NOT_SERVING)
            watch.close()
            yield pb.ClientUpdate(chunk=pb.Chunk(data=payload))

        reply = client.push_raw(messages(), offsets)
        assert reply is not None
        assert reply.HasField("accepted")
        assert server.server.wait(SECONDS) == 0


@pytest.mark.alone
def test_a_call_that_does_not_end_is_cancelled_after_drain_seconds(server: Fleet) -> None:
    server.server.settings["drain_seconds"] = 1.0
    server.restart_server()
    watch = HealthWatch(server.listen)
    watch.until(SERVING)
    began = time.monotonic()
    server.server.send(signal.SIGTERM)
    watch.until(NOT_SERVING)
    with pytest.raises(grpc.RpcError) as caught:
        next(watch.replies)
    assert status_of(caught.value) in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNAVAILABLE)
    assert server.server.wait(SECONDS) == 0
    assert 0.9 < time.monotonic() - began < 10
    watch.close()
