"""The last line of `flctl run`."""

import json

import pytest

from fedring.ctl.operate.conclusion import conclusion
from fedring.v1 import control_pb2 as pb


def job(best_by: str = "", done: int = 2) -> pb.Job:
    return pb.Job(job_id=3, state="completed", rounds=2, rounds_done=done, spec=json.dumps({"best_by": best_by}))


def round_(number: int, correct: int, f1: float, trained: str = "ann", missing: str = "") -> pb.Round:
    return pb.Round(
        round=number + 10,
        job_id=3,
        job_round=number,
        model_version=number,
        eval_correct=correct,
        eval_total=10,
        metrics={"eval/accuracy": correct / 10, "eval/f1": f1},
        clients=[pb.RoundClient(client_id=name, num_samples=5) for name in trained.split()],
        missing=missing.split(),
    )


@pytest.mark.parametrize(
    ("rule", "rounds", "told"),
    [
        ("", [round_(2, 9, 0.5), round_(1, 8, 0.7)], "accuracy 90.00 %"),
        ("", [round_(2, 8, 0.5), round_(1, 9, 0.7)], "accuracy 80.00 %, best accuracy 90.00 % in round 3.1"),
        ("max eval/f1", [round_(2, 9, 0.5), round_(1, 8, 0.7)], "eval/f1 0.5, best eval/f1 0.7 in round 3.1"),
        ("max eval/f1", [round_(2, 9, 0.8), round_(1, 8, 0.7)], "eval/f1 0.8"),
        ("min train/none", [round_(2, 9, 0.8), round_(1, 8, 0.7)], ""),
    ],
)
def test_the_figure_is_that_of_best_by(rule: str, rounds: list[pb.Round], told: str) -> None:
    assert conclusion(job(rule), rounds) == ", ".join(filter(None, ["job 3 completed: 2 rounds", told]))


def test_clients_that_never_trained_are_named() -> None:
    rounds = [round_(2, 9, 0.5, "ann", "bob eve"), round_(1, 9, 0.5, "ann eve", "bob")]
    assert conclusion(job(), rounds).endswith("; bob never trained: see `flctl rounds`, and its log")
    crowd = round_(1, 9, 0.5, "ann", " ".join(f"c{i}" for i in range(7)))
    assert "; c0, c1, c2, c3, c4 and 2 more never trained: " in conclusion(job(done=1), [crowd])


def test_nobody_is_accused_if_only_some_rounds_are_known() -> None:
    assert "never" not in conclusion(job(done=2), [round_(2, 9, 0.5, "ann", "bob")])
