"""Ten clients train with fedring, whose strategy halves the learning rate after each round that made things worse."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from fedring.data import Samples, Split
from fedring.server.aggregation.strategy import PastRound
from fedring.simulation import simulate

CLIENTS, ROUNDS = 10, 5


def net() -> nn.Module:
    """Return the model."""
    return nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 3))


def samples(root: Path | None, download: bool) -> Split:
    """Return 2,400 inputs [2400, 20] and their classes [2400]; the last 400 are for evaluation."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(2400, 20, generator=generator)
    labels = (inputs @ torch.randn(20, 3, generator=generator)).argmax(1)
    return Split(Samples(inputs[:2000], labels[:2000]), Samples(inputs[2000:], labels[2000:]), classes=3)


class Careful:
    """Halves the learning rate after each round that made the model worse."""

    def __init__(self, lr: float) -> None:
        self.lr = lr

    def configure(self, history: Sequence[PastRound]) -> dict[str, float]:
        """Send the learning rate with the model."""
        losses = [past.metrics["eval/loss"] for past in history if past.published]
        lr = history[-1].settings.get("lr", self.lr) if history else self.lr
        worse = len(losses) > 1 and losses[-1] > losses[-2]
        return {"lr": lr / 2 if worse else lr}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Evaluate the model on the server."""
        return {"norm": torch.nn.utils.parameters_to_vector(model.parameters()).norm().item()}


JOB = {
    "model": "with_fedring:net",
    "data": "with_fedring:samples",
    "rounds": ROUNDS,
    "batch_size": 16,
    "aggregation": {"rule": "with_fedring:Careful", "args": {"lr": 0.2}},
}


def main() -> None:
    """Run all rounds."""
    for row in simulate(JOB, clients=CLIENTS)["rounds"]:
        print(row["round"], row["accuracy"], row["metrics"]["server/norm"])


if __name__ == "__main__":  # the workers are processes, which import this script
    main()
