"""grpc.health.v1, and reflection where the operator wants it."""

from collections.abc import Sequence
from typing import Any

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fedring.daemon.config import ConfigError
from fedring.rpc.boundary import Boundary
from fedring.rpc.channel import make_server

ALIVE = "alive"
"""A service that serves as long as the process answers at all, whatever it waits for."""

_PORT_STREAMS = 16


class Health:
    """What a process answers when it is asked whether it serves: each port for its own services, and for "", all of it.

    A port that has no service of its own answers for all services of the process.
    """

    def __init__(self, *, reflection: bool = False) -> None:
        self._reflection = reflection
        self._ports: list[tuple[Any, Sequence[str]]] = []
        self._serving: bool | None = None

    def serve_on(self, server: aio.Server, *services: str) -> None:
        """The server, which has these services, answers health checks of them, and with reflection lists them."""
        untyped: Any = health  # its stubs know no `aio`
        servicer = untyped.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        self._ports.append((servicer, services))
        if self._reflection:
            from grpc_reflection.v1alpha import reflection

            names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)

    async def set(self, *, serving: bool) -> None:
        """Every service but "alive" serves from now on, or does not."""
        if serving is self._serving:
            return
        self._serving = serving
        status = health_pb2.HealthCheckResponse
        every = [service for _, services in self._ports for service in services]
        for servicer, services in self._ports:
            await servicer.set(ALIVE, status.SERVING)
            for service in ("", *(services or every)):
                await servicer.set(service, status.SERVING if serving else status.NOT_SERVING)

    async def stop(self) -> None:
        """No service serves any more, whatever is set afterwards."""
        for servicer, _ in self._ports:
            await servicer.enter_graceful_shutdown()


def health_port(address: str, health: Health) -> tuple[aio.Server, str]:
    """A server, to be started, that answers health checks at `address` and does nothing else; and where it listens.

    It speaks plaintext, also to other hosts: an orchestrator's probes cannot do otherwise, and all it tells is whether
    the daemon serves.
    """
    server = make_server([Boundary()], max_streams=_PORT_STREAMS)
    health.serve_on(server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address} (health_listen): is another program using it?") from error
    return server, address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
