"""The stream of health statuses of a port."""

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

SECONDS = 120.0
SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


class HealthWatch:
    """A Watch call of the health service; it is in progress until the server ends it, or `close`."""

    def __init__(self, address: str) -> None:
        self._channel = grpc.insecure_channel(address)
        stub: Any = health_pb2_grpc.HealthStub(self._channel)
        self.replies = stub.Watch(health_pb2.HealthCheckRequest(), timeout=SECONDS, wait_for_ready=True)

    def until(self, status: int) -> None:
        """Return when the port has this status."""
        assert any(reply.status == status for reply in self.replies)

    def close(self) -> None:
        """End the call."""
        self.replies.cancel()
        self._channel.close()
