"""Named metrics and accuracy that is not defined, from real clients to flctl, the page's facts and Prometheus."""

import json
import math
import os
import urllib.request
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fedring.rpc.errors import reason_of
from fedring.v1 import federation_pb2 as fed
from tests import forks
from tests.conftest import ROOT, path_to
from tests.fleets import Control, Fleet, run_job, until_watching
from tests.metrics_page import Page
from tests.system.wire import WireClient, outcome, payload_of, run

CODE = ROOT / "tests" / "fixtures_user_code"
JOB: dict[str, Any] = {
    "model": "user_metrics:model",
    "data": "user_metrics:texts",
    "loss": "user_metrics:loss",
    "min_clients": 2,
    "lr": 0.5,
    "batch_size": 8,
}
OWN: dict[str, Any] = {
    "trainer": "user_metrics:train",
    "evaluator": "user_metrics:evaluate",
    "evaluate_on_server": True,
    "best_by": "min eval/perplexity",
    "rounds": 2,
}
TRUSTED = {"trusted": ["fedring", "user_metrics", "own_strategy"]}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start a server and two clients that have the user's module."""
    server = {**TRUSTED, "metrics_listen": "127.0.0.1:0", "web_port": 0}
    code = Path(f"{CODE}{os.pathsep}{ROOT / 'docs' / 'examples'}")
    parts = [{**TRUSTED, "partition_index": index, "partition_count": 2} for index in range(2)]
    with Fleet(tmp_path_factory.mktemp("metrics"), server, parts, env=path_to(code)) as fleet:
        with Control(fleet.control) as control:
            until_watching(control, 2)
        yield fleet


def flctl(fleet: Fleet, *words: object) -> tuple[int, str, str]:
    """Run flctl; return its exit code, stdout and stderr."""
    done = forks.run("fedring.ctl.main", *map(str, words), "--server", fleet.control, timeout=60)
    return done.returncode, done.stdout, done.stderr


def facts(fleet: Fleet, path: str) -> Any:
    """Return what the page's server answers."""
    with urllib.request.urlopen(f"{fleet.web}{path}", timeout=60) as answer:
        return json.load(answer)


def test_a_language_model_has_a_loss_and_no_accuracy_anywhere(fleet: Fleet) -> None:
    with Control(fleet.control) as control:
        stream = control.events()
        job_id = control.start_job(JOB).job_id
        events = [event.text for event in control.follow_job(job_id, stream) if event.kind == "round_evaluated"]
        job = control.job(job_id)
        assert job.state == "completed", job.reason
        (round_,) = control.rounds(job_id=job.job_id)
        newest = control.models(limit=1)[0]
    assert (round_.eval_total, round_.eval_classified, round_.HasField("server_accuracy")) == (8, 0, False)
    assert round_.metrics["eval/loss"] == pytest.approx(round_.eval_loss_sum / 8)
    assert not newest.HasField("accuracy")
    assert newest.loss == pytest.approx(round_.eval_loss_sum / 8)
    assert any("loss" in text for text in events)
    assert not any("accuracy" in text for text in events)
    _, table, _ = flctl(fleet, "rounds", "--job", str(job.job_id))
    assert "%" not in table
    assert f"{newest.loss:.3f}" in table
    _, table, _ = flctl(fleet, "models", "list", "--limit", "1")
    assert "%" not in table
    (summary,) = facts(fleet, f"api/rounds?job={job.job_id}")["rounds"]
    assert (summary["accuracy"], summary["loss"]) == (None, pytest.approx(newest.loss))
    assert facts(fleet, "api/state")["models"][0]["accuracy"] is None
    page = Page(fleet.ready["metrics"])
    assert math.isnan(page("fl_server_model_accuracy_ratio"))
    assert page("fl_server_model_loss") == pytest.approx(newest.loss)


def test_a_users_metrics_reach_the_round_its_tables_and_prometheus(fleet: Fleet) -> None:
    with Control(fleet.control) as control:
        job = run_job(control, JOB | OWN)
        assert job.state == "completed", job.reason
        newest = control.rounds(job_id=job.job_id)[0]
    metrics = dict(newest.metrics)
    assert metrics["train/words_sum"] == 40 * 6  # all words of both clients
    assert metrics["train/rate"] == 2.0
    assert metrics["eval/seen_sum"] == metrics["server/seen_sum"] == 8
    # The mean over clients of equally many samples, and the same samples on the server.
    assert metrics["eval/loss"] == pytest.approx(metrics["server/loss"], rel=1e-5)
    assert metrics["eval/perplexity"] == pytest.approx(metrics["server/perplexity"], rel=0.1)
    assert not any("undefined" in name or "accuracy" in name for name in metrics)
    _, table, error = flctl(fleet, "rounds", "--job", str(job.job_id), "--metric", "eval/perplexity")
    assert f"{metrics['eval/perplexity']:.6g}" in table
    assert "train/words_sum" in error
    assert f"the best round of job {job.job_id} is {job.job_id}.{newest.job_round}:" in error  # the model still learns
    _, table, _ = flctl(fleet, "rounds", str(newest.round))
    assert all(name in table for name in metrics)
    _, text, _ = flctl(fleet, "rounds", str(newest.round), "--output", "json")
    assert json.loads(text)["metrics"] == pytest.approx(metrics)
    summaries = facts(fleet, f"api/rounds?job={job.job_id}")
    assert summaries["rounds"][-1]["metrics"] == pytest.approx(metrics, rel=1e-4)
    assert summaries["job"]["best_by"] == "min eval/perplexity"
    shown = Page(fleet.ready["metrics"]).by("metric", "fl_server_round_metric")
    assert shown == pytest.approx({name: value for name, value in metrics.items() if value})


def test_the_strategy_of_the_documentation_chooses_a_rate_and_reports_a_figure(fleet: Fleet) -> None:
    keys = {"aggregation": {"rule": "own_strategy:Careful", "args": {"lr": 5.0}}, "best_by": "min server/norm"}
    with Control(fleet.control) as control:
        job = run_job(control, {"min_clients": 2, "rounds": 4, "subset_size": 20, **keys})
        assert job.state == "completed", job.reason
        rounds = sorted(control.rounds(job_id=job.job_id), key=lambda round_: round_.round)
    losses, rates = ([round_.metrics["eval/loss"] for round_ in rounds], [round_.settings["lr"] for round_ in rounds])
    worse = [after > before for before, after in pairwise(losses[:-1])]
    assert rates[:2] == [5.0, 5.0]
    assert [after / before for before, after in pairwise(rates[1:])] == [0.5 if each else 1.0 for each in worse]
    norm = rounds[-1].metrics["server/norm"]
    _, table, error = flctl(fleet, "rounds", "--job", str(job.job_id), "--metric", "server/norm")
    assert f"{norm:.6g}" in table
    assert f"the best round of job {job.job_id} is" in error
    _, table, _ = flctl(fleet, "rounds", str(rounds[-1].round))
    assert "server/norm" in table
    assert facts(fleet, f"api/rounds?job={job.job_id}")["rounds"][-1]["metrics"]["server/norm"] == pytest.approx(norm)
    shown = Page(fleet.ready["metrics"]).by("metric", "fl_server_round_metric")
    assert shown["server/norm"] == pytest.approx(norm)


Clients = Callable[..., list[WireClient]]


def test_a_client_from_before_this_version_has_an_accuracy_over_all_its_samples(
    control: Control, clients: Clients
) -> None:
    (client,) = clients()
    job_id, events = run(control, evaluate=True)
    command = client.expect("train")
    payload = payload_of(np.zeros(1000, np.float32))
    client.push(client.header(command, payload), payload)
    asked = client.expect("evaluate")
    report = fed.EvaluationReport(round=asked.round, model_digest=asked.model_digest, correct=3, total=4, loss_sum=2.0)
    for wrong, reason in (
        (fed.EvaluationReport(classified=5), "bad_evaluation"),
        (fed.EvaluationReport(classified=2), "bad_evaluation"),
        (fed.EvaluationReport(metrics={"a b": 1.0}), "bad_metrics"),
        (fed.EvaluationReport(metrics={"f1": math.nan}), "bad_metrics"),
        (fed.EvaluationReport(metrics={f"m{number}": 1.0 for number in range(33)}), "bad_metrics"),
    ):
        wrong.MergeFrom(report)
        with pytest.raises(grpc.RpcError) as refused:
            client.commands.ReportEvaluation(wrong, metadata=client.metadata)
        assert reason_of(refused.value) == reason
    client.commands.ReportEvaluation(report, metadata=client.metadata)
    outcome(control, job_id, events)
    (round_,) = control.rounds(job_id=job_id)
    assert (round_.eval_correct, round_.eval_classified, round_.metrics["eval/accuracy"]) == (3, 4, 0.75)
    assert control.models(limit=1)[0].accuracy == 0.75
