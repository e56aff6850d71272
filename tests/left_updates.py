"""Clients that deliver updates, or leave them behind on disk."""

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from numpy.typing import NDArray
from torch import nn

from fedring.client import Federation, RoundOver, Task, connect
from fedring.rpc.errors import FedringError, UnknownRound
from fedring.train.tensors.state import read_vectors, schema_of, write_vectors
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer


SECONDS = 60.0


def train(task: Task, model: nn.Module, seed: int) -> NDArray[np.float32]:
    """Add random numbers to the model, and return them."""
    task.load_into(model)
    start = read_vectors(model)
    move = np.random.default_rng(seed).normal(size=start.parameters.size).astype(np.float32)
    moved = start.parameters + move
    write_vectors(model, schema_of(model), type(start)(moved, start.buffers))
    return moved - start.parameters


def take_part(
    server: "ScriptedServer",
    federation: Federation,
    model: nn.Module,
    round_: int = 1,
    encoding: str = "fp32",
    epoch: int = 0,
) -> NDArray[np.float32]:
    """Train in a round and submit; return what the training added to the model."""
    server.train(server.command(model, round_=round_, encoding=encoding, epoch=epoch))
    task = next(federation)
    move = train(task, model, round_)
    task.submit(model, samples=1)
    return move


def leave_behind(server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, *, accepted: bool) -> Path:
    """Return the state folder of a client that was killed while it uploaded the update of round 1."""
    died = Path(settings["state_dir"]).with_name("died")
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, round_=1, encoding="fp32_sparse"))
        task = next(federation)
        train(task, model, 1)

        def copy(header: pb.UpdateHeader) -> FedringError | None:
            shutil.copytree(settings["state_dir"], died)
            return None if accepted else UnknownRound("")

        server.on_header = copy
        if accepted:
            task.submit(model, samples=1)
        else:
            with pytest.raises(RoundOver):
                task.submit(model, samples=1)
    server.on_header = lambda header: None
    settings["state_dir"] = died
    return died
