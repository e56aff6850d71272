"""Health: malignant or benign? Five clinics, whose patients no other sees.

It needs scikit-learn, which brings the measurements of 569 patients (Wolberg et al. 1995): pip install scikit-learn
"""

from pathlib import Path

import torch
from sklearn.datasets import load_breast_cancer
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fedring.data import Split
from fedring.offers import offers


@offers("model")
def classifier() -> nn.Module:
    """Return a model from 30 measurements to 2 scores."""
    return nn.Sequential(nn.Linear(30, 16), nn.ReLU(), nn.Linear(16, 2))


@offers("data")
def patients(root: Path | None, download: bool) -> Split:
    """Return the measurements, scaled, of patients for training and for tests."""
    table = load_breast_cancer()
    order = torch.randperm(len(table.target), generator=torch.Generator().manual_seed(0))
    rows = torch.tensor(table.data, dtype=torch.float32)[order]
    labels = torch.tensor(1 - table.target)[order]  # 1 = malignant
    # In a real federation every site scales by constants that all agree on: these are of the whole table.
    rows = (rows - rows.mean(dim=0)) / rows.std(dim=0)
    return Split(TensorDataset(rows[:450], labels[:450]), TensorDataset(rows[450:], labels[450:]), classes=2)


@offers("evaluator")
def evaluate(model: nn.Module, samples: Dataset[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Return loss, accuracy, and the sensitivity: the share of malignant tumours that is found."""
    rows, labels = samples[:]
    scores = model(rows)
    found = scores.argmax(dim=1)
    return {
        "loss": nn.functional.cross_entropy(scores, labels).item(),
        "accuracy": (found == labels).float().mean().item(),
        "sensitivity": found[labels == 1].float().mean().item(),
    }
