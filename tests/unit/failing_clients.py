"""Clients of secure aggregation, one of which has a class that the others lack."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from tests.honest_clients import BLOCK, LEVELS, STEP, new_model
from tests.ledgers import account_in
from tests.secure_server import SecureServer
from tests.secure_sums import peers_of
from tests.unit.training_client import client, plug_in, user_module
from torch import Tensor, nn

from fedring.client import Federation
from fedring.data import Samples, Split
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

NAMES = ("ann", "bob", "cat")
HOLDER = "cat"
CLASS = 3
"""The class that only the holder has samples of."""
SAMPLES = 12


class Clients:
    """Clients in threads, each on samples of its own.

    Args:
        server: theirs.
        folder: where their state folders are.
        module: of the user, from which they take their model and their data.
    """

    def __init__(self, server: SecureServer, folder: Path, module: ModuleType) -> None:
        self.server, self.folder, self.module = server, folder, module
        self._stacks: dict[str, ExitStack] = {}

    def start(self, name: str, **keys: Any) -> Federation:
        """Start a client with these keys, and wait until it is in session."""

        def data(root: Any, download: bool) -> Split:
            return Split(samples_of(name), samples_of(name), 7)

        data.__name__ = f"data_of_{name}"
        given: dict[str, Any] = {"server": self.server.address, "client_id": name, "state_dir": self.folder / name}
        given |= {"data": plug_in(self.module, data), "model": plug_in(self.module, new_model)} | keys
        self._stacks[name] = ExitStack()
        federation = self._stacks[name].enter_context(client(given))
        self.server.until(lambda: name in self.server.matched)
        return federation

    def start_all(self, **keys: Any) -> dict[str, Federation]:
        """Start all clients."""
        return {name: self.start(name, **keys) for name in NAMES}

    def stop(self, name: str) -> None:
        """Stop a client, and wait until the server knows."""
        self._stacks.pop(name).close()
        self.server.gone(name)

    def close(self) -> None:
        """Stop all clients that run."""
        for stack in self._stacks.values():
            stack.close()


@contextmanager
def running(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clients]:
    """Run a server and its clients, none of which may contradict itself."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with SecureServer() as server:
            clients = Clients(server, folder, user_module(monkeypatch))
            yield clients
            clients.close()
        assert server.contradictions == []
    finally:
        torch.set_num_threads(threads)


def samples_of(name: str) -> Samples:
    """Return a client's samples; only the holder has some of its class."""
    drawn = torch.Generator().manual_seed(sum(name.encode()))
    labels = torch.arange(SAMPLES) % 3
    labels[:4] = CLASS if name == HOLDER else 0
    return Samples(torch.rand(SAMPLES, 5, generator=drawn), labels)


def overflowing() -> nn.Module:
    """Return a model whose loss overflows on samples of one class."""
    model = new_model()
    assert isinstance(model, nn.Linear)
    with torch.no_grad():
        model.bias[CLASS] = -3e38
    return model


def job(number: int = 1, **fields: Any) -> pb.JobSpec:
    given: dict[str, Any] = {"mode": "federated", "rounds": 9, "min_results": 3, "job_id": number, "model_args": "{}"}
    given |= {"secure_aggregation": f'{{"block": {BLOCK}}}', "loss": "fedring.train.losses:cross_entropy"}
    given |= {"optimizer": "fedring.train.optimizers:sgd"} | fields
    return pb.JobSpec(**given)


def weighed(**fields: Any) -> wire.SecureRound:
    """Return a round in which updates count by their samples."""
    scales = np.full(-(-42 // BLOCK), STEP, "<f4").tobytes()
    given: dict[str, Any] = {"scales": scales, "block": BLOCK, "levels": LEVELS, "max_weight": 1000}
    return wire.SecureRound(**given | fields)


def ask(server: SecureServer, round_: int, **fields: Any) -> None:
    """Ask all clients for a round, and wait for their updates or failures."""
    server.begin(round_, NAMES, **{"job": job(), "secure": weighed()} | fields)
    server.share(round_)
    for name in NAMES:
        server.step(name, round_, peers=peers_of(server.of(server.shares, round_), name))
    server.until(lambda: len(server.of(server.payloads, round_)) + len(server.of(server.failures, round_)) == 3)


def finish(server: SecureServer, round_: int) -> Any:
    """Take a round to its end, and return the sum of all integers."""
    server.name_survivors(round_)
    server.unmask(round_)
    return server.total(round_)


def end(server: SecureServer, round_: int) -> Any:
    """Finish a round, tell all clients, and return the sum of all integers."""
    total = finish(server, round_)
    for name in NAMES:
        server.end(name, round_, "published")
    return total


def check_nothing_seen(server: SecureServer) -> None:
    """Check that all clients have sent the same calls, fields and sizes."""
    assert server.failures == {}
    forms = [server.seen[name] for name in NAMES]
    assert forms[0] == forms[1] == forms[2]
    assert len(forms[0]) >= 4


def account(folder: Path) -> dict[str, Any]:
    known: dict[str, Any] = account_in(folder)
    return known


def holds(labels: Tensor) -> bool:
    """Return whether samples with these labels are the holder's."""
    return bool((labels == CLASS).any())
