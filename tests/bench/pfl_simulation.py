"""pfl-research's simulation of the work of tests.bench.simulation: a script for an environment with pfl and torch.

    python pfl_simulation.py SIZE CLIENTS ROUNDS

SIZE is `tiny` (a perceptron with 9,910 parameters, one step on 8 samples) or `cnn` (1,199,882 parameters, five steps on
20 samples each). All clients take part in each round, and nothing is evaluated. A client's samples are tensors that are
cut into batches once, which is the fastest that pfl offers. Prints one JSON line with the seconds of the rounds, by the
clock and of the processor, after a first one that warms up.
"""

import importlib
import importlib.metadata
import itertools
import json
import sys
import time
from typing import Any

import numpy as np
import torch
from torch import nn

averaging: Any = importlib.import_module("pfl.algorithm.federated_averaging")  # the environment of the tests has no pfl
algorithm: Any = importlib.import_module("pfl.algorithm.base")
simulated: Any = importlib.import_module("pfl.aggregate.simulate")
federated: Any = importlib.import_module("pfl.data.federated_dataset")
tensors: Any = importlib.import_module("pfl.data.pytorch")
hyperparam: Any = importlib.import_module("pfl.hyperparam")
pfl_model: Any = importlib.import_module("pfl.model.pytorch")


class Perceptron(nn.Sequential):
    """9,910 parameters."""

    shape, samples, batch = (1, 8, 8), 8, 8

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 132), nn.ReLU(), nn.Linear(132, 10))


class Convolutional(nn.Sequential):
    """1,199,882 parameters."""

    shape, samples, batch = (1, 28, 28), 100, 20

    def __init__(self) -> None:
        super().__init__(
            nn.Conv2d(1, 32, 3),
            nn.ReLU(),
            nn.Conv2d(32, 64, 3),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(9216, 128),
            nn.ReLU(),
            nn.Linear(128, 10),
        )


SIZES: dict[str, Any] = {"tiny": Perceptron, "cnn": Convolutional}


class WithLoss(nn.Module):
    """A model with the two methods that pfl asks for."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def loss(self, inputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of a batch."""
        return nn.functional.cross_entropy(self.inner(inputs), labels)

    def metrics(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, Any]:
        """Return nothing, since nothing is evaluated."""
        return {}


def main(size: str, clients: int, rounds: int) -> None:
    """Print one JSON line."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    np.random.seed(0)
    kind = SIZES[size]
    net = WithLoss(kind())
    sizes = ((kind.samples, *kind.shape), (kind.samples,))
    users = [
        tensors.PyTorchTensorDataset((torch.randn(sizes[0]), torch.randint(10, sizes[1])), user_id=str(user))
        for user in range(clients)
    ]
    turns = itertools.cycle(range(clients))
    data = federated.FederatedDataset(lambda user: users[user], lambda: next(turns))
    model = pfl_model.PyTorchModel(
        net,
        lambda parameters, lr: torch.optim.SGD(parameters, lr=lr, momentum=0.9),
        torch.optim.SGD(net.parameters(), lr=1.0),
    )
    backend = simulated.SimulatedBackend(training_data=data, val_data=None)
    params = hyperparam.NNTrainHyperParams(local_num_epochs=1, local_learning_rate=0.05, local_batch_size=kind.batch)
    for count in (1, rounds):
        wanted = algorithm.NNAlgorithmParams(
            central_num_iterations=count + 1,
            evaluation_frequency=count + 2,
            train_cohort_size=clients,
            val_cohort_size=0,
        )
        fed = averaging.FederatedAveraging()
        fed._current_central_iteration = 1  # Round 0 would evaluate.
        began, worked = time.perf_counter(), time.process_time()
        fed.run(wanted, backend, model, params, send_metrics_to_platform=False)
        seconds, processor = time.perf_counter() - began, time.process_time() - worked
    parameters = sum(p.numel() for p in net.parameters())
    version = importlib.metadata.version("pfl")
    print(
        json.dumps({"seconds": seconds, "processor": processor, "parameters": parameters, "version": version}),
        flush=True,
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
