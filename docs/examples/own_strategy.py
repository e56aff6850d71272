"""A strategy of your own: the mean of the updates, with half the learning rate after each round that made it worse."""

from collections.abc import Sequence

import torch
from torch import nn

from fedring.offers import offers
from fedring.server.aggregation.strategy import PastRound


@offers("rule")
class Careful:
    """A strategy for `[aggregation] rule = "own_strategy:Careful"`; `args = { lr = 0.2 }` sets the first rate."""

    def __init__(self, lr: float = 0.1) -> None:
        self.lr = lr

    def configure(self, history: Sequence[PastRound]) -> dict[str, float]:
        """Return the settings of the next round, after those in `history`, of which the last one is the newest."""
        losses = [past.metrics["eval/loss"] for past in history if "eval/loss" in past.metrics]
        lr = history[-1].settings.get("lr", self.lr) if history else self.lr
        worse = len(losses) > 1 and losses[-1] > losses[-2]
        return {"lr": lr / 2 if worse else lr}

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        """Return figures of a new model, which the round keeps as `server/norm`."""
        return {"norm": float(torch.nn.utils.parameters_to_vector(model.parameters()).norm())}
