"""The apps of Flower: a part of an app's folder, beside work.py, in an environment with flwr and torch.

The server app writes `rounds.json`, with the times of the rounds, and the last model to the folder that `out` names.
"""

import importlib
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

work: Any = importlib.import_module("fedring_beside.work")
app: Any = importlib.import_module("flwr.app")
clientapp: Any = importlib.import_module("flwr.clientapp")
serverapp: Any = importlib.import_module("flwr.serverapp")
strategies: Any = importlib.import_module("flwr.serverapp.strategy")

client = clientapp.ClientApp()
server = serverapp.ServerApp()


@client.train()  # type: ignore[untyped-decorator]
def train(message: Any, context: Any) -> Any:
    """Train one round."""
    torch.set_num_threads(1)
    told, node = context.run_config, context.node_config
    model = work.network(told["cell"])
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    number = int(message.content["config"]["server-round"])
    samples, seconds = work.train(told["cell"], model, told["root"], node["part"], told["clients"], number)
    metrics = app.MetricRecord({"seconds": seconds, "num-examples": samples})
    content = app.RecordDict({"arrays": app.ArrayRecord(model.state_dict()), "metrics": metrics})
    return app.Message(content=content, reply_to=message)


class Timed(strategies.FedAvg):  # type: ignore[misc]
    """FedAvg that notes when each round began and ended."""

    def __init__(self, folder: Path, **options: Any) -> None:
        super().__init__(**options)
        self._folder, self._rounds = folder, list[dict[str, float]]()

    def configure_train(self, *args: Any, **kwargs: Any) -> Any:
        """Note the beginning."""
        found = list(super().configure_train(*args, **kwargs))
        self._rounds.append({"began": time.time()})
        self._write()
        return found

    def aggregate_train(self, server_round: int, replies: Any) -> Any:
        """Note the end, and the longest training."""
        known = list(replies)
        result = super().aggregate_train(server_round, known)
        trained = [each.content["metrics"]["seconds"] for each in known if each.has_content()]
        self._rounds[-1] |= {"ended": time.time(), "train": max(trained), "updates": len(trained)}
        self._write()
        return result

    def _write(self) -> None:
        (self._folder / "rounds.json").write_text(json.dumps(self._rounds))


@server.main()  # type: ignore[untyped-decorator]
def serve(grid: Any, context: Any) -> None:
    """Run all rounds."""
    told = context.run_config
    folder = Path(told["out"])
    everybody = {"min_available_nodes": told["clients"], "min_train_nodes": told["clients"]}
    strategy = Timed(folder, fraction_train=1.0, fraction_evaluate=0.0, **everybody)
    arrays = app.ArrayRecord(work.network(told["cell"]).state_dict())
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=told["rounds"])
    if told["cell"] == "mnist":
        state: dict[str, Any] = {name: value.numpy() for name, value in result.arrays.to_torch_state_dict().items()}
        np.savez(folder / "model.npz", **state)
    (folder / "done").touch()
