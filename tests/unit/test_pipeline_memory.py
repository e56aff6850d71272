"""What stages keep is measured, and falls as stages are added."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedring.ctl.main import main
from fedring.daemon.exits import Exit
from fedring.pipeline.cut import cut_by_counts
from fedring.pipeline.memory import Kept, measure
from fedring.pipeline.schedules import gpipe, one_forward_one_backward

WIDTH, BATCH = 16, 24


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().mean()


def kept(stages: int, *, recompute: bool = False, name: str = "1f1b") -> list[Kept]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    schedule = {"1f1b": one_forward_one_backward, "gpipe": gpipe}[name](stages, 6)
    batch = torch.randn(BATCH, WIDTH), torch.zeros(BATCH)
    return measure(cut_by_counts(model, [4 // stages] * stages), schedule, batch, loss=mean, recompute=recompute)


def test_parameters_and_adams_state_are_divided_among_the_stages() -> None:
    layer = 4 * (WIDTH * WIDTH + WIDTH)
    for stages in (1, 2, 4):
        for one in kept(stages):
            assert one.parameters == 4 // stages * layer
            assert 2 * one.parameters <= one.optimizer <= 2 * one.parameters + 64  # and its counts of steps


def test_activations_are_those_of_the_micro_batches_on_their_way() -> None:
    micro_batch = 4 * BATCH // 6 * WIDTH  # what goes into one layer
    first, second = kept(2)
    assert (first.in_flight, second.in_flight) == (2, 1)
    assert 2 * 2 * micro_batch <= first.activations <= 3 * 2 * micro_batch
    assert second.activations < first.activations
    assert kept(2, name="gpipe")[0].activations >= 6 * 2 * micro_batch
    assert kept(2, name="gpipe", recompute=True)[0].activations < kept(2, name="gpipe")[0].activations


def test_the_command_tells_programs_what_each_stage_keeps(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [
        "fedring.train.models:mnist_cnn",
        "--stages",
        "1,2",
        "--shape",
        "1x28x28",
        "--batch-size",
        "4",
        "-m",
        "2",
    ]
    assert main(["pipeline", "memory", *arguments, "--output", "json"]) == Exit.OK
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["rows"]
    assert [(row["stages"], row["stage"]) for row in rows] == [(1, 0), (2, 0), (2, 1)]
    assert rows[0]["parameters"] == rows[1]["parameters"] + rows[2]["parameters"] == 4 * 1_199_882
    assert main(["pipeline", "memory", *arguments]) == Exit.OK
    assert "1 of 2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--stages", "two"], "no number above 0"),
        (["--schedule", "pipedream"], "gpipe or 1f1b"),
        (["fedring.train.models:digits_mlp", "--stages", "3", "--shape", "64"], "cannot make 3 stages"),
    ],
)
def test_what_cannot_be_measured_is_a_usage_error(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", "memory", *arguments]) == Exit.USAGE
    assert sentence in capsys.readouterr().err
