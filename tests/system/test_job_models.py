"""The models of jobs on a real fl-server: how versions follow each other, momentum, evaluation, and pruning."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedring.data import digits
from fedring.train.evaluation import evaluate
from fedring.train.losses import cross_entropy
from fedring.train.models import vector
from fedring.train.names.offered import collect
from fedring.train.names.seam import build_model
from fedring.v1 import federation_pb2 as fed
from tests.fleets import Control, Fleet
from tests.system.wire import (
    SIZE,
    Refused,
    WireClient,
    deliver,
    outcome,
    parameters,
    payload_of,
    published_version,
    run,
    vector_job,
)

ONES = np.ones(SIZE, np.float32)
KEPT = 4
STEPS = (1.0, 0.5, -0.25)
MOMENTUM = {"server_optimizer": {"name": "SGD", "args": {"lr": 1.0, "momentum": 0.9}}, "rounds": 3}
Clients = Callable[..., list[WireClient]]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start one fl-server for all tests of this file."""
    job = {"model": "fedring.train.models:vector", "model_args": {"size": SIZE}, "min_clients": 1, "evaluate": False}
    with Fleet(tmp_path_factory.mktemp("models"), {"keep_models": KEPT, "keep_jobs": 1, "job": job}) as fleet:
        yield fleet


def test_a_job_with_another_model_starts_from_a_new_model(control: Control, clients: Clients) -> None:
    (client,) = clients()
    job_id, events = run(control)
    command = deliver(client)
    outcome(control, job_id, events)
    job_id, events = run(control, model_args={"size": 7})
    other = client.expect("train")
    assert other.schema_hash != command.schema_hash
    assert other.model_version == command.model_version + 2
    np.testing.assert_array_equal(parameters(client, other.model_version), np.zeros(7))
    payload = payload_of(ONES[:7])
    client.push(client.header(other, payload), payload)
    outcome(control, job_id, events)
    np.testing.assert_array_equal(parameters(client), ONES[:7])


def test_only_the_newest_models_are_kept(control: Control, clients: Clients) -> None:
    (client,) = clients()
    job_id, events = run(control, rounds=KEPT + 2)
    for _ in range(KEPT + 2):
        deliver(client)
    outcome(control, job_id, events)
    versions = [model.version for model in control.models()]
    assert versions == list(range(versions[0], versions[0] - KEPT, -1))
    for version in versions:
        client.fetch(version)
    with pytest.raises(Refused, match="unknown_model"):
        client.fetch(versions[-1] - 1)
    rounds = control.rounds(job_id=job_id)
    assert len(rounds) == KEPT + 2  # the history of rounds is kept


def test_momentum_follows_its_formula_and_survives_a_restart(server: Fleet, control: Control, clients: Clients) -> None:
    (client,) = clients()
    ends = []
    for size, restart in ((SIZE + 1, False), (SIZE + 2, True)):
        job_id, events = run(control, model_args={"size": size}, **MOMENTUM)
        velocity = expected = np.float32(0)
        for number, step in enumerate(STEPS):
            version = published_version(control, deliver(client, np.full(size, step, np.float32)).round)
            velocity = np.float32(0.9) * velocity + np.float32(step)
            expected = expected + velocity
            np.testing.assert_allclose(parameters(client, version), np.full(size, expected), rtol=1e-6)
            if restart and number == 1:
                client.close()
                server.restart_server()
                (client,) = clients()
        assert outcome(control, job_id, events).state == "completed"
        ends.append(parameters(client)[0])
    assert ends[0] == ends[1]


def test_the_server_evaluates_on_its_own_test_set(control: Control, clients: Clients) -> None:
    (client,) = clients()
    events = control.events()
    keys = {"model": "fedring.train.models:digits_mlp", "evaluate_on_server": True, "seed": 5}
    job_id = control.start_job(keys).job_id  # without the arguments of the default model
    command: fed.TrainCmd = client.expect("train")
    payload = payload_of(np.zeros(4810, np.float32))
    client.push(client.header(command, payload), payload)
    outcome(control, job_id, control.follow_job(job_id, events))
    (round_,) = control.rounds(job_id=job_id)
    first = build_model("fedring.train.models:digits_mlp", {}, 5, collect(["fedring"]))
    counts = evaluate(first, digits().test, loss=cross_entropy, device=torch.device("cpu"))
    assert round_.server_accuracy == counts.accuracy
    assert round_.server_loss == pytest.approx(counts.loss_sum / counts.total, rel=1e-5)


@pytest.mark.parametrize("kind", ["safetensors", "state dict"])
def test_init_path_is_used_for_the_first_model_of_an_empty_state_only(tmp_path: Path, kind: str) -> None:
    given, other = vector(SIZE), vector(SIZE)
    torch.nn.init.constant_(given.get_parameter("values"), 3.0)
    path = tmp_path / "init"
    save_file(given.state_dict(), path) if kind == "safetensors" else torch.save(given.state_dict(), path)
    with Fleet(tmp_path, {"init_path": str(path)}) as fleet, Control(fleet.control) as control:
        control.start_job(vector_job(rounds=2))
        with WireClient(fleet.listen) as client:
            command = deliver(client)
            np.testing.assert_array_equal(parameters(client, command.model_version), 3 * ONES)
            published_version(control, command.round)
        save_file(other.state_dict(), path)
        fleet.restart_server()
        with WireClient(fleet.listen) as client:
            np.testing.assert_array_equal(parameters(client, client.expect("train").model_version), 4 * ONES)
