"""Heartbeats on a connection of their own: behind the data of a slow line they would come too late.

They are gRPC's pings. Its threads answer them whatever Python does, and a frozen process cannot.
"""

import threading
from collections.abc import Callable
from typing import Any

import grpc

METHOD = "/fedring.v1.PeerService/Pulse"


class Pulse:
    """A call that the peer holds open; `ended(detail)` is called once, when the peer is gone."""

    def __init__(self, channel: grpc.Channel, *, ended: Callable[[str], None]) -> None:
        self._channel = channel
        self._ended = ended
        call: Any = channel.unary_unary(METHOD)  # raw bytes both ways
        self._call = call.future(b"", wait_for_ready=True)
        self._call.add_done_callback(self._done)

    def close(self) -> None:
        """Nothing is sent any more."""
        self._call.cancel()
        self._channel.close()

    def _done(self, call: Any) -> None:
        self._ended(f"{call.code().name.lower()}: {call.details()}")


def hold(request: bytes, context: grpc.ServicerContext) -> bytes:
    """Returns when the caller is gone."""
    gone = threading.Event()
    if context.add_callback(gone.set):
        gone.wait()
    return b""
