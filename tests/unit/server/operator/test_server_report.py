"""Rounds, jobs and models as operators see them."""

import json

from fedring.server.operator.report import job_message, model_message
from fedring.server.round.report import round_message
from fedring.server.state.rows import EvaluationRow, JobRow, ModelRow, RoundRow
from fedring.v1 import control_pb2 as pb

CLIENTS = {
    "a": {"num_samples": 10, "train_seconds": 2.5, "upload_bytes": 100, "download_bytes": 7, "encoding": "int8"},
    "b": {"num_samples": 0, "train_seconds": 0.0, "upload_bytes": 30, "download_bytes": 5, "encoding": ""},
}


def test_a_round_adds_up_the_bytes_of_its_clients() -> None:
    stats = {"seconds": 3.5, "clients": CLIENTS, "correct": 9, "total": 10, "loss_sum": 0.5, "evaluate_seconds": 0.25}
    message = round_message(RoundRow(4, 2, 1, "published", 1.5, 3, 9, "", ("a", "b", "c"), 8.0, stats))
    assert (message.upload_bytes, message.download_bytes, message.train_seconds_max) == (130, 12, 2.5)
    assert (message.selected, message.delivered, message.model_version) == (3, 1, 9)
    assert list(message.missing) == ["b", "c"]
    assert (message.eval_correct, message.eval_total, message.eval_loss_sum) == (9, 10, 0.5)
    assert (message.seconds, message.evaluate_seconds) == (3.5, 0.25)
    assert [client.client_id for client in message.clients] == ["a", "b"]
    assert not message.HasField("server_accuracy")


def test_no_client_is_missing_while_a_round_is_open() -> None:
    message = round_message(RoundRow(4, 2, 1, "training", 1.5, selected=("a", "b")), delivered=1)
    assert list(message.missing) == []
    assert message.delivered == 1


def test_the_servers_own_evaluation_is_present_if_the_server_has_evaluated() -> None:
    stats = {"server_accuracy": 0.0, "server_loss": 0.0}
    message = round_message(RoundRow(4, 2, 1, "published", 1.5, stats=stats))
    assert message.HasField("server_accuracy")
    assert message.HasField("server_loss")


def test_a_job_shows_its_whole_specification() -> None:
    message = job_message(JobRow(3, "digits", {"lr": 0.5}, 10, 1.5, "failed", "too_few_clients", 4))
    assert json.loads(message.spec) == {"lr": 0.5}
    assert (message.state, message.reason, message.rounds, message.rounds_done) == ("failed", "too_few_clients", 10, 4)
    assert message.created_at.startswith("1970-01-01T00:00:01.500")


def test_a_model_without_evaluation_has_no_accuracy() -> None:
    row = ModelRow(5, 4, "blake3-" + "ab" * 32, "cd" * 32, "ef" * 32, 10, 99, 1.5)
    assert not model_message(row, None, None, best=False).HasField("accuracy")
    message = model_message(
        row, EvaluationRow(4, 5, "", 0, 8, 4.0, classified=8), RoundRow(4, 2, 3, "published", 1.5), best=True
    )
    assert message.HasField("accuracy")
    assert message.best_of_job
    assert message.job_round == 3
    assert (message.accuracy, message.loss) == (0.0, 0.5)
    unclassified = model_message(row, EvaluationRow(4, 5, "", 0, 8, 4.0, classified=0), None, best=False)
    assert not unclassified.HasField("accuracy")
    assert unclassified.loss == 0.5
    assert (message.digest, message.schema_hash) == ("blake3-" + "ab" * 32, b"\xef" * 32)
    assert isinstance(message, pb.Model)


def test_a_round_with_secure_aggregation_says_what_was_lost_in_which_step() -> None:
    secure = {"step": "done", "groups": 2, "answered": 4, "asked": 5, "seconds": {"keys": 0.5}}
    stats = {"secure": secure | {"lost": {"keys": 1, "shares": 0, "unmask": 2}}}
    message = round_message(RoundRow(4, 2, 1, "published", 1.5, stats=stats))
    assert (message.secure.step, message.secure.groups) == ("done", 2)
    assert (message.secure.answered, message.secure.asked) == (4, 5)
    assert dict(message.secure.lost) == {"keys": 1, "shares": 0, "unmask": 2}
    assert dict(message.secure.seconds) == {"keys": 0.5}
    assert not round_message(RoundRow(4, 2, 1, "published", 1.5)).HasField("secure")


def test_a_round_says_who_has_sent_wrong_shares_and_who_was_left_out_for_that() -> None:
    message = round_message(RoundRow(4, 2, 1, "published", 1.5, stats={"liars": ["a"], "left_out": ["b", "c"]}))
    assert (list(message.liars), list(message.left_out)) == (["a"], ["b", "c"])
    assert not round_message(RoundRow(4, 2, 1, "published", 1.5)).liars
