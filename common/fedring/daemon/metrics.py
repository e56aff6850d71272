"""A daemon's metrics: their registry, and the page that Prometheus reads."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import product
from typing import TypeVar

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
    start_http_server,
)
from prometheus_client.metrics import MetricWrapperBase

from fedring.daemon.config import ConfigError
from fedring.version import VERSION

Labels = Iterable[str]  # the values that a label can have
_M = TypeVar("_M", bound=MetricWrapperBase)


class Registry(CollectorRegistry):
    """The metrics of one daemon, with those of its process, its Python and its version.

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
    """Let Prometheus read the registry at the address that is yielded; with an empty address nothing listens."""
    if not address:
        yield ""
        return
    disable_created_metrics()  # type: ignore[no-untyped-call]  # its stubs have no types; the series that it drops are of no use
    host, _, port = address.rpartition(":")
    try:
        server, thread = start_http_server(int(port), host.strip("[]"), registry)
    except (OSError, OverflowError, ValueError) as error:
        raise ConfigError(f"metrics_listen {address} cannot be used: {error}") from error
    try:
        yield f"{host}:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def _every(metric: _M, labels: Mapping[str, Labels]) -> _M:
    for values in product(*labels.values()) if labels else ():
        metric.labels(*values)
    return metric
