"""A model and data of your own. A job names them as my_project:net and my_project:records."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedring.data import Split


def net(hidden: int = 32) -> nn.Module:
    """Return a model from 16 measurements to 2 scores. A job sets `hidden` in its model_args."""
    return nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def records(root: Path | None, download: bool) -> Split:
    """Return this host's training and test samples. A real function would read files below `root`, the data_root."""
    measurements = torch.randn(1200, 16)
    labels = (measurements.sum(dim=1) > 0).long()
    return Split(
        train=TensorDataset(measurements[:1000], labels[:1000]),
        test=TensorDataset(measurements[1000:], labels[1000:]),
        classes=2,
    )
