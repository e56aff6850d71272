"""Declared jobs: a job names its parts, the client trains with them and survives whatever the job's code does."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.unit.training_client import client, plug_in, user_module
from torch import nn

from fedring.client import ClientConfig, Federation
from fedring.client.consent.orders import Followed, Permit
from fedring.client.training.trainer import DeclaredTrainer
from fedring.offers import offers
from fedring.train.jobs.job import Job
from fedring.train.models import digits_mlp
from fedring.train.orders.signed_job import order_of
from fedring.train.tensors.sharing import Sharing
from fedring.train.tensors.state import frozen_digest, read_vectors, schema_of, split
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

SECONDS = 60.0
JOB: dict[str, Any] = {
    "mode": "federated",
    "rounds": 2,
    "model": "fedring.train.models:digits_mlp",
    "model_args": "{}",
    "data": "fedring.data:digits",
    "loss": "fedring.train.losses:cross_entropy",
    "optimizer": "fedring.train.optimizers:sgd",
    "partition": "iid",
    "alpha": 0.5,
}


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Use one thread: on a busy machine, several that wait for cores take seconds for what one does in milliseconds."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model() -> nn.Module:
    return digits_mlp()


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An empty module of the user."""
    return user_module(monkeypatch)


def job(**fields: Any) -> pb.JobSpec:
    return pb.JobSpec(**JOB | fields)


def test_a_declared_job_is_trained_and_evaluated(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    with client(settings, partition_index=1, partition_count=4):
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, job=job(), epochs=3))
        header, _ = server.accepted.get(timeout=SECONDS)
        server.send(pb.ServerEvent(evaluate=server.evaluation(1, job=job(), round=1)))
        report = server.evaluations.get(timeout=SECONDS)
    assert header.packets[0].num_samples in (359, 360)
    assert 0 < header.metrics["accuracy"] <= 1
    assert header.train_seconds > 0
    assert (report.total, report.correct <= report.total) == (90, True)


def test_names_in_the_configuration_take_precedence_and_are_trusted(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, module: ModuleType
) -> None:
    def my_trainer(model: nn.Module, samples: Any, plan: Any) -> int:
        return 17

    with client(settings, trainer=plug_in(module, my_trainer)):
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, job=job()))
        header, _ = server.accepted.get(timeout=SECONDS)
    assert header.packets[0].num_samples == 17


def test_data_and_model_stay_loaded_from_job_to_job(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, module: ModuleType
) -> None:
    loads = []

    def my_data(root: Path | None, download: bool) -> Any:
        from fedring.data import digits

        loads.append(root)
        return digits()

    with client(settings, data=plug_in(module, my_data)):
        server.joins.get(timeout=SECONDS)
        for round_, number in ((1, 1), (2, 1), (3, 2)):
            server.train(server.command(model, round_=round_, job=job(job_id=number, name=f"job {number}")))
            server.accepted.get(timeout=SECONDS)
    assert len(loads) == 1


@pytest.mark.parametrize("way", ["trainer", "evaluator"])
def test_a_client_whose_code_changes_frozen_tensors_sends_nothing_of_it_and_recovers(
    server: "ScriptedServer", settings: dict[str, Any], module: ModuleType, way: str
) -> None:
    calls: list[int] = []

    def half_frozen() -> nn.Module:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 10))
        model[1].requires_grad_(False)
        return model

    def spoil(model: Any, samples: Any, *rest: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            model[1].weight.data.add_(1)
        return 1 if way == "trainer" else {"num_samples": 1, "loss": 0.5}

    model = half_frozen()
    parts = split(model, Sharing(frozen_stay=True))
    names = {"model": plug_in(module, half_frozen), way: plug_in(module, spoil)}
    wanted = job(frozen_digest=frozen_digest(model, parts.frozen))
    with client(settings, **names):
        server.joins.get(timeout=SECONDS)
        command = server.command(model, names=parts.shared.names, job=wanted)
        if way == "trainer":
            server.train(command)
            failure = server.failures.get(timeout=SECONDS)
            assert failure.reason == "frozen_changed"
            assert "the values of frozen tensors were changed here" in failure.detail
        else:
            server.send(pb.ServerEvent(evaluate=server.evaluation(1, job=wanted, round=1)))
            assert server.evaluations.get(timeout=SECONDS).total == 0
        server.train(server.command(model, round_=2, names=parts.shared.names, job=wanted))
        assert server.accepted.get(timeout=SECONDS)[0].round == 2


@offers("data", "trainer")
def broken(*arguments: Any) -> Any:
    raise RuntimeError("out of luck")


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"model": "os:getcwd"}, "not_offered"),
        ({"data": "fedring.data:nothing"}, "not_offered"),
        ({"data": "my_project:broken"}, "no_data"),
        ({"trainer": "my_project:broken"}, "train_error"),
        ({"mode": "sideways"}, "unknown_mode"),
        ({"model_args": '{"colour": 3}'}, "bad_argument"),
        ({"model_args": '{"hidden": -1}'}, "no_model"),
        ({"optimizer_args": '{"colour": 3}'}, "bad_argument"),
        ({"optimizer_args": '{"weight_decay": -1.0}'}, "bad_optimizer"),
    ],
)
def test_a_job_that_fails_is_reported_and_the_next_one_is_trained(
    server: "ScriptedServer",
    settings: dict[str, Any],
    model: nn.Module,
    module: ModuleType,
    fields: dict[str, str],
    reason: str,
) -> None:
    plug_in(module, broken)
    with client(settings, trusted=["fedring", "my_project"]):
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, round_=1, job=job(**fields)))
        failure = server.failures.get(timeout=SECONDS)
        server.train(server.command(model, round_=2, job=job()))
        assert server.accepted.get(timeout=SECONDS)[0].round == 2
    assert (failure.round, failure.reason) == (1, reason)


class Silent(Exception):
    """An error that cannot say what it is."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [ValueError("cannot read scan-\udcff.png"), Silent()], ids=["surrogate", "silent"])
@pytest.mark.parametrize("part", ["trainer", "evaluator", "data"])
def test_an_error_whose_text_cannot_be_sent_ends_its_round_and_not_the_client(
    server: "ScriptedServer",
    settings: dict[str, Any],
    model: nn.Module,
    module: ModuleType,
    part: str,
    error: Exception,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("CRITICAL", logger="fedring")  # which the report of this test could not carry either

    def fails(*arguments: Any) -> Any:
        raise error

    spoilt = job(**{part: plug_in(module, offers("data", "trainer", "evaluator")(fails))})
    with client(settings, trusted=["fedring", "my_project"]):
        server.joins.get(timeout=SECONDS)
        command = server.command(model, round_=1, job=spoilt)
        if part == "evaluator":
            server.send(pb.ServerEvent(evaluate=server.evaluation(1, job=spoilt, round=1)))
            told = server.evaluations.get(timeout=SECONDS).failure
        else:
            server.train(command)
            told = server.failures.get(timeout=SECONDS).detail
        server.train(server.command(model, round_=2, job=job()))
        assert server.accepted.get(timeout=SECONDS)[0].round == 2
    assert ("scan-\\udcff.png" if isinstance(error, ValueError) else "cannot be told" if part != "data" else "") in told


@pytest.mark.parametrize("way", ["trainer", "evaluator"])
def test_code_that_fails_in_the_middle_of_a_change_of_its_model_costs_no_later_round(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, module: ModuleType, way: str
) -> None:
    calls: list[int] = []

    def halved(model: nn.Module, *rest: Any) -> Any:
        calls.append(1)
        if len(calls) == 1:
            model.half()
            raise MemoryError
        return 1

    with client(settings, **{way: plug_in(module, halved)}):
        server.joins.get(timeout=SECONDS)
        command = server.command(model, round_=1, job=job())
        if way == "trainer":
            server.train(command)
            assert server.failures.get(timeout=SECONDS).reason == "out_of_memory"
        else:
            server.send(pb.ServerEvent(evaluate=server.evaluation(1, job=job(), round=1)))
            assert server.evaluations.get(timeout=SECONDS).total == 0
        server.train(server.command(model, round_=2, job=job()))
        assert server.accepted.get(timeout=SECONDS)[0].round == 2


def test_code_that_changes_the_working_directory_leaves_the_state_where_it_is(
    server: "ScriptedServer",
    settings: dict[str, Any],
    model: nn.Module,
    module: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()

    def moves(model: nn.Module, samples: Any, plan: Any) -> int:
        os.chdir(tmp_path / "elsewhere")
        return 1

    with client(settings | {"state_dir": "state"}, trainer=plug_in(module, moves)):
        server.joins.get(timeout=SECONDS)
        for round_ in (1, 2):
            server.train(server.command(model, round_=round_, job=job(), encoding="int8"))
            assert server.accepted.get(timeout=SECONDS)[0].round == round_
    assert list((tmp_path / "elsewhere").iterdir()) == []
    assert list((tmp_path / "state").glob("kept-*"))


def test_a_signed_job_starts_from_its_seed_however_often_a_server_asks(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    torch.manual_seed(7)
    honest, schema = digits_mlp(), schema_of(model)
    server.publish(1, schema, read_vectors(model))
    server.publish(2, schema, read_vectors(honest))
    order = order_of(Job.model_validate({"start": "fresh", "seed": 7}), server.run_id, 0.0)
    config = ClientConfig(**settings)
    declared, results = DeclaredTrainer(config), []
    with Federation(config) as federation:
        server.joins.get(timeout=SECONDS)
        for round_, version in enumerate((1, 1, 2, 2, 1), 1):
            server.train(server.command(model, round_=round_, model_version=version, job=job(seed=7)))
            task = next(federation)
            task.permit = Permit("ann", order.nonce, order, Followed(1, order.until, {}), starts_fresh=True)
            declared.train(task)
            results.append(task.end.result)
    assert results == ["failed", "failed", "accepted", "accepted", "failed"]
    assert {server.failures.get(timeout=SECONDS).reason for _ in range(3)} == {"other_start"}


@pytest.mark.parametrize("name", ["name", "level", "round"])
def test_a_metric_may_have_the_name_of_something_else_in_the_log(
    server: "ScriptedServer",
    settings: dict[str, Any],
    model: nn.Module,
    module: ModuleType,
    name: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")

    def measured(model: nn.Module, samples: Any, plan: Any) -> Any:
        return {"num_samples": 1, name: 2.5, "f1": 0.5}

    with client(settings, trainer=plug_in(module, measured)):
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, round_=1, job=job()))
        assert server.accepted.get(timeout=SECONDS)[0].metrics[name] == 2.5
        server.train(server.command(model, round_=2, job=job()))
        server.accepted.get(timeout=SECONDS)
    assert server.failures.empty()
    accepted = next(vars(record) for record in caplog.records if "update accepted" in record.getMessage())
    assert (accepted["round"], accepted["f1"]) == (1, 0.5)
    assert accepted.get(name) != 2.5


def test_a_model_with_another_schema_is_reported(server: "ScriptedServer", settings: dict[str, Any]) -> None:
    other = nn.Linear(64, 10)
    server.publish(1, schema_of(other), read_vectors(other))
    with client(settings):
        server.joins.get(timeout=SECONDS)
        server.train(server.command(other, job=job()))
        assert server.failures.get(timeout=SECONDS).reason == "wrong_schema"


def test_a_model_that_cannot_be_evaluated_is_reported_without_counts(
    server: "ScriptedServer", settings: dict[str, Any]
) -> None:
    with client(settings):
        server.joins.get(timeout=SECONDS)
        command = pb.EvaluateCmd(job=job(data="os:getcwd"), round=1, model_version=1, deadline_seconds=600)
        server.send(pb.ServerEvent(evaluate=command))
        assert server.evaluations.get(timeout=SECONDS).total == 0


def test_a_round_that_ends_stops_the_training(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, module: ModuleType
) -> None:
    training = threading.Event()

    def endless_loss(outputs: Any, labels: Any) -> Any:
        training.set()
        return outputs.square().mean()

    with client(settings, loss=plug_in(module, endless_loss)):
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, round_=1, job=job(), epochs=1_000_000, lr=1e-6))
        assert training.wait(SECONDS)
        server.send(pb.ServerEvent(round_ended=pb.RoundEnded(round=1, reason="stopped")))
        server.train(server.command(model, round_=2, job=job()))
        assert server.accepted.get(timeout=SECONDS)[0].round == 2
