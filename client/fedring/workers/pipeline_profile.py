"""The figures of one worker's stages in a round.

The client sends them to the server.
"""

from dataclasses import dataclass

from fedring.pipeline.run import Report
from fedring.schedules.schedule import Kind


@dataclass(slots=True)
class PipelineProfile:
    """The actions and times of one worker's stages in a round."""

    stage: int = 0  # the worker's first stage
    micro_batches: int = 0  # in the newest run
    in_flight: int = 0  # the largest number of micro-batches whose activations a stage kept
    seconds: float = 0.0  # the time in runs of the schedule
    forward_seconds: float = 0.0
    backward_seconds: float = 0.0
    update_seconds: float = 0.0
    checkpoint_seconds: float = 0.0

    @property
    def busy_seconds(self) -> float:
        """The seconds in which the worker computed."""
        return self.forward_seconds + self.backward_seconds + self.update_seconds

    @property
    def bubble_ratio(self) -> float:
        """The share of the runs' time in which the worker computed nothing."""
        return max(0.0, 1 - self.busy_seconds / self.seconds) if self.seconds else 0.0

    def add(self, report: Report) -> None:
        """Add the times of one more run."""
        self.seconds += report.seconds
        self.forward_seconds += report.seconds_of(Kind.FORWARD)
        self.backward_seconds += report.seconds_of(Kind.BACKWARD)
        self.update_seconds += report.seconds_of(Kind.UPDATE)

    @property
    def metrics(self) -> dict[str, float]:
        """All figures by name, as the client sends them to the server."""
        return {
            "stage": self.stage,
            "micro_batches": self.micro_batches,
            "in_flight": self.in_flight,
            "bubble_ratio": round(self.bubble_ratio, 4),
            "forward_seconds": round(self.forward_seconds, 6),
            "backward_seconds": round(self.backward_seconds, 6),
            "update_seconds": round(self.update_seconds, 6),
            "checkpoint_seconds": round(self.checkpoint_seconds, 6),
        }
