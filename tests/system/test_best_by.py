"""The job's key best_by on a real fl-server: the one rule by which the best model is chosen, wherever it is used."""

import json
import signal
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from fedring.control.failure import Failure
from fedring.control.server import Job
from fedring.server.state.backup.create import back_up
from fedring.server.state.backup.restore import restore
from fedring.v1 import federation_pb2 as pb
from tests import forks
from tests.fleets import Control, Fleet
from tests.system.wire import SIZE, Refused, WireClient, deliver, outcome, payload_of, run, vector_job

BY_PERPLEXITY: dict[str, Any] = {"evaluate": True, "best_by": "min eval/perplexity"}
ROUNDS: list[tuple[int, float | None]] = [(2, 5.0), (3, 2.0), (9, 4.0), (5, None)]
"""The correct answers and the perplexity of each round. The best is the second one; by accuracy, the third."""


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    """Start a server that keeps the newest version, and the newest and the best of three jobs."""
    with Fleet(tmp_path, {"keep_models": 1, "keep_jobs": 3, "web_port": 0}) as fleet:
        yield fleet


@pytest.fixture
def control(fleet: Fleet) -> Iterator[Control]:
    """Connect to the server; the connection outlives its restarts."""
    with Control(fleet.control) as control:
        yield control


def train(fleet: Fleet, control: Control, rounds: Sequence[tuple[int, float | None]], **keys: Any) -> Job:
    """Run a job in which one client evaluates the models with these results, and return it when it has ended."""
    with WireClient(fleet.listen) as client:
        job_id, events = run(control, rounds=20, **keys)
        for correct, perplexity in rounds:
            deliver(client)
            order = client.expect("evaluate")
            report = pb.EvaluationReport(round=order.round, model_digest=order.model_digest, correct=correct, total=10)
            if perplexity is not None:
                report.metrics["perplexity"] = perplexity
            client.commands.ReportEvaluation(report, metadata=client.metadata)
        outcome(control, job_id, events)
    return Job(control, job_id)


def deliver_with(client: WireClient, effort: float) -> None:
    """Answer the client's next command with an update that has the metric `effort`."""
    command = client.expect("train")
    payload = payload_of(np.ones(SIZE, np.float32))
    client.push(client.header(command, payload, metrics={"effort": effort}), payload)


def kept(fleet: Fleet, control: Control) -> list[tuple[int, bool]]:
    """Return the versions that are kept, and whether each is the best of its job, when flctl and the page agree.

    The server may just be removing one, and the page may show what it read two seconds ago.
    """
    while True:
        told = versions(control)
        if shown(fleet) == told == versions(control):
            return told


def versions(control: Control) -> list[tuple[int, bool]]:
    """Return the versions that flctl is told, and whether each is the best of its job."""
    return [(model.version, model.best_of_job) for model in control.models()]


def shown(fleet: Fleet) -> list[tuple[int, bool]]:
    """Return the versions that the page is told, and whether each is the best of its job."""
    with urllib.request.urlopen(f"{fleet.web}api/state", timeout=60) as answer:
        return [(model["version"], model["best_of_job"]) for model in json.load(answer)["models"]]


def texts(control: Control, kind: str, job_id: int) -> list[str]:
    """Return what the job's events of this kind say, up to its end."""
    found = []
    for event in control.events(after=1):
        if event.job_id == job_id and event.kind == kind:
            found.append(event.text)
        if event.job_id == job_id and event.kind == "job_ended":
            break
    return found


def test_best_by_steers_the_end_of_a_job_the_start_of_the_next_one_and_what_is_kept(
    fleet: Fleet, control: Control
) -> None:
    first = train(fleet, control, ROUNDS, **BY_PERPLEXITY, patience=2)
    reason = "it ended early: version 3 (eval/perplexity 2) was not surpassed for 2 rounds"
    assert (first.message.state, first.message.reason) == ("completed", reason)
    assert kept(fleet, control) == [(5, False), (3, True)]
    best = first.best()
    assert best is not None
    assert (best["job_round"], best["model_version"]) == (2, 3)
    assert first.export(fleet.directory / "best.safetensors", "best") == 3
    missing = "; it has no eval/perplexity, so best_by cannot choose its model"
    assert [missing in text for text in texts(control, "round_evaluated", first.id)] == [False, False, False, True]
    words = ("rounds", "--job", str(first.id), "--server", fleet.control)
    told = forks.run("fedring.ctl.main", *words, timeout=60).stderr
    assert "the best round of job 1 is 1.2: it published model 3" in told

    fleet.restart_server()
    assert kept(fleet, control) == [(5, False), (3, True)]
    second = train(fleet, control, [(1, 9.0), (1, 9.0)], **BY_PERPLEXITY, start="best", patience=1)
    assert second.message.start_version == 3
    (started,) = texts(control, "job_started", second.id)
    assert "starts from version 3, the best (eval/perplexity 2)" in started
    assert kept(fleet, control) == [(7, False), (6, True), (5, False), (3, True)]  # of equals, the older one

    by_accuracy = train(fleet, control, [(0, None), (0, None)], evaluate=True, start="best", patience=1)
    assert by_accuracy.message.start_version == 5  # by the rule of the job that starts
    assert kept(fleet, control)[-2:] == [(5, False), (3, True)]

    fleet.server.send(signal.SIGTERM)
    fleet.server.wait()
    state, copy = fleet.directory / "state" / "server", fleet.directory / "copy"
    back_up(state, copy)
    restore(copy, state, replace=True)
    fleet.start_server()
    assert kept(fleet, control)[-2:] == [(5, False), (3, True)]


def test_a_job_ends_when_nothing_is_better_by_more_than_min_delta_but_not_before_min_rounds(
    fleet: Fleet, control: Control
) -> None:
    falling = [(1, 9.0), (1, 8.9), (1, 8.8)]
    job = train(fleet, control, falling, **BY_PERPLEXITY, patience=1, min_delta=0.5, min_rounds=3).message
    assert job.rounds_done == 3
    assert job.reason.endswith("(eval/perplexity 9) was not surpassed by more than 0.5 for 2 rounds")


@pytest.mark.parametrize(
    ("keys", "text"),
    [
        ({"best_by": "min server/loss"}, "best_by: server/loss is never known, because the job has evaluate_on_server"),
        ({"best_by": "max eval/f1"}, "best_by: eval/f1 is never known, because the job has evaluate = false"),
        ({**BY_PERPLEXITY, "start": "best"}, "start: no version of this model that is kept has eval/perplexity"),
    ],
)
def test_a_rule_that_can_never_choose_is_refused(control: Control, keys: dict[str, Any], text: str) -> None:
    with pytest.raises(Failure, match=text):
        control.start_job(vector_job(**keys))


def test_a_metric_of_the_training_needs_no_evaluation(fleet: Fleet, control: Control) -> None:
    with WireClient(fleet.listen) as client:
        job_id, events = run(control, rounds=9, best_by="min train/effort", patience=1)
        for effort in (3.0, 1.0, 2.0):
            deliver_with(client, effort)
        job = outcome(control, job_id, events)
    assert job.reason == "it ended early: version 3 (train/effort 1) was not surpassed for 1 round"
    assert kept(fleet, control) == [(4, False), (3, True)]


def test_a_model_whose_evaluation_a_crash_has_cut_off_has_the_metrics_of_its_training(
    fleet: Fleet, control: Control
) -> None:
    fleet.server.kill()
    fleet.server.env["FL_CRASH_AT"] = "after_publish_commit"
    fleet.start_server()
    with WireClient(fleet.listen) as client:
        control.start_job(vector_job(best_by="min train/effort"))
        with suppress(grpc.RpcError, Refused):  # the server ends before it answers
            deliver_with(client, 1.0)
        fleet.server.wait()
    del fleet.server.env["FL_CRASH_AT"]
    fleet.start_server()
    assert kept(fleet, control)[0] == (2, True)
