"""Rounds that sites had not approved stand beside those that the job counts, and hide none of them."""

from collections.abc import Iterator

import pytest
from tests import control_server

from fedring.control import Server, connect
from fedring.ctl.operate.conclusion import conclude
from fedring.ctl.operate.round_names import find_round
from fedring.v1 import control_pb2 as pb

JOB = pb.Job(job_id=3, state="completed", rounds=3, rounds_done=3, spec="{}")


def published(number: int, job_round: int, correct: int) -> pb.Round:
    return pb.Round(
        round=number, job_id=3, job_round=job_round, phase="published", model_version=number, eval_correct=correct,
        eval_total=10, metrics={"eval/accuracy": correct / 10},
    )  # fmt: skip


def refused(number: int, job_round: int) -> pb.Round:
    return pb.Round(round=number, job_id=3, job_round=job_round, phase="abandoned", reason="not_approved")


ROUNDS = [published(18, 3, 7), refused(17, 3), published(15, 2, 8), refused(14, 2), refused(13, 2), published(11, 1, 9)]
"""The best one is the first, and between the three are three that were refused."""


@pytest.fixture
def server() -> Iterator[Server]:
    scripted = control_server.Server()
    scripted.script.rounds, scripted.script.jobs = ROUNDS, {"": JOB}
    try:
        with connect(scripted.address) as server:
            yield server
    finally:
        scripted.stop()


def test_a_round_is_found_by_its_number_within_the_job(server: Server) -> None:
    assert [find_round(server.control, f"3.{number}", 0).round for number in (1, 2, 3)] == [11, 15, 18]


def test_the_rows_of_a_job_are_all_of_its_rounds(server: Server) -> None:
    rows = server.job(3).rounds()
    assert [row["round"] for row in rows] == [11, 13, 14, 15, 17, 18]
    best = server.job(3).best()
    assert best is not None
    assert best["job_round"] == 1


def test_the_last_line_of_a_run_names_the_best_round(server: Server) -> None:
    assert "best accuracy 90.00 % in round 3.1" in conclude(server.control, JOB)
