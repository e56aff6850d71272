"""What a round asks of a client, and what the client's training says it did."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Plan:
    """What a round asks of a client; a user's trainer gets it, too."""

    epochs: int = 1  # passes over the drawn samples
    batch_size: int = 64
    lr: float = 0.05
    momentum: float = 0.9
    mu: float = 0.0  # FedProx's proximal weight; 0 = FedAvg
    subset_size: int = 0  # samples drawn anew in each round; 0 = all
    seed: int = 0  # differs from round to round
    round: int = 0  # unique in the run
    job_round: int = 0  # 1 to the job's rounds


@dataclass(frozen=True, slots=True)
class TrainResult:
    """What a training did; loss and accuracy are means over its last epoch, taken while it trained."""

    num_samples: int  # drawn, >= 1
    loss: float | None = None
    accuracy: float | None = None  # None unless outputs are [batch, classes] and labels [batch]
    seconds: float = 0.0  # of the loop alone
    steps: int = 0

    @property
    def metrics(self) -> dict[str, float]:
        """The means that are known, by name; all finite."""
        means = {"loss": self.loss, "accuracy": self.accuracy}
        return {name: value for name, value in means.items() if value is not None and math.isfinite(value)}
