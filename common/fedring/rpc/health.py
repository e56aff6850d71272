"""Health checks (grpc.health.v1), and reflection where the operator allows it."""

from collections.abc import Sequence
from typing import Any

from grpc import aio
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from fedring.daemon.config import ConfigError
from fedring.rpc.boundary import Boundary
from fedring.rpc.channel import make_server

ALIVE = "alive"
"""The name of a service that is SERVING whenever the process answers at all, even while it waits for something."""

_PORT_STREAMS = 16


class Health:
    """The answers of a process to health checks.

    Each port answers for its own services, and for "", which means the whole process. A port without services of its
    own answers for all services of the process.
    """

    def __init__(self, *, reflection: bool = False) -> None:
        self._reflection = reflection
        self._ports: list[tuple[Any, Sequence[str]]] = []
        self._serving: bool | None = None
        self.why = "it is still starting"
        """Why the process does not serve, for people; empty while it serves."""

    def serve_on(self, server: aio.Server, *services: str) -> None:
        """Let a server answer health checks.

        Args:
            server: A server that has not been started.
            services: The full names of the services that it has. If reflection is on, callers can list them.
        """
        untyped: Any = health  # its stubs lack `aio`
        servicer = untyped.aio.HealthServicer()
        health_pb2_grpc.add_HealthServicer_to_server(servicer, server)
        self._ports.append((servicer, services))
        if self._reflection:
            from grpc_reflection.v1alpha import reflection

            names = (*services, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)

    async def set(self, *, serving: bool, why: str = "") -> None:
        """Set whether all services except "alive" are SERVING, and why not."""
        self.why = "" if serving else why
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
        """Set all services to NOT_SERVING permanently.

        This holds even if `set` is called afterwards.
        """
        self.why = "it is stopping"
        for servicer, _ in self._ports:
            await servicer.enter_graceful_shutdown()


def health_port(address: str, health: Health) -> tuple[aio.Server, str]:
    """Make a server that only answers health checks.

    It uses plaintext, also with other hosts, because the probes of orchestrators cannot use TLS. All that it reveals is
    whether the daemon is serving.

    Args:
        address: Where it is to listen, "host:port" or "unix:path"; port 0 takes any free one.
        health: Its answers.

    Returns:
        The server, which has not been started, and the address with the port that it got.

    Raises:
        ConfigError: If it cannot listen there.
    """
    server = make_server([Boundary()], max_streams=_PORT_STREAMS)
    health.serve_on(server)
    try:
        port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise ConfigError(f"cannot listen on {address} (health_listen): is another program using it?") from error
    return server, address if address.startswith("unix:") else f"{address.rpartition(':')[0]}:{port}"
