"""Flower's in-process simulation of the work of tests.bench.simulation: a script for an environment with flwr, torch.

    python flower_simulation.py CLIENTS ROUNDS

All clients take part in each round. A client does one step of SGD on 8 samples, of a perceptron with 9,910 parameters,
which each process builds once. Prints one JSON line with the seconds of the rounds, after a first one that starts the
processes.
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

SAMPLES = 14  # of each client, of which a round draws 8
_held: list[tuple[nn.Module, torch.Tensor, torch.Tensor]] = []


def loaded() -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    """Return this process's model and samples, made once."""
    if not _held:
        torch.set_num_threads(1)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 132), nn.ReLU(), nn.Linear(132, 10))
        _held.append((model, torch.randn(SAMPLES, 1, 8, 8), torch.randint(10, (SAMPLES,))))
    return _held[0]


def train(message: Any, context: Any) -> Any:
    """Train one step, as a client app."""
    model, inputs, labels = loaded()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    drawn = torch.randperm(SAMPLES)[:8]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    loss = nn.functional.cross_entropy(model(inputs[drawn]), labels[drawn])
    loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    optimizer.step()
    metrics = app.MetricRecord({"loss": loss.item(), "num-examples": 8})
    content = app.RecordDict({"arrays": app.ArrayRecord(model.state_dict()), "metrics": metrics})
    return app.Message(content=content, reply_to=message)


def main(clients: int, rounds: int) -> None:
    """Print one JSON line."""
    server, client = serverapp.ServerApp(), clientapp.ClientApp()
    client.train()(train)

    def serve(grid: Any, context: Any) -> None:
        arrays = app.ArrayRecord(loaded()[0].state_dict())
        for count in (1, rounds):
            strategy = strategies.FedAvg(fraction_train=1.0, fraction_evaluate=0.0, min_available_nodes=clients)
            began = time.perf_counter()
            strategy.start(grid=grid, initial_arrays=arrays, num_rounds=count)
            seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "version": flwr.__version__}), flush=True)

    server.main()(serve)
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    simulation.run_simulation(server, client, num_supernodes=clients, backend_config=resources)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
