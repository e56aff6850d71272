"""A trainer for `flctl try private` that records its values.

They are compared with the server's.
"""

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from fedring.train.plan import Plan
from fedring.train.tensors.state import read_vectors

RECORDS = "FEDRING_DEMO_RECORDS"
"""The variable that names a client's folder for its records."""


def train(model: nn.Module, samples: Dataset[Any], plan: Plan) -> int:
    """Train `model` in place by plain SGD, and record its parameters.

    They are written before and after the training, to a file of the round.

    Returns:
        The number of samples.
    """
    before, device = read_vectors(model).parameters, next(model.parameters()).device
    optimizer = torch.optim.SGD(model.parameters(), plan.lr, plan.momentum)
    criterion = nn.CrossEntropyLoss()
    total = 0
    for _ in range(plan.epochs):
        total = 0
        for inputs, labels in DataLoader(samples, plan.batch_size, shuffle=True):
            optimizer.zero_grad()
            criterion(model(inputs.to(device)), labels.to(device)).backward()
            optimizer.step()
            total += len(labels)
    folder = Path(os.environ[RECORDS])
    draft = folder / "draft.npz"
    np.savez(draft, before=before, after=read_vectors(model).parameters)
    draft.replace(folder / f"{plan.round}.npz")
    return total
