"""The memory that stages need: how it is measured, and that more stages need less each."""

import json
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedring.ctl.main import main
from fedring.daemon.exits import Exit
from fedring.pipeline.cut import cut_by_counts
from fedring.pipeline.memory import Kept, measure
from fedring.schedules.schedule import Schedule, Versions, gpipe, interleaved, one_forward_one_backward, pipedream
from fedring.schedules.simulation import check, needs_of

WIDTH, BATCH = 16, 24


def mean(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.square().mean()


def kept(stages: int, *, recompute: bool = False, name: str = "1f1b") -> list[Kept]:
    return kept_by({"1f1b": one_forward_one_backward, "gpipe": gpipe}[name](stages, 6), recompute=recompute)


def kept_by(schedule: Schedule, *, recompute: bool = False) -> list[Kept]:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)))
    batch = torch.randn(BATCH, WIDTH), torch.zeros(BATCH)
    cut = cut_by_counts(model, [4 // schedule.stages] * schedule.stages)
    return measure(cut, schedule, batch, loss=mean, recompute=recompute)


def test_parameters_and_the_state_of_adam_are_divided_among_stages() -> None:
    layer = 4 * (WIDTH * WIDTH + WIDTH)
    for stages in (1, 2, 4):
        for one in kept(stages):
            assert one.parameters == 4 // stages * layer
            assert 2 * one.parameters <= one.optimizer <= 2 * one.parameters + 64  # which also counts its steps


def test_activations_are_those_of_micro_batches_in_flight() -> None:
    micro_batch = 4 * BATCH // 6 * WIDTH  # bytes of the inputs of one layer
    first, second = kept(2)
    assert (first.in_flight, second.in_flight) == (2, 1)
    assert 2 * 2 * micro_batch <= first.activations <= 3 * 2 * micro_batch
    assert second.activations < first.activations
    assert kept(2, name="gpipe")[0].activations >= 6 * 2 * micro_batch
    assert kept(2, name="gpipe", recompute=True)[0].activations < kept(2, name="gpipe")[0].activations


@pytest.mark.parametrize("versions", Versions)
@pytest.mark.parametrize("stages", [1, 2, 4])
def test_the_older_versions_of_pipedream_are_counted(stages: int, versions: Versions) -> None:
    schedule = pipedream(stages, 12, versions=versions)
    for one, need in zip(kept_by(schedule), check(schedule), strict=True):
        assert one.stashed == (need.versions - 1) * one.parameters
        assert one.in_flight == need.activations


def test_schedules_with_a_flush_keep_no_older_versions() -> None:
    assert [one.stashed for one in kept(4)] == [0] * 4


def test_a_worker_with_several_stages_needs_the_memory_of_all_of_them() -> None:
    schedule = interleaved(4, 6, workers=2)
    workers, stages = kept_by(schedule), kept(4)
    assert [one.parameters for one in workers] == [2 * stages[0].parameters] * 2
    assert [one.optimizer for one in workers] == [2 * stages[0].optimizer] * 2
    for one, actions in zip(workers, schedule.workers, strict=True):
        assert one.in_flight == needs_of(actions).activations
        assert one.activations >= one.in_flight * 4 * BATCH // 6 * WIDTH


def test_each_replica_of_a_stage_keeps_its_own_micro_batches() -> None:
    schedule = one_forward_one_backward(2, 6, replicas=[2, 1])
    first, second, last = kept_by(schedule)
    assert (first.parameters, first.optimizer) == (second.parameters, second.optimizer)
    assert first.in_flight == second.in_flight == check(schedule)[0].activations == 2
    assert (last.in_flight, last.parameters) == (1, first.parameters)


def test_the_stages_of_resnet_need_less_memory_each_if_there_are_more(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["torchvision:resnet18", "--stages", "1,2,4", "--shape", "3x32x32", "--batch-size", "4", "-m", "2"]
    assert main(["pipeline", "memory", *arguments, "--output", "json"]) == Exit.OK
    rows = json.loads(capsys.readouterr().out)["rows"]
    for key in ("parameters", "optimizer"):
        whole, half, quarter = (max(row[key] for row in rows if row["stages"] == count) for count in (1, 2, 4))
        assert whole > half > quarter
    assert all(row["activations"] > 0 for row in rows)


def test_the_command_lists_the_memory_of_each_stage_as_json(capsys: pytest.CaptureFixture[str]) -> None:
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
    ("options", "line", "stashed"),
    [
        (["--schedule", "interleaved_1f1b", "--stages-per-worker", "2"], "0, 2 of 4", [False, False]),
        (["--schedule", "pipedream"], "3 of 4", [True, True, True, False]),
        (["--replicas", "1,1,2,1"], "3 of 4", [False] * 5),
        (["--schedule", "pipedream", "--versions", "macrobatch"], "3 of 4", [True] * 4),
    ],
)
def test_the_command_knows_all_schedules(
    options: list[str], line: str, stashed: list[bool], capsys: pytest.CaptureFixture[str]
) -> None:
    model = ["fedring.train.models:digits_mlp", "--model-args", '{"layers": 4}', "--shape", "1x8x8"]
    arguments = [*model, "--stages", "4", *options]
    assert main(["pipeline", "memory", *arguments, "--output", "json"]) == Exit.OK
    assert [row["stashed"] > 0 for row in json.loads(capsys.readouterr().out)["rows"]] == stashed
    assert main(["pipeline", "memory", *arguments]) == Exit.OK
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--stages", "2", "--replicas", "1,2,1"], "replicas=[1, 2, 1] has 3 numbers, but stages=2"),
        (["--stages", "two"], "must be whole numbers above 0"),
        (["--schedule", "none"], "'gpipe', '1f1b', 'interleaved_1f1b' or 'pipedream'"),
        (["--stages", "2", "--stages-per-worker", "2"], "or schedule=interleaved_1f1b"),
        (["fedring.train.models:digits_mlp", "--stages", "3", "--shape", "64"], "cannot make 3 stages"),
        (
            ["fedring.train.models:digits_mlp", "--stages", "1"],
            "cannot be trained on random inputs of --shape 3x64x64: RuntimeError: mat1 and mat2 shapes cannot be",
        ),
        (["--batch-size", "4"], "a micro-batch needs at least one sample"),
        (["--model-args", "[1]"], "it must be an object"),
        (["--model-args", "{"], "is not JSON of keyword arguments"),
    ],
)
def test_arguments_that_cannot_be_measured_are_a_usage_error(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["pipeline", "memory", *arguments]) == Exit.USAGE
    assert sentence in capsys.readouterr().err
