"""Train MNIST with a synchronous pipeline and with PipeDream, from the same seed and with the same batches."""

import time
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from fedring.data import mnist
from fedring.pipeline.stage import Stage
from fedring.pipeline.stash import WeightStashing
from fedring.pipeline.worker import LocalPipeline
from fedring.schedules.simulation import check
from fedring.train.evaluation import evaluate
from fedring.train.losses import cross_entropy
from fedring.train.pipeline_table import Pipeline
from fedring.train.seam import build_model
from fedring.workers.cutting import count_layers, cut_model
from fedring.workers.shards import World, epoch_order, micro_batches, shares

_BATCH, _MOMENTUM = 64, 0.9
_RUN = 64  # micro-batches between two flushes of PipeDream


def compare(data_root: Path, stages: int, epochs: int, *, lr: float, subset: int) -> dict[str, Any]:
    """Train both ways, and return the facts of one JSON line.

    Args:
        data_root: Folder of the data sets.
        stages: Parts of the model.
        epochs: Epochs of each training.
        lr: Learning rate of both.
        subset: Samples of an epoch; 0 = all.

    Returns:
        Both accuracies on the test samples in percent, their difference in points, and the seconds of each training.
    """
    tables = {
        "synchronous": Pipeline.model_validate({"stages": stages, "schedule": "1f1b", "micro_batches": 4}),
        "pipedream": Pipeline.model_validate({"stages": stages, "schedule": "pipedream", "micro_batches": _RUN}),
    }
    line: dict[str, Any] = {"bench": "pipeline accuracy", "stages": stages, "epochs": epochs, "lr": lr}
    for name, table in tables.items():
        began = time.perf_counter()
        line[name] = _accuracy(table, data_root, epochs, lr=lr, subset=subset)
        line[f"{name}_seconds"] = round(time.perf_counter() - began, 1)
    return line | {"points": round(line["pipedream"] - line["synchronous"], 2)}


def _accuracy(table: Pipeline, data_root: Path, epochs: int, *, lr: float, subset: int) -> float:
    split = mnist(data_root, False)
    samples: Any = split.train
    model = build_model("fedring.train.models:mnist_cnn", {}, 0, ["fedring"])
    stages = _stages(model, table, lr)
    for epoch in range(epochs):
        steps = shares(epoch_order(len(samples), seed=0, epoch=epoch, wanted=subset), 0, World(), _BATCH)
        every = table.micro_batches if table.schedule == "pipedream" else 1
        while taken := list(islice(steps, int(every))):
            parts = [
                part
                for share in taken
                for part in micro_batches(share.indices, size=_BATCH // table.interval, most=table.interval)
            ]
            batches = [samples.batch(part) for part in parts]
            pipeline = LocalPipeline(stages, table.schedule_of(len(batches)))
            pipeline.run([inputs for inputs, _ in batches], [labels for _, labels in batches])
    counts = evaluate(model, split.test, loss=cross_entropy, device=torch.device("cpu"))
    assert counts.accuracy is not None
    return round(100 * counts.accuracy, 2)


def _stages(model: nn.Module, table: Pipeline, lr: float) -> list[Stage]:
    modules = cut_model(model, table, count_layers(model, table, torch.empty), [])
    needs = check(table.schedule_of(int(table.micro_batches)))
    stages = []
    for number, (module, need) in enumerate(zip(modules, needs, strict=True)):
        optimizer = torch.optim.SGD(module.parameters(), lr=lr, momentum=_MOMENTUM)
        loss = cross_entropy if number == len(modules) - 1 else None
        stages.append(Stage(module, WeightStashing(optimizer, bound=need.versions), loss=loss))
    return stages
