"""A user's evaluation of published models, with `connect`: what it may return, and what its errors end."""

import asyncio
import gc
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tests.waiting import until
from torch import nn

from fedring.client import connect
from fedring.train.tensors.state import read_vectors, schema_of
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

SECONDS = 60.0


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("told", "report"),
    [
        ((8, 10, 2.5), pb.EvaluationReport(correct=8, total=10, loss_sum=2.5)),  # as before this could be absent
        ((None, 10, 2.5), pb.EvaluationReport(total=10, loss_sum=2.5, classified=0)),
        (
            {"num_samples": 4, "loss": 0.5, "f1": 0.75, "lost": float("nan")},
            pb.EvaluationReport(
                total=4,
                loss_sum=2.0,
                classified=0,
                metrics={"f1": 0.75},
                failure="the metric lost is nan: it must be a number of at most 1e+200",
            ),
        ),
    ],
)
def test_what_an_evaluation_returns_is_reported(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, told: Any, report: pb.EvaluationReport
) -> None:
    server.publish(3, schema_of(model), read_vectors(model))
    with connect(**settings, model=model, evaluate=lambda _: told) as federation:
        server.joins.get(timeout=SECONDS)
        server.send(pb.ServerEvent(evaluate=server.evaluation(3)))
        server.train(server.command(model, model_version=3))
        next(federation)
    got = server.evaluations.get_nowait()
    report.round, report.model_digest = got.round, got.model_digest
    assert got == report


def test_an_error_of_the_users_evaluation_is_told_and_the_iteration_goes_on(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, caplog: pytest.LogCaptureFixture
) -> None:
    server.publish(3, schema_of(model), read_vectors(model))

    def broken(model: nn.Module) -> tuple[int, int, float]:
        raise KeyError("no such column")

    with connect(**settings, model=model, evaluate=broken) as federation:
        server.joins.get(timeout=SECONDS)
        server.send(pb.ServerEvent(evaluate=server.evaluation(3)))
        server.train(server.command(model, model_version=3))
        assert next(federation).round == 1
    report = server.evaluations.get_nowait()
    assert (report.total, report.failure) == (0, "KeyError: 'no such column'")
    assert "no such column" in caplog.text


@pytest.mark.parametrize("table", ["secure_aggregation", "dp", "sample_dp"])
def test_under_masks_or_noise_only_the_site_learns_why_nothing_was_evaluated(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, table: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.publish(3, schema_of(model), read_vectors(model))
    order = server.evaluation(3)
    setattr(order.job, table, "{}")
    with connect(**settings, model=model, evaluate=lambda _: (1, 1, 1.0)) as federation:
        server.joins.get(timeout=SECONDS)
        server.send(pb.ServerEvent(evaluate=order))
        server.train(server.command(model, model_version=3))
        next(federation)
        registry = federation._link.metrics.registry
        assert registry.get_sample_value("fl_client_evaluations_total", {"result": "failed"}) == 1
    report = server.evaluations.get_nowait()
    assert (report.total, report.failure) == (0, "")
    assert "model 3 was not evaluated: privacy_policy" in caplog.text


def kept_reports() -> int:
    """Return how many tasks are in memory that have reported an evaluation."""
    gc.collect()  # those of other tests may be left in cycles
    tasks = [each for each in gc.get_objects() if isinstance(each, asyncio.Task)]
    return sum("report_evaluation" in repr(task.get_coro()) for task in tasks)


def test_a_client_that_does_not_evaluate_keeps_nothing_of_what_it_has_answered(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    server.publish(3, schema_of(model), read_vectors(model))
    before = kept_reports()
    with connect(**settings):
        server.joins.get(timeout=SECONDS)
        for _ in range(9):
            server.send(pb.ServerEvent(evaluate=server.evaluation(3)))
            assert server.evaluations.get(timeout=SECONDS).total == 0
        until(lambda: kept_reports() <= before + 1)
