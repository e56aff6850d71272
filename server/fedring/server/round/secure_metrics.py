"""Metrics of secure aggregation: how long its steps take, and the clients that are lost in them."""

from collections.abc import Mapping
from typing import Any

from fedring.daemon.metrics import Registry

STEPS = ("keys", "shares", "updates", "survivors", "unmask")
"""The steps of a round with secure aggregation, in their order."""

_SECONDS = (0.01, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class SecureMetrics:
    """Counts what came of the secure aggregation of rounds, when they have ended.

    Args:
        registry: of the daemon.
    """

    def __init__(self, registry: Registry) -> None:
        text = "Clients that rounds with secure aggregation have lost in each step."
        self._lost = registry.counter("fl_server_secure_lost_total", text, step=STEPS)
        text = "What rounds with secure aggregation spent in each step."
        self._seconds = registry.histogram("fl_server_secure_step_seconds", text, _SECONDS, step=STEPS)

    def ended(self, stats: Mapping[str, Any] | None) -> None:
        """Count a round that has ended; `stats` are those of its secure aggregation, None if it had none."""
        for step, count in (stats or {}).get("lost", {}).items():
            self._lost.labels(step).inc(count)
        for step, seconds in (stats or {}).get("seconds", {}).items():
            self._seconds.labels(step).observe(seconds)
