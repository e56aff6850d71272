"""The ports of fl-server, and the page."""

import os
import sys
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from math import nan
from typing import TYPE_CHECKING, Any

from grpc import aio

from fedring.daemon.metrics import serving
from fedring.rpc.boundary import Boundary
from fedring.rpc.channel import make_server
from fedring.rpc.health import Health
from fedring.rpc.metrics import CountCalls
from fedring.rpc.tls import ends_at
from fedring.server.config import ServerConfig
from fedring.server.guard.descriptors import Shares
from fedring.server.guard.ports import Security
from fedring.server.guard.tokens import TokenService
from fedring.server.operator.privacy_spent import PrivacySpent
from fedring.server.operator.view import View
from fedring.server.parts import Parts
from fedring.server.service.spans import TraceCalls
from fedring.server.services import CLIENT_SERVICES, add_client_services, control_service, model_streams
from fedring.v1 import control_pb2, control_pb2_grpc
from fedring.version import VERSION

if TYPE_CHECKING:
    from fedring.web.serve import WebServer

_CONTROL_SERVICES = tuple(service.full_name for service in control_pb2.DESCRIPTOR.services_by_name.values())


@dataclass(frozen=True, slots=True)
class Ports:
    """The bound ports of one fl-server.

    Attributes:
        servers: Those of gRPC, which are not started yet.
        pages: The page, if it is wanted.
        addresses: Where each of them listens, by what it is for.
        health: Its answers to health checks.
        security: Guards the servers.
        spent: The page's report of the privacy.
    """

    servers: list[aio.Server]
    pages: "list[WebServer]"
    addresses: dict[str, str]
    health: Health
    security: Security
    spent: PrivacySpent

    def works(self) -> list[Coroutine[Any, Any, None]]:
        """Return the work that must run while the ports are open."""
        guards = [self.security.look_after_revocations(), self.security.look_after_connections()]
        return [*guards, self.spent.run(), *(page.run() for page in self.pages)]


async def listen(
    config: ServerConfig,
    parts: Parts,
    stack: ExitStack,
    most: Shares,
    first: Sequence[aio.ServerInterceptor] = (),
    last: Sequence[aio.ServerInterceptor] = (),
) -> Ports:
    """Bind the ports of a server.

    Args:
        config: Names them.
        parts: Of the server.
        stack: Holds whatever must be released afterwards.
        most: How many connections each port takes.
        first: Interceptors that see a call before all others but that which counts it.
        last: Interceptors that see it when its caller is known to be permitted.

    Raises:
        ConfigError: One of them cannot be bound.
    """
    metrics = parts.metrics
    security = Security(config, parts.facts, stack, most, for_clients=CLIENT_SERVICES, note=parts.receipts.verb)
    await security.tokens.load()
    metrics.guard.read(security.tally)
    metrics.certificate_expiry.set_function(lambda: ends_at(config.tls) or nan)
    health = Health(reflection=config.reflection)
    public, control = _servers(parts, security, config, most, lambda: health.why, first, last)
    health.serve_on(public, *CLIENT_SERVICES)
    health.serve_on(control, *_CONTROL_SERVICES)
    addresses = {
        "listen": security.bind_public(public),
        "control": security.bind_control(control),
    }
    if metrics_address := stack.enter_context(serving(config.metrics_listen, metrics.registry)):
        addresses["metrics"] = metrics_address
    spent = PrivacySpent(parts.facts, parts.rounds, metrics.epsilon)
    pages = _pages(parts, config, stack, spent)
    for page in pages:
        addresses["web"] = page.url
    return Ports([control, public], pages, addresses, health, security, spent)


def _servers(
    parts: Parts,
    security: Security,
    config: ServerConfig,
    most: Shares,
    not_serving: Callable[[], str],
    first: Sequence[aio.ServerInterceptor],
    last: Sequence[aio.ServerInterceptor],
) -> tuple[aio.Server, aio.Server]:
    """Make the guarded servers for clients and for flctl."""
    guards = [CountCalls(parts.metrics.calls), *first, Boundary()]
    # The cheapest refusal comes first: addresses, then callers. Spans come last, so a refused call leaves none.
    with _patient_threads():
        public = make_server(
            [*guards, security.public_entrance, security.public, *last, TraceCalls()],
            max_streams=4 * config.max_clients,
            tls=config.tls,
            max_connections=most.public,
        )
        control = make_server(
            [*guards, security.control_entrance, security.control, *last, TraceCalls()],
            max_streams=64,
            tls=config.tls,
            max_connections=most.control,
        )
    streams = model_streams(parts)
    add_client_services(public, parts, streams, config)
    operate = control_service(parts, streams, config, refused=security.tally.counts, not_serving=not_serving)
    control_pb2_grpc.add_ControlServiceServicer_to_server(operate, control)
    tokens = TokenService(security.tokens, parts.sessions, taken=config.tokens)
    control_pb2_grpc.add_TokenServiceServicer_to_server(tokens, control)
    return public, control


@contextmanager
def _patient_threads() -> Iterator[None]:
    """Let the threads that gRPC starts within wait for their turns.

    They wake for each message that has come or gone, only to say so, and each time the kernel would interrupt the event
    loop for them, which costs a tenth of the processor time of a small update. Threads inherit the policy; an
    operator's own one stays. Does nothing where Linux's policies are unknown or forbidden.
    """
    usual = sys.platform == "linux" and os.sched_getscheduler(0) == os.SCHED_OTHER
    if usual:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
    try:
        yield
    finally:
        if usual:
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def _pages(parts: Parts, config: ServerConfig, stack: ExitStack, spent: PrivacySpent) -> "list[WebServer]":
    """Make the page, if it is wanted."""
    if config.web_port is None:
        return []
    from fedring.web.serve import WebServer  # imports a web server

    view = View(parts.rounds, parts.sessions, parts.journal, parts.facts, VERSION, spent)
    page = WebServer(view, config.web_host, config.web_port, names=config.web_allowed_hosts)
    stack.enter_context(page.socket)
    return [page]
