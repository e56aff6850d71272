"""Metrics of the calls that the guard of the ports refuses."""

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from fedring.server.guard.auth import AuthCounts


class GuardMetrics(Collector):
    """The counts of both ports' guards, read when Prometheus asks."""

    def __init__(self) -> None:
        self._tally: AuthCounts | None = None

    def read(self, tally: AuthCounts) -> None:
        """Read these counts from now on."""
        self._tally = tally

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics, for Prometheus."""
        tally = self._tally
        text = "Calls that were refused because of who made them."
        refusals = CounterMetricFamily("fl_server_auth_refusals_total", text, labels=["reason"])
        for reason, count in sorted(tally.refused.items()) if tally else ():
            refusals.add_metric([reason], count)
        yield refusals
        # gRPC tells nobody of a handshake that fails. Both of these only grow, as their difference does not.
        text = "Handshakes of TLS that began; without a call after it, it failed, or somebody only looked."
        yield CounterMetricFamily("fl_server_handshakes_total", text, tally.handshakes if tally else 0)
        text = "Connections on which a call came."
        yield CounterMetricFamily("fl_server_connections_total", text, tally.connections if tally else 0)
        text = "Connections that were ended because they did not keep to a limit of one address."
        yield CounterMetricFamily("fl_server_ended_connections_total", text, tally.ended if tally else 0)
