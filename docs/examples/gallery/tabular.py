"""Tabular data: will a customer cancel? Each shop has its own customers."""

from pathlib import Path

import torch
from torch import Tensor, nn

from fedring.data import Samples, Split
from fedring.offers import offers

PLANS, NUMBERS = 6, 5  # kinds of contracts, and numeric columns


class Table(nn.Module):
    """Scores [n, 2] of rows [n, 1 + NUMBERS], whose first column is a category."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.plan = nn.Embedding(PLANS, 4)
        self.layers = nn.Sequential(nn.Linear(4 + NUMBERS, width), nn.ReLU(), nn.Linear(width, 2))

    def forward(self, rows: Tensor) -> Tensor:
        """Return the scores of rows."""
        scores: Tensor = self.layers(torch.cat([self.plan(rows[:, 0].long()), rows[:, 1:]], dim=1))
        return scores


@offers("model")
def churn(width: int = 32) -> nn.Module:
    """Return a model of a category and some numbers."""
    return Table(width)


@offers("data")
def customers(root: Path | None, download: bool) -> Split:
    """Return rows that are drawn here; a real function reads a table below `root`."""
    draw = torch.Generator().manual_seed(1)
    plan = torch.randint(PLANS, (4000, 1), generator=draw)
    numbers = torch.randn(4000, NUMBERS, generator=draw)
    effect = torch.linspace(-2, 2, PLANS)[plan[:, 0]]
    labels = (numbers[:, 0] * numbers[:, 1] + numbers[:, 2] + effect > 0).long()
    rows = torch.cat([plan.float(), numbers], dim=1)
    # Samples, and not a TensorDataset, show their labels, by which the shops differ.
    return Split(Samples(rows[:3200], labels[:3200]), Samples(rows[3200:], labels[3200:]), classes=2)
