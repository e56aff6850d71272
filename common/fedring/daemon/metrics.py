"""A daemon's metrics: their registry, and the page that Prometheus reads."""

import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import product
from socket import AI_PASSIVE, SHUT_RDWR, SOCK_STREAM, getaddrinfo, socket
from socketserver import ThreadingMixIn
from typing import Any, TypeVar
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    Info,
    PlatformCollector,
    ProcessCollector,
    disable_created_metrics,
    make_wsgi_app,
)
from prometheus_client.metrics import MetricWrapperBase

from fedring.daemon.config import ConfigError
from fedring.version import VERSION

MOST_CONNECTIONS = 16
MOST_PER_ADDRESS = 8
CONNECTION_SECONDS = 10.0
"""How long a connection to the page may last: a request takes milliseconds, and Prometheus waits 10 s by default."""
_LOOK_SECONDS = 0.5

SECONDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0, 3600.0)
"""The buckets of histograms for operations that may take long."""

Labels = Iterable[str]  # the values that a label can have
_M = TypeVar("_M", bound=MetricWrapperBase)


class Registry(CollectorRegistry):
    """The metrics of one daemon, its process, Python and version.

    A metric shows every combination of its labels' values at once, so that rate() sees the first event.
    """

    def __init__(self) -> None:
        super().__init__()
        ProcessCollector(registry=self)
        PlatformCollector(registry=self)
        GCCollector(registry=self)
        Info("fl_build", "The software that runs.", registry=self).info({"version": VERSION})

    def counter(self, name: str, text: str, **labels: Labels) -> Counter:
        """Declare a counter: a figure that only grows."""
        return _every(Counter(name, text, list(labels), registry=self), labels)

    def gauge(self, name: str, text: str, **labels: Labels) -> Gauge:
        """Declare a gauge: a figure that goes up and down."""
        return _every(Gauge(name, text, list(labels), registry=self), labels)

    def histogram(self, name: str, text: str, buckets: Sequence[float], **labels: Labels) -> Histogram:
        """Declare a histogram: a figure that is observed again and again."""
        return _every(Histogram(name, text, list(labels), buckets=buckets, registry=self), labels)


@contextmanager
def serving(address: str, registry: CollectorRegistry) -> Iterator[str]:
    """Serve the registry to Prometheus at `address`.

    Args:
        address: The host and port; with an empty one, nothing listens.
        registry: The metrics.

    Yields:
        The address with the actual port.

    Raises:
        ConfigError: If the address cannot be used.
    """
    if not address:
        yield ""
        return
    disable_created_metrics()  # type: ignore[no-untyped-call]  # its stubs have no types; the series that it drops are of no use
    host, _, port = address.rpartition(":")
    try:
        server = _Page(host.strip("[]"), int(port), registry)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"metrics_listen {address} cannot be used: {error}") from error
    thread = threading.Thread(target=server.serve_forever, args=(_LOOK_SECONDS,), name="metrics", daemon=True)
    thread.start()
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Page(ThreadingMixIn, WSGIServer):
    """Serves the metrics, with bounds on connections and their time.

    Each connection has a thread, so a stranger who opens connections and says nothing would start threads without end.
    prometheus_client's own server has no such bounds.
    """

    daemon_threads = True

    def __init__(self, host: str, port: int, registry: CollectorRegistry) -> None:
        self.address_family, _, _, _, place = next(iter(getaddrinfo(host, port, type=SOCK_STREAM, flags=AI_PASSIVE)))
        self._open: dict[socket, tuple[str, float]] = {}  # who has opened it, and until when it may last
        self._lock, self._rendering = threading.Lock(), threading.Lock()
        super().__init__((str(place[0]), port), _Quiet)
        page = make_wsgi_app(registry)

        def one_at_a_time(environ: Any, start_response: Any) -> Any:
            with self._rendering:
                return page(environ, start_response)

        self.set_app(one_at_a_time)

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Return whether there is room for the connection.

        Without room, it is closed at once.
        """
        host = client_address[0]
        with self._lock:
            same = sum(other == host for other, _ in self._open.values())
            if same >= MOST_PER_ADDRESS or len(self._open) >= MOST_CONNECTIONS:
                return False
            self._open[request] = (host, time.monotonic() + CONNECTION_SECONDS)
            return True

    def shutdown_request(self, request: Any) -> None:
        """Close the connection."""
        with self._lock:
            self._open.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """End connections that last too long.

        A connection is shut down whatever it is doing; its thread notices that and ends.
        """
        now = time.monotonic()
        with self._lock:
            late = [request for request, (_, until) in self._open.items() if now > until]
        for request in late:
            with suppress(OSError):
                request.shutdown(SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore connections that break."""


class _Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: Any) -> None:
        """Log no requests."""


def _every(metric: _M, labels: Mapping[str, Labels]) -> _M:
    for values in product(*labels.values()) if labels else ():
        metric.labels(*values)
    return metric
