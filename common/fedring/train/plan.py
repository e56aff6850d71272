"""A client's task in a round, and the result of its training."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Plan:
    """A client's training settings in a round.

    The built-in loop and a user's trainer both get it.
    """

    epochs: int = 1  # passes over the drawn samples
    batch_size: int = 64
    lr: float = 0.05
    momentum: float = 0.9
    mu: float = 0.0  # weight of FedProx's proximal term; 0 = FedAvg
    subset_size: int = 0  # samples drawn anew in each round; 0 = all
    seed: int = 0  # differs from round to round
    round: int = 0  # the number of the round, unique within the server's run
    job_round: int = 0  # the number of the round within its job, from 1
    clip_norm: float = 0.0  # largest norm of a step's gradient, of the loss alone; 0 = any
    precision: str = "fp32"  # of the forward pass and the loss: fp32 or bf16


@dataclass(frozen=True, slots=True)
class TrainResult:
    """The result of one client's training.

    Loss and accuracy are means over the last epoch, computed during training.
    """

    num_samples: int  # samples drawn, at least 1
    loss: float | None = None
    accuracy: float | None = None  # None unless outputs are [batch, classes] and labels are integers [batch]
    seconds: float = 0.0  # of the training loop alone
    steps: int = 0
    named: Mapping[str, float] = field(default_factory=dict)  # further figures: means, or sums if they end in "_sum"

    @property
    def metrics(self) -> dict[str, float]:
        """The figures that are known and finite, by name."""
        means = {**self.named, "loss": self.loss, "accuracy": self.accuracy}
        return {name: value for name, value in means.items() if value is not None and math.isfinite(value)}


def batches_in(size: int, batch_size: int) -> int:
    """Return the number of batches that cut() makes of `size` samples."""
    full, rest = divmod(size, batch_size)
    return full + (rest > 1 or (rest == 1 and not full))
