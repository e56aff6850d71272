"""A small language model, with a trainer and an evaluation that return figures of their own."""

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from fedring.data import Split
from fedring.offers import offers

WORDS = 11


@offers("model")
def model() -> nn.Module:
    """A model from words [batch, length] to scores [batch, length, words]."""
    return nn.Sequential(nn.Embedding(WORDS, 8), nn.Linear(8, WORDS))


@offers("data")
def texts(root: Path | None, download: bool) -> Split:
    """Texts in which each word follows from the one before."""
    words = (torch.arange(7) + torch.arange(48)[:, None]) % WORDS
    samples = TensorDataset(words[:, :-1], words[:, 1:])
    train, test = torch.utils.data.random_split(samples, [40, 8], torch.Generator().manual_seed(0))
    return Split(train=train, test=test, classes=WORDS)


@offers("loss")
def loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """The mean cross-entropy of the next word."""
    return nn.functional.cross_entropy(outputs.flatten(0, 1), labels.flatten())


@offers("trainer")
def train(model: nn.Module, samples: Any, plan: Any) -> dict[str, float]:
    """A trainer that also says how many words it has read, and something that is not a number."""
    optimizer = torch.optim.SGD(model.parameters(), plan.lr)
    words = 0
    for inputs, labels in DataLoader(samples, plan.batch_size):
        optimizer.zero_grad()
        loss(model(inputs), labels).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        words += inputs.numel()
    return {"num_samples": len(samples), "words_sum": words, "rate": 2.0, "undefined": float("nan")}


@offers("evaluator")
def evaluate(model: nn.Module, samples: Any) -> dict[str, float]:
    """An evaluation without accuracy, but with the perplexity of the model."""
    inputs, labels = next(iter(DataLoader(samples, len(samples))))
    value = loss(model(inputs), labels).item()
    return {"loss": value, "perplexity": float(torch.tensor(value).exp()), "seen_sum": len(labels)}
