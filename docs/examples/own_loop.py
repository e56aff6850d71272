"""A script that keeps its own loop. Usage: python own_loop.py HOST:PORT [CLIENT_ID]"""

import sys

import torch
from torch import nn
from torch.utils.data import DataLoader

from fedring.client import RoundOver, Task, connect
from fedring.data import digits
from fedring.train.models import digits_mlp

data = digits()
model = digits_mlp()
criterion = nn.CrossEntropyLoss()


def train(model: nn.Module, task: Task) -> None:
    """Train for one round, with the script's own loop."""
    optimizer = torch.optim.SGD(model.parameters(), task.plan.lr, task.plan.momentum)
    for _ in range(task.plan.epochs):
        for inputs, labels in DataLoader(data.train, task.plan.batch_size, shuffle=True):
            if task.cancelled:
                return
            optimizer.zero_grad()
            criterion(model(inputs), labels).backward()
            optimizer.step()


@torch.no_grad()
def evaluate(model: nn.Module) -> tuple[int, int, float]:
    """Return the number of correct answers, the number of samples, and the sum of the losses of a published model."""
    model.eval()
    inputs, labels = next(iter(DataLoader(data.test, len(data.test))))
    outputs = model(inputs)
    model.train()
    return int((outputs.argmax(1) == labels).sum()), len(labels), len(labels) * float(criterion(outputs, labels))


name = sys.argv[2] if len(sys.argv) > 2 else "own-loop"
settings = {"server": sys.argv[1], "client_id": name, "state_dir": f"{name}-state"}

with connect(**settings, model=model, evaluate=evaluate) as federation:
    for task in federation:  # waits for rounds; ends on SIGTERM or federation.close()
        try:
            task.load_into(model)
            train(model, task)
            task.submit(model, samples=len(data.train))
        except RoundOver as over:
            print(f"round {task.round} ended without this client: {over.reason}")
