"""Malicious clients that speak the real wire, through the public API of clients with loops of their own."""

from pathlib import Path

import numpy as np
import torch
from torch import nn

from fedring.client import Federation, RoundOver, Task, connect
from fedring.client.policy.secret import ClientSecret
from fedring.client.round_plan import plan_of
from fedring.codec.schema import Vectors
from fedring.data import Samples
from fedring.train.loop import train
from fedring.train.losses import cross_entropy
from fedring.train.optimizers import sgd
from fedring.train.plan import Plan
from fedring.train.tensors.state import fill, read_vectors, schema_of
from tests.attacks.attacker import Attacker
from tests.attacks.formulas import Float32

_CPU = torch.device("cpu")


def attacker_session(server: str, client_id: str, folder: Path) -> Federation:
    """Return a session with a server, as any script would open one."""
    return connect(server=server, client_id=client_id, state_dir=folder / client_id)


def attack(federation: Federation, attacker: Attacker, model: nn.Module, honest: dict[str, Samples]) -> None:
    """Attack each round until the federation is closed.

    Args:
        federation: the session with the server.
        attacker: what to do.
        model: the job's model, which is overwritten.
        honest: the samples of the honest clients by their ids. An attacker that needs to know what they send trains as
            they do.
    """
    for task in federation:
        try:
            task.load_into(model)
            _take_part(task, attacker, model, honest)
        except RoundOver:
            continue


_NONE = ClientSecret(lambda: bytes(32))
"""In the place of the clients' secrets, which nobody knows: they are not used in jobs without masks and noise."""


def _take_part(task: Task, attacker: Attacker, model: nn.Module, honest: dict[str, Samples]) -> None:
    schema, base = schema_of(model), read_vectors(model)

    def learn(samples: Samples, plan: Plan) -> Float32:
        fill(model, schema, base)
        train(model, samples, plan, loss=cross_entropy, optimizer_factory=sgd, device=_CPU)
        return read_vectors(model).parameters - base.parameters

    update, count = attacker.send(
        lambda samples: learn(samples, task.plan),
        lambda: np.stack([learn(samples, plan_of(task.command, name, _NONE)) for name, samples in honest.items()]),
    )
    fill(model, schema, Vectors(base.parameters + update, base.buffers))
    task.submit(model, samples=count)
