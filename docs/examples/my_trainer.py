"""A trainer of your own. fl-client calls it instead of its built-in loop."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fedring.train.plan import Plan


def train(model: nn.Module, samples: Dataset[Any], plan: Plan) -> dict[str, float]:
    """Train `model` in place on `samples`. Return the number of samples, and the mean loss of the last epoch."""
    device = next(model.parameters()).device  # fl-client has put it on its GPU, if there is one
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr / 10)
    criterion = nn.CrossEntropyLoss()
    total, loss_sum = 0, 0.0
    for _ in range(plan.epochs):
        total, loss_sum = 0, 0.0
        for inputs, labels in DataLoader(samples, plan.batch_size, shuffle=True):
            optimizer.zero_grad()
            loss = criterion(model(inputs.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            total += len(labels)
            loss_sum += loss.item() * len(labels)
    return {"num_samples": total, "loss": loss_sum / total}
