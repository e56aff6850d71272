"""The public interface: tasks come out of a federation, and updates go back."""

import logging
import os
import queue
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import nn

from fedring.client import ClientConfig, Federation, Refused, RoundOver, WrongModel, connect
from fedring.codec import decode
from fedring.daemon.exits import Exit
from fedring.daemon.lock import StateInUse
from fedring.rpc.errors import BadRequest, ComeBack, FedringError, IdInUse, NotAllowed, Superseded, UnknownRound
from fedring.train.tensors.state import read_vectors, schema_of
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

SECONDS = 60.0


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 2))


def add(model: nn.Module, value: float) -> None:
    """Train the model in a way that a test can check."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(value)


def test_a_round_goes_from_the_command_to_the_accepted_update(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    start = read_vectors(model)
    mine = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 2))
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, round_=7))
        task = next(federation)
        assert (task.round, task.plan.batch_size, task.cancelled) == (7, 8, False)
        task.load_into(mine)
        assert read_vectors(mine).digest() == start.digest()
        add(mine, 0.5)
        task.submit(mine, samples=12, metrics={"loss": 0.25})
    header, payload = server.accepted.get_nowait()
    assert (header.client_id, header.round, header.base_digest, header.metrics["loss"]) == (
        "alice",
        7,
        start.digest(),
        0.25,
    )
    assert [(p.vector, p.kind, p.num_samples) for p in header.packets] == [
        (pb.VECTOR_PARAMETERS, pb.KIND_DELTA, 12),
        (pb.VECTOR_BUFFERS, pb.KIND_WEIGHTS, 12),
    ]
    delta = decode(payload[: header.packets[0].bytes], name="fp32", length=len(start.parameters))
    np.testing.assert_array_equal(start.parameters + delta, read_vectors(mine).parameters)
    buffers = decode(payload[header.packets[0].bytes :], name="fp64", length=len(start.buffers))
    np.testing.assert_array_equal(buffers, start.buffers)


def test_a_client_reports_matched_only_after_a_heartbeat_of_the_server(
    server: "ScriptedServer", settings: dict[str, Any]
) -> None:
    with connect(**settings):
        assert not server.reports.get(timeout=SECONDS).matched
        while not server.reports.get(timeout=SECONDS).matched:
            pass  # The heartbeat is still on its way.


def test_a_model_is_evaluated_by_the_users_function(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    server.publish(3, schema_of(model), read_vectors(model))
    seen = []

    def evaluate(model: nn.Module) -> tuple[int, int, float]:
        seen.append(read_vectors(model).digest())
        return 8, 10, 2.5

    mine = nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.Linear(30, 2))
    with connect(**settings, model=mine, evaluate=evaluate) as federation:
        server.joins.get(timeout=SECONDS)
        server.send(pb.ServerEvent(evaluate=server.evaluation(3)))
        server.train(server.command(model, model_version=3))
        next(federation)
    report = server.evaluations.get_nowait()
    wanted = read_vectors(model).digest()
    assert (report.round, report.model_digest, report.correct, report.total, report.loss_sum) == (2, wanted, 8, 10, 2.5)
    assert seen == [wanted]


def test_a_loss_that_is_not_a_number_is_not_reported(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    server.publish(3, schema_of(model), read_vectors(model))
    with connect(**settings, model=model, evaluate=lambda _: (1, 10, float("nan"))) as federation:
        server.joins.get(timeout=SECONDS)
        server.send(pb.ServerEvent(evaluate=server.evaluation(3)))
        server.train(server.command(model, model_version=3))
        next(federation)
    report = server.evaluations.get_nowait()
    assert (report.model_digest, report.correct, report.total, report.loss_sum) == (server.digest(3), 0, 0, 0.0)


def test_a_client_that_cannot_evaluate_says_so_without_being_iterated(
    server: "ScriptedServer", settings: dict[str, Any]
) -> None:
    with connect(**settings):
        server.joins.get(timeout=SECONDS)
        command = pb.EvaluateCmd(round=2, model_version=3, model_digest="blake3-" + "ab" * 32, deadline_seconds=600)
        server.send(pb.ServerEvent(evaluate=command))
        report = server.evaluations.get(timeout=SECONDS)
    assert (report.total, report.model_digest) == (0, command.model_digest)


@pytest.mark.parametrize("reason", ["round_closed", "unknown_round"])
def test_a_report_that_comes_too_late_is_logged_once_and_changes_nothing(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.publish(3, schema_of(model), read_vectors(model))
    server.on_evaluation = lambda: UnknownRound("it is over", reason=reason)
    caplog.set_level(logging.INFO)
    with connect(**settings, model=model, evaluate=lambda _: (1, 10, 2.0)) as federation:
        server.joins.get(timeout=SECONDS)
        server.send(pb.ServerEvent(evaluate=server.evaluation(3)))
        server.train(server.command(model, model_version=3))
        assert next(federation).round == 1  # The error does not disturb the next round.
    assert server.evaluations.get_nowait().total == 10
    assert server.evaluations.empty()
    (record,) = [record for record in caplog.records if "did not take" in record.getMessage()]
    assert record.levelno == logging.INFO
    assert reason in record.getMessage()


def test_a_loss_that_is_too_large_for_the_server_is_not_reported(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    server.publish(3, schema_of(model), read_vectors(model))
    with connect(**settings, model=model, evaluate=lambda _: (1, 10, 1e300)) as federation:
        server.joins.get(timeout=SECONDS)
        server.send(pb.ServerEvent(evaluate=server.evaluation(3)))
        server.train(server.command(model, model_version=3))
        task = next(federation)
        task.load_into(model)
        task.submit(model, samples=1, metrics={"loss": 1e300, "speed": 2.0})
    assert server.evaluations.get_nowait().total == 0
    header, _ = server.accepted.get_nowait()
    assert dict(header.metrics) == {"speed": 2.0}  # A metric that a server would refuse is left out.


@pytest.mark.parametrize("seconds", [-1.0, float("nan"), 1e308])
def test_impossible_training_seconds_raise_an_error(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, seconds: float
) -> None:
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model))
        task = next(federation)
        task.load_into(model)
        with pytest.raises(ValueError, match=r"train_seconds is .*: it must be 0 to 2592000"):
            task.submit(model, samples=1, train_seconds=seconds)


def test_a_round_that_ends_cancels_its_task_and_accepts_no_update(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model))
        task = next(federation)
        task.load_into(model)
        server.send(pb.ServerEvent(round_ended=pb.RoundEnded(round=1, reason="too_few_clients")))
        while not task.cancelled:
            server.reports.get(timeout=SECONDS)
        with pytest.raises(RoundOver, match="too_few_clients"):
            task.submit(model, samples=1)
    assert server.accepted.empty()


def test_a_client_whose_round_has_ended_is_idle(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model))
        task = next(federation)
        task.load_into(model)
        while server.reports.get(timeout=SECONDS).activity != pb.ACTIVITY_TRAINING:
            pass
        server.send(pb.ServerEvent(round_ended=pb.RoundEnded(round=1, reason="stopped")))
        server.train(server.command(model, round_=2))
        while not task.cancelled:
            server.reports.get(timeout=SECONDS)
        assert next(federation).round == 2
        while server.reports.get(timeout=SECONDS).activity != pb.ACTIVITY_UNSPECIFIED:
            pass


def test_a_server_learns_at_once_that_code_has_ended_after_its_round(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    server.heartbeat_seconds = SECONDS
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, round_=2))
        task = next(federation)
        task.load_into(model)
        for ended in (2, 1):  # of an older round last, as with several jobs
            server.send(pb.ServerEvent(round_ended=pb.RoundEnded(round=ended, reason="stopped")))
            while (report := server.reports.get(timeout=SECONDS)).work.ended_round != ended:
                pass
        assert report.work.round == 2
        with pytest.raises(RoundOver, match="stopped"):
            task.submit(model, samples=1)
        server.train(server.command(model, round_=3))
        assert next(federation).round == 3
        assert server.reports.get(timeout=SECONDS / 2).work.round != 2


def test_a_server_learns_at_once_that_an_evaluation_has_ended_after_its_round(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    server.heartbeat_seconds = SECONDS
    server.publish(3, schema_of(model), read_vectors(model))

    def evaluate(model: nn.Module) -> tuple[int, int, float]:
        server.send(pb.ServerEvent(round_ended=pb.RoundEnded(round=2)))
        while server.reports.get(timeout=SECONDS).work != pb.Work(round=2, ended_round=2):
            pass
        return 8, 10, 2.5

    with connect(**settings, model=model, evaluate=evaluate) as federation:
        server.joins.get(timeout=SECONDS)
        server.send(pb.ServerEvent(evaluate=server.evaluation(3)))
        server.train(server.command(model, round_=3, model_version=3))
        assert next(federation).round == 3
        assert server.reports.get(timeout=SECONDS / 2).work.round != 2


def test_a_command_that_is_repeated_after_a_reconnect_does_not_start_the_task_again(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, round_=1))
        task = next(federation)
        task.load_into(model)
        server.stop()
        server.start()
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, round_=1))
        task.submit(model, samples=1)
        server.train(server.command(model, round_=2))
        assert next(federation).round == 2
    assert server.accepted.qsize() == 1


def test_a_failure_of_the_users_script_is_reported_to_the_server(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedring.client.federation._FLUSH_SECONDS", SECONDS)

    def run() -> None:
        with connect(**settings) as federation:
            server.joins.get(timeout=SECONDS)
            server.train(server.command(model))
            for task in federation:
                raise KeyError(f"round {task.round}")

    with pytest.raises(KeyError):
        run()
    failure = server.failures.get(timeout=SECONDS)
    assert (failure.round, failure.reason, failure.detail) == (1, "train_error", "KeyError: 'round 1'")


def test_a_task_that_is_not_submitted_is_reported_at_once(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, round_=1))
        next(federation)
        waiting = threading.Thread(target=lambda: next(federation, None))
        waiting.start()
        assert server.failures.get(timeout=SECONDS).reason == "no_update"
        federation.close()
        waiting.join()


def test_a_model_with_another_schema_is_refused_with_the_first_difference(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    other = nn.Sequential(nn.Linear(20, 31), nn.BatchNorm1d(31), nn.Linear(31, 2))
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model))
        with pytest.raises(WrongModel, match=r"0\.weight float32\[30, 20\], got parameter 0\.weight float32\[31, 20\]"):
            next(federation).load_into(other)


def test_a_job_of_another_model_fails_its_own_task_and_the_iteration_goes_on(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    other = nn.Sequential(nn.Linear(20, 31), nn.BatchNorm1d(31), nn.Linear(31, 2))
    server.publish(1, schema_of(other), read_vectors(other))
    ended: list[str] = []
    failures: list[pb.Failure] = []
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(other, round_=1))
        for task in federation:  # the loop of docs/clients.md
            try:
                task.load_into(model)
                task.submit(model, samples=1)
                federation.close()
            except RoundOver as over:
                ended.append(over.reason)
                failures.append(server.failures.get(timeout=SECONDS))
                server.publish(1, schema_of(model), read_vectors(model))
                server.train(server.command(model, round_=2))
    assert ended == ["wrong_schema"]
    (failure,) = failures
    assert (failure.round, failure.reason) == (1, "wrong_schema")
    assert "0.weight float32[31, 20], got parameter 0.weight float32[30, 20]" in failure.detail
    assert server.accepted.get_nowait()[0].round == 2
    assert server.failures.empty()


def test_sigterm_ends_the_iteration_and_the_handler_is_removed_afterwards(
    server: "ScriptedServer", settings: dict[str, Any]
) -> None:
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)
        assert list(federation) == []
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


@pytest.mark.parametrize(
    ("error", "exit_code"),
    [(BadRequest("install 2", reason="wrong_protocol"), Exit.CONFIG), (NotAllowed("go away"), Exit.NOT_ALLOWED)],
)
def test_a_refused_join_is_final(
    server: "ScriptedServer", settings: dict[str, Any], error: BadRequest | NotAllowed, exit_code: Exit
) -> None:
    server.on_join = lambda: error
    with connect(**settings) as federation, pytest.raises(Refused, match=error.reason) as caught:
        next(federation)
    assert caught.value.exit_code is exit_code
    assert server.joins.qsize() == 1


def test_a_client_that_was_superseded_ends_and_does_not_join_again(
    server: "ScriptedServer", settings: dict[str, Any]
) -> None:
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.send(Superseded("a newer session took over"))
        with pytest.raises(Refused, match="another process has joined as 'alice'"):
            next(federation)
    assert server.joins.empty()


def test_a_client_whose_id_is_in_use_keeps_trying_for_as_long_as_the_server_says(
    server: "ScriptedServer", settings: dict[str, Any]
) -> None:
    told: queue.Queue[str] = queue.Queue()
    server.on_join = lambda: IdInUse("alice is here", retry_seconds=0.5)
    sentence = r"another process has joined .* as 'alice': give each client an id"
    with (
        Federation(ClientConfig(**settings), tell=told.put) as federation,
        pytest.raises(Refused, match=sentence) as caught,
    ):
        next(federation)
    assert caught.value.exit_code is Exit.CONFIG
    assert server.joins.qsize() >= 2
    assert "has another session of 'alice'; trying for 0.5 s" in told.get_nowait()
    assert told.empty()


def test_a_client_whose_id_is_in_use_for_a_while_gets_a_session_in_the_end(
    server: "ScriptedServer", settings: dict[str, Any]
) -> None:
    answers = [IdInUse("alice is here", retry_seconds=SECONDS)] * 3
    server.on_join = lambda: answers.pop() if answers else None
    told: queue.Queue[str] = queue.Queue()
    with Federation(ClientConfig(**settings), tell=told.put):
        assert "another session" in told.get(timeout=SECONDS)
        assert told.get(timeout=SECONDS).startswith("in session with fl-server")
    assert server.joins.qsize() == 4


def test_a_client_that_is_not_needed_disconnects_and_comes_back_when_it_was_told_to(
    server: "ScriptedServer", settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedring.client.session.watch._HANG_UP_SECONDS", 0.1)
    answers: list[FedringError] = [ComeBack("no round needs this client", seconds=0.2)]
    server.on_join = lambda: answers.pop() if answers else None
    told: queue.Queue[str] = queue.Queue()
    with Federation(ClientConfig(**settings), tell=told.put):
        assert "does not need this client now; calling again in 0 s" in told.get(timeout=SECONDS)
        assert told.get(timeout=SECONDS).startswith("in session with fl-server")
        assert server.joins.get().paced
        first = time.monotonic()
        server.send(ComeBack("no round needs this client", seconds=0.5))  # it is told while it is connected, too
        server.joins.get()
        server.joins.get(timeout=SECONDS)
        assert time.monotonic() - first >= 0.5
        assert "does not need this client now" in told.get(timeout=SECONDS)
        assert told.get(timeout=SECONDS).startswith("in session with fl-server")


def test_two_clients_cannot_share_a_state_folder(server: "ScriptedServer", settings: dict[str, Any]) -> None:
    with connect(**settings), pytest.raises(StateInUse, match=f"in use by process {os.getpid()}"):
        connect(**settings)


def test_a_server_that_cannot_be_reached_is_awaited_and_reported_once(
    server: "ScriptedServer", settings: dict[str, Any]
) -> None:
    server.stop()
    told: queue.Queue[str] = queue.Queue()
    with Federation(ClientConfig(**settings), tell=told.put):
        assert told.get(timeout=SECONDS).startswith(f"cannot reach fl-server at {settings['server']}")
        server.start()
        server.joins.get(timeout=SECONDS)
        assert told.get(timeout=SECONDS).startswith("in session with fl-server")


def test_keywords_take_precedence_over_a_given_configuration(
    server: "ScriptedServer", settings: dict[str, Any]
) -> None:
    with connect(ClientConfig(**settings), client_id="carol"):
        assert server.joins.get(timeout=SECONDS).client_id == "carol"
