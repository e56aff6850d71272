"""The named figures of the newest round as a metric for Prometheus."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fedring.train.metrics import MAX_METRICS, ORIGINS

MAX_SERIES = len(ORIGINS) * MAX_METRICS
"""The most names that this process ever shows. Users and clients choose the names, and must not create many series."""


class NamedMetrics(Collector):
    """The figures of the round that was evaluated last, read when Prometheus asks, in another thread."""

    def __init__(self) -> None:
        self._names: set[str] = set()  # all that have been shown, at most MAX_SERIES
        self._figures: Mapping[str, float] = {}

    def show(self, figures: Mapping[str, float]) -> None:
        """Show the figures of a round from now on, and no longer those of the round before."""
        fresh = sorted(figures.keys() - self._names)
        self._names.update(fresh[: MAX_SERIES - len(self._names)])
        self._figures = {name: value for name, value in figures.items() if name in self._names}

    def collect(self) -> Iterator[Metric]:
        """Yield the metric, for Prometheus."""
        text = "Named metrics of the round that was evaluated last: means over clients, or sums if they end in _sum."
        family = GaugeMetricFamily("fl_server_round_metric", text, labels=["metric"])
        for name, value in sorted(self._figures.items()):
            family.add_metric([name], value)
        yield family
