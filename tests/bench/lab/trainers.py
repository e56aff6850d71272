"""A job whose training takes no time, so that what is left is the cost of the system itself."""

from typing import Any

import torch
from torch import nn

from fedring.data import Split, digits
from fedring.offers import offers


def vector_job(size: int, *, clients: int = 1, **keys: Any) -> dict[str, Any]:
    """Return the keys of a job for a model of `size` parameters, in which all clients take part."""
    return {
        "model": "fedring.train.models:vector",
        "model_args": {"size": size},
        "trainer": "tests.bench.lab.trainers:barely_changed",
        "data": "tests.bench.lab.trainers:data",
        "encoding": "fp32",
        "min_clients": clients,
        "min_clients_to_aggregate": clients,
        "evaluate": False,
        **keys,
    }


@offers("trainer")
def barely_changed(model: nn.Module, samples: Any, plan: Any) -> int:
    """Change one value of the model, each client by another step.

    Nobody would fetch a model that is the same again, and equal updates would share one file on the server.
    """
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1.0 + plan.seed % 1024 / 1024
    return 1


@offers("trainer")
def noisy(model: nn.Module, samples: Any, plan: Any) -> int:
    """Change all values of the model at random."""
    with torch.no_grad():
        values = next(model.parameters()).view(-1)
        values += 1e-3 * torch.randn(len(values), generator=torch.Generator().manual_seed(plan.seed))
    return 1


@offers("data")
def data(root: Any = None, download: bool = False) -> Split:
    """Return some samples, since every client needs some."""
    return digits(root, download)
