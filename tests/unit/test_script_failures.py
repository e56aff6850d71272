"""A server with secure aggregation learns nothing of scripts that fail with its model."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Self

import numpy as np
import pytest
import torch
from tests.honest_clients import new_model
from tests.secure_server import SecureServer
from tests.unit.failing_clients import HOLDER, NAMES, SAMPLES, Clients, ask, check_nothing_seen, end, finish, running
from torch import nn

from fedring.client import UpdateRefused, connect
from fedring.client.task import Task


@pytest.fixture
def clients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Clients]:
    """Clients that are stopped in the end."""
    with running(tmp_path, monkeypatch) as clients:
        yield clients


@pytest.fixture
def server(clients: Clients) -> SecureServer:
    """Their server."""
    return clients.server


class Script:
    """A user's script in a thread, which fails in its second round.

    Args:
        server: its server.
        folder: where its state folder is.
        way: how it fails.
        samples: what it tells load_into() of its samples.
    """

    def __init__(self, server: SecureServer, folder: Path, way: str, samples: int = 0) -> None:
        self._federation = connect(server=server.address, client_id=HOLDER, state_dir=folder / HOLDER)
        self._way, self._samples = way, samples
        self.raised: list[str] = []
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._federation.close()
        self._thread.join()

    def _run(self) -> None:
        try:
            with self._federation as federation:
                for task in federation:
                    self._train(task)
        except KeyError as error:
            self.raised.append(repr(error))

    def _train(self, task: Task) -> None:
        model = new_model()
        if task.round == 1:
            task.load_into(model)
            task.submit(model, samples=7)
            return
        if self._way != "before":
            task.load_into(model, samples=self._samples)
        match self._way:
            case "fail" | "before":
                task.fail("no_data", "Jane Doe is not among my patients")
                task.fail("again", "which changes nothing")
            case "raise":
                raise KeyError("Jane Doe")
            case "not finite":
                nn.init.constant_(next(model.parameters()), torch.nan)
                with pytest.raises(UpdateRefused, match="non_finite"):
                    task.submit(model, samples=7)
            case "no array":
                with pytest.raises(ValueError, match="weight is of the kind"):
                    task.submit({"weight": np.zeros(3, np.int64)}, samples=7)
            case "nonsense":
                with pytest.raises(ValueError, match="samples is 0"):
                    task.submit(model, samples=0)


@pytest.mark.parametrize("way", ["fail", "nothing", "raise", "not finite", "no array", "nonsense"])
@pytest.mark.parametrize(("samples", "weight"), [(0, 7), (5, 5)], ids=["as-before", "as-told"])
def test_a_script_that_fails_delivers_zeros_too(
    server: SecureServer, clients: Clients, way: str, samples: int, weight: int
) -> None:
    for name in NAMES[:2]:
        clients.start(name)
    with Script(server, clients.folder, way, samples) as script:
        ask(server, 1)
        end(server, 1)
        ask(server, 2)
        check_nothing_seen(server)
        if way != "raise":  # else the script is gone
            assert finish(server, 2)[-1] == 2 * SAMPLES + weight
    assert script.raised == (["KeyError('Jane Doe')"] if way == "raise" else [])


def test_a_script_that_fails_before_the_model_is_there_says_so(server: SecureServer, clients: Clients) -> None:
    for name in NAMES[:2]:
        clients.start(name)
    with Script(server, clients.folder, "before"):
        ask(server, 1)
        end(server, 1)
        ask(server, 2)
        assert server.failures == {(2, HOLDER): "again"}
