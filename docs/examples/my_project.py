"""A model and data of one's own, for a job to name: my_project:net and my_project:records."""

from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from fedring.data import Split


def net(hidden: int = 32) -> nn.Module:
    """Sixteen measurements in, two scores out; `hidden` is for the job's model_args."""
    return nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 2))


def records(root: Path | None, download: bool) -> Split:
    """What this host has, to train on and held out; a real one would read files below `root`, the data_root."""
    measurements = torch.randn(1200, 16)
    labels = (measurements.sum(dim=1) > 0).long()
    return Split(
        train=TensorDataset(measurements[:1000], labels[:1000]),
        test=TensorDataset(measurements[1000:], labels[1000:]),
        classes=2,
    )
