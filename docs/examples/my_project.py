"""A model, data, a loss and a metric of your own. A job names them as my_project:net, my_project:records and so on."""

from pathlib import Path
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fedring.data import ClientPart, Split
from fedring.offers import offers


@offers("model")
def net(hidden: int = 32) -> nn.Module:
    """Return a model from 16 measurements to 2 scores. A job sets `hidden` in its model_args."""
    return nn.Sequential(nn.Linear(16, hidden), nn.ReLU(), nn.Linear(hidden, 2))


@offers("data")
def records(root: Path | None, download: bool, part: ClientPart) -> Split:
    """Return this client's training and test samples. A real function would read files below `root`, the data_root."""
    own = torch.Generator().manual_seed(crc32(part.client_id.encode()))  # each client has other samples
    measurements = torch.randn(1200, 16, generator=own)
    labels = (measurements.sum(dim=1) > 0).long()
    return Split(
        train=TensorDataset(measurements[:1000], labels[:1000]),
        test=TensorDataset(measurements[1000:], labels[1000:]),
        classes=2,
    )


@offers("loss")
def loss(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return the mean loss of a batch: outputs [n, 2], labels [n]."""
    return nn.functional.cross_entropy(outputs, labels, label_smoothing=0.05)


@offers("evaluator")
def evaluate(model: nn.Module, samples: Dataset[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return the loss and the accuracy, and a metric of your own: which share of the samples of class 1 is found."""
    device = next(model.parameters()).device
    measurements, labels = (tensor.to(device) for tensor in samples[:])
    outputs = model(measurements)
    found = outputs.argmax(dim=1)
    return {
        "loss": loss(outputs, labels).item(),
        "accuracy": (found == labels).float().mean().item(),
        "recall": found[labels == 1].float().mean().item(),
    }
