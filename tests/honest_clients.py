"""Clients of secure aggregation that tests know everything of: what they learn, and what becomes of their rounds."""

import threading
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from fedring.client import RoundOver, Task, connect
from fedring.secure.levels import to_integers
from fedring.v1 import secure_pb2 as wire

SECONDS = 60.0  # a timeout that is long enough even if the machine does nothing for a while
BLOCK, LEVELS, STEP = 16, 7, 0.25


def new_model() -> nn.Module:
    """Return the model that all rounds begin with."""
    model = nn.Linear(5, 7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


def learned(client: str, round_: int) -> NDArray[np.float32]:
    """Return what a client adds to the parameters in a round, [42]: whole levels, so that it leaves nothing out."""
    drawn = np.random.default_rng([round_, *client.encode()])
    return (STEP * drawn.integers(-LEVELS, LEVELS, 42, endpoint=True)).astype(np.float32)


def levels_of(secure: wire.SecureRound, client: str, round_: int) -> NDArray[np.int32]:
    """Return the integers that a client sends in a round, without masks, [42]."""
    return to_integers(learned(client, round_), secure, 1).integers


class HonestClient:
    """A client in a thread, which trains whatever it is asked to until the `with` block ends.

    Args:
        address: of its server.
        name: its id.
        folder: where its state folder is.
        settings: further keys of its configuration.
    """

    def __init__(self, address: str, name: str, folder: Path, **settings: Any) -> None:
        self.name, self.state_dir = name, folder / name
        self.may_submit = threading.Event()
        self.may_submit.set()
        self.starts: dict[int, NDArray[np.float32]] = {}  # the parameters that trainings began with, by their rounds
        self.over: dict[int, str] = {}  # the reason for which a round took no update, by its number
        self._settings: dict[str, Any] = {"server": address, "client_id": name, "state_dir": self.state_dir} | settings

    def __enter__(self) -> Self:
        self._federation = connect(**self._settings)
        self._thread = threading.Thread(target=self._work, name=self.name)
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.may_submit.set()
        self._federation.close()
        self._thread.join()

    def learn(self, task: Task, model: nn.Module) -> None:
        """Change the values of a model as a training would."""
        start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        torch.nn.utils.vector_to_parameters(
            start + torch.from_numpy(learned(self.name, task.round)), model.parameters()
        )

    def _work(self) -> None:
        with self._federation as federation:
            for task in federation:
                model = new_model()
                try:
                    task.load_into(model)
                    start = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
                    self.starts[task.round] = start.numpy()
                    self.learn(task, model)
                    self.may_submit.wait(SECONDS)
                    task.submit(model, samples=10)
                except RoundOver as over:
                    self.over[task.round] = over.reason
