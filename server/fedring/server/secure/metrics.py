"""Metrics of secure aggregation: durations of steps, and lost clients."""

from fedring.daemon.metrics import SECONDS, Registry
from fedring.server.secure.events import SecureStep


class SecureMetrics:
    """Counts the steps of all groups of all rounds."""

    def __init__(self, registry: Registry) -> None:
        steps = [step for step in SecureStep if step is not SecureStep.DONE]
        text = "What each step of secure aggregation took, group by group."
        self.seconds = registry.histogram("fl_server_secure_step_seconds", text, SECONDS, step=steps)
        text = "Clients that secure aggregation went on without from each of its steps on."
        self.lost = registry.counter("fl_server_secure_lost_clients_total", text, step=steps)
