"""Metrics of pipeline training."""

import threading
from collections.abc import Iterator, Mapping

from prometheus_client.core import GaugeMetricFamily, Metric, SummaryMetricFamily
from prometheus_client.registry import Collector

KINDS = ("forward", "backward", "update")
"""The kinds of actions of a stage."""


class PipelineMetrics(Collector):
    """Collects the figures of this worker's stages; any thread may use it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._bubble = 0.0
        self._in_flight = 0
        self._actions: dict[tuple[int, str], tuple[int, float]] = {}

    def add_run(self, bubble: float, in_flight: int, actions: Mapping[tuple[int, str], tuple[int, float]]) -> None:
        """Add a run of the schedule that has ended.

        Args:
            bubble: The share of the run in which this worker computed nothing, 0 to 1.
            in_flight: The most micro-batches that the worker kept at a time.
            actions: How many actions there were, and their seconds, by stage and kind (one of KINDS).
        """
        with self._lock:
            self._bubble, self._in_flight = bubble, in_flight
            for place, (count, seconds) in actions.items():
                before = self._actions.get(place, (0, 0.0))
                self._actions[place] = before[0] + count, before[1] + seconds

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics for Prometheus."""
        with self._lock:
            bubble, in_flight, actions = self._bubble, self._in_flight, dict(self._actions)
        text = "Share of the newest run of the schedule in which this worker computed nothing."
        yield GaugeMetricFamily("fl_pipe_bubble_ratio", text, bubble)
        text = "Most micro-batches that this worker kept at a time in the newest run of the schedule."
        yield GaugeMetricFamily("fl_pipe_inflight_microbatches", text, in_flight)
        text = "Seconds that this worker's stages took, by what they did."
        stages = SummaryMetricFamily("fl_pipe_stage_seconds", text, labels=["stage", "kind"])
        for (stage, kind), (count, seconds) in sorted(actions.items()):
            stages.add_metric([str(stage), kind], count, seconds)
        yield stages
