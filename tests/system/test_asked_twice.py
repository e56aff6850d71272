"""A server that asks for the same twice, of all clients and of all but one: the difference would be an update."""

import hashlib
import logging
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import nn
from torch.utils.data import TensorDataset

from fedring.client import Task
from fedring.client.policy.secret import SECRET_FILE
from fedring.train.loop import train
from fedring.train.losses import cross_entropy
from fedring.train.optimizers import sgd
from fedring.v1 import federation_pb2 as pb
from tests.honest_clients import STEP, HonestClient, new_model
from tests.secure_server import SecureServer
from tests.secure_sums import names_of, survivors_of

NAMES = names_of(4)
VICTIM, OTHERS = NAMES[-1], NAMES[:-1]
TASK: dict[str, Any] = {"lr": 1.0, "seed": 7}
POLICY = {"privacy": {"min_clients": 3}}


class Pupil(HonestClient):
    """A client that learns from samples of its own, with the loop of fl-client."""

    def __init__(self, address: str, name: str, folder: Path, **settings: Any) -> None:
        super().__init__(address, name, folder, **settings)
        self.state_dir.mkdir()
        (self.state_dir / SECRET_FILE).write_bytes(hashlib.sha256(name.encode()).digest())
        (self.state_dir / SECRET_FILE).chmod(0o600)
        self.updates: dict[int, NDArray[np.float32]] = {}  # the change of the parameters, by round

    def learn(self, task: Task, model: nn.Module) -> None:
        drawn = torch.Generator().manual_seed(sum(self.name.encode()))
        inputs = torch.randn(64, 5, generator=drawn)
        labels = (inputs @ torch.randn(5, 7, generator=drawn)).argmax(1)
        start = nn.utils.parameters_to_vector(model.parameters()).detach().clone()
        samples, device = TensorDataset(inputs, labels), torch.device("cpu")
        train(model, samples, task.plan, loss=cross_entropy, optimizer_factory=sgd, device=device)
        learned = nn.utils.parameters_to_vector(model.parameters()).detach() - start
        self.updates[task.round] = learned.numpy()


Pupils = dict[str, Pupil]


@pytest.fixture
def server() -> Iterator[SecureServer]:
    """Yield a server that listens."""
    with SecureServer() as server:
        yield server


@pytest.fixture
def start(server: SecureServer, tmp_path: Path) -> Iterator[Callable[..., Pupils]]:
    """Yield a function that starts four clients, which are stopped in the end."""
    with ExitStack() as stack:
        yield lambda **settings: {
            name: stack.enter_context(Pupil(server.address, name, tmp_path, **settings)) for name in NAMES
        }


def ask(server: SecureServer, round_: int, names: list[str], **fields: Any) -> NDArray[np.int64]:
    """Return the sum of the clients' integers in a round that takes along nothing of those before."""
    return server.run_round(round_, names, residual_after=round_ - 1, **fields)


def refused(server: SecureServer, round_: int, names: list[str], **fields: Any) -> set[str]:
    """Return the reasons for which all clients but the victim do not sign who survives."""
    server.begin(round_, names, residual_after=round_ - 1, **fields)
    server.share(round_)
    server.pair(round_)
    survivors = sorted(names)
    for name in survivors:
        server.step(name, round_, survivors=survivors_of(survivors))
    return {server.failure(round_, name) for name in survivors if name in OTHERS}


def error_of(found: NDArray[np.int64], update: NDArray[np.float32]) -> float:
    """Return the largest error of an update that was found as a difference of two sums, in steps."""
    return float(np.abs(found - update / STEP).max())


def nudged() -> nn.Module:
    """Return the model that all rounds begin with, of which one value is the next larger number."""
    model = new_model()
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] = torch.finfo(torch.float32).smallest_normal
    return model


EVASIONS: dict[str, dict[str, Any]] = {
    "only the round": {},
    "a larger learning rate": {"lr": TASK["lr"] * (1 + 1e-7)},
    "another seed": {"seed": 8},
    "another job": {
        "job": pb.JobSpec(mode="federated", job_id=2, rounds=9, min_results=3, secure_aggregation='{"block": 16}')
    },
    "other steps": {"batch_size": 9},
}


@pytest.mark.parametrize("evasion", EVASIONS)
def test_clients_do_not_sign_for_all_but_one_after_they_have_helped_to_unmask_all(
    server: SecureServer, start: Callable[..., Pupils], evasion: str
) -> None:
    start(**POLICY)
    ask(server, 1, NAMES, **TASK)
    assert refused(server, 2, OTHERS, **TASK | EVASIONS[evasion]) == {"asked_twice"}
    assert server.of(server.signatures, 2) == {}


def test_a_swap_of_one_client_for_another_is_refused_too(
    server: SecureServer, start: Callable[..., Pupils], tmp_path: Path
) -> None:
    start(**POLICY)
    with Pupil(server.address, "c999", tmp_path, **POLICY):
        ask(server, 1, NAMES, **TASK)
        assert refused(server, 2, [*OTHERS, "c999"], **TASK) == {"asked_twice"}


def test_a_client_that_is_started_again_remembers_what_it_has_released(
    server: SecureServer, start: Callable[..., Pupils]
) -> None:
    pupils = start(**POLICY)
    ask(server, 1, NAMES, **TASK)
    for pupil in pupils.values():
        pupil.__exit__(None, None, None)
        server.gone(pupil.name)
        pupil.__enter__()
    server.until(lambda: server.matched >= set(NAMES))
    assert refused(server, 2, OTHERS, **TASK) == {"asked_twice"}


def test_before_any_release_a_retry_with_other_survivors_is_free(
    server: SecureServer, start: Callable[..., Pupils]
) -> None:
    start(**POLICY)
    server.begin(1, NAMES, **TASK)
    server.share(1)
    server.pair(1)
    server.name_survivors(1)  # all have signed, and nobody was asked for shares
    ask(server, 2, OTHERS, **TASK)
    assert server.failures == {}
    assert refused(server, 3, NAMES, **TASK) == {"asked_twice"}


def test_the_same_survivors_and_another_model_are_open_after_a_release(
    server: SecureServer, start: Callable[..., Pupils]
) -> None:
    start(**POLICY)
    ask(server, 1, NAMES, **TASK)
    assert refused(server, 2, OTHERS, **TASK) == {"asked_twice"}
    ask(server, 3, NAMES, **TASK)
    later = new_model()
    nn.utils.vector_to_parameters(torch.ones(42), later.parameters())
    ask(server, 4, OTHERS, model=later, **TASK)
    assert {round_ for round_, _ in server.failures} == {2}


def test_a_site_without_a_policy_warns_and_goes_on(
    server: SecureServer, start: Callable[..., Pupils], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    start()
    ask(server, 1, NAMES, **TASK)
    assert "asked_twice" not in caplog.text
    ask(server, 2, OTHERS, **TASK)
    (warning, *_) = [record.getMessage() for record in caplog.records if "asked_twice" in record.getMessage()]
    assert f"differ from those by 1 client (without {VICTIM})" in warning
    assert "let the same clients survive, or start from another model" in warning


def test_a_difference_shows_an_update_to_half_a_step_unless_clients_draw_from_secrets_of_their_own(
    server: SecureServer, start: Callable[..., Pupils], monkeypatch: pytest.MonkeyPatch
) -> None:
    pupils = start()
    found = ask(server, 1, NAMES, **TASK) - ask(server, 2, OTHERS, **TASK)
    assert error_of(found, pupils[VICTIM].updates[1]) > 2
    with monkeypatch.context() as patch:  # as if the same were drawn whatever the task
        patch.setattr("fedring.client.policy.secret.work_digest", lambda command: bytes(32))
        found = ask(server, 3, NAMES, **TASK) - ask(server, 4, OTHERS, **TASK)
        assert error_of(found, pupils[VICTIM].updates[3]) <= 1


@pytest.mark.parametrize("batch_size", [8, 64])
def test_a_base_that_differs_in_one_value_is_another_one_and_only_noise_hides_the_difference(
    server: SecureServer, start: Callable[..., Pupils], batch_size: int
) -> None:
    pupils, task = start(**POLICY), TASK | {"batch_size": batch_size}
    found = ask(server, 1, NAMES, **task) - ask(server, 2, OTHERS, model=nudged(), **task)
    assert server.failures == {}
    update = pupils[VICTIM].updates[1]
    error, correlation = error_of(found, update), np.corrcoef(found, update)[0, 1]
    print(f"the largest error is {error:.2f} steps, the correlation {correlation:.3f}")
    if batch_size == 8:
        assert error > 2
        assert correlation > 0.5
    else:  # all samples are in one batch: nothing is drawn but how values are rounded, each to one of two neighbours
        assert 1 < error < 1 + len(OTHERS)
