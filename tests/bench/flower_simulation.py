"""Flower's in-process simulation of the work of tests.bench.simulation: a script for an environment with flwr, torch.

    python flower_simulation.py SIZE CLIENTS ROUNDS

All clients take part in each round. With the size `tiny`, a client does one step of SGD on 8 samples, of a perceptron
with 9,910 parameters; with `cnn`, five steps on 20 each, of a network with 1,199,882. Each process builds its model
once. Prints one JSON line with the seconds of the rounds, after a first one that starts the processes.
"""

import importlib
import json
import sys
import time
from typing import Any

import torch
from torch import nn

flwr: Any = importlib.import_module("flwr")  # which the environment of the tests does not have
app: Any = importlib.import_module("flwr.app")
clientapp: Any = importlib.import_module("flwr.clientapp")
serverapp: Any = importlib.import_module("flwr.serverapp")
simulation: Any = importlib.import_module("flwr.simulation")
strategies: Any = importlib.import_module("flwr.serverapp.strategy")

SIZES = {"tiny": (14, 8, 8, 8), "cnn": (100, 100, 20, 28)}
"""By name, the samples of each client, those that a round draws, the batch, and the pixels of a side."""

_held: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []


def network(size: str) -> nn.Module:
    """Return the model of a size."""
    if size == "tiny":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 132), nn.ReLU(), nn.Linear(132, 10))
    features = (nn.Conv2d(1, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten())
    return nn.Sequential(*features, nn.Linear(9216, 128), nn.ReLU(), nn.Linear(128, 10))


def loaded(size: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return this process's model and samples, made once."""
    if not _held:
        torch.set_num_threads(1)
        samples, _, _, side = SIZES[size]
        _held.append((network(size), torch.randn(samples, 1, side, side), torch.randint(10, (samples,))))
    return _held[0]


def train(message: Any, context: Any) -> Any:
    """Train one epoch, as a client app."""
    size = str(message.content["config"]["size"])
    model, inputs, labels = loaded(size)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    samples, count, batch, _ = SIZES[size]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    total = torch.zeros(())
    for drawn in torch.split(torch.randperm(samples)[:count], batch):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(inputs[drawn]), labels[drawn])
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        optimizer.step()
        total += loss.detach()
    metrics = app.MetricRecord({"loss": total.item() * batch / count, "num-examples": count})
    content = app.RecordDict({"arrays": app.ArrayRecord(model.state_dict()), "metrics": metrics})
    return app.Message(content=content, reply_to=message)


def main(size: str, clients: int, rounds: int) -> None:
    """Print one JSON line."""
    server, client = serverapp.ServerApp(), clientapp.ClientApp()
    client.train()(train)

    def serve(grid: Any, context: Any) -> None:
        arrays, config = app.ArrayRecord(loaded(size)[0].state_dict()), app.ConfigRecord({"size": size})
        for count in (1, rounds):
            strategy = strategies.FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=clients)
            began = time.perf_counter()
            strategy.start(grid=grid, initial_arrays=arrays, num_rounds=count, train_config=config)
            seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "version": flwr.__version__}), flush=True)

    server.main()(serve)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    simulation.run_simulation(server, client, num_supernodes=clients, backend_config=resources)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
