"""What a pipeline job may say, and what it means to server and client."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from fedring.client.grouped import parse_table
from fedring.ctl.presets import Dataset, Mode, preset_job
from fedring.ctl.start import job_of
from fedring.schedules.schedule import ScheduleError
from fedring.server.round.plan import group_rules, job_spec, rules_of, train_cmd
from fedring.train.errors import SeamError
from fedring.train.job import Job
from fedring.train.models import digits_mlp
from fedring.train.pipelined import Pipeline
from fedring.train.seam import build_model
from fedring.workers.cutting import count_layers, cut_model
from fedring.workers.shards import micro_batches

ROOT = Path(__file__).parents[2]


def job(**keys: Any) -> Job:
    return Job.model_validate({"mode": "pipeline", **keys})


def table(**keys: Any) -> Pipeline:
    return Pipeline.model_validate(keys)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"stages": 3, "stages_per_worker": 2, "schedule": "interleaved_1f1b"}, "do not spread evenly"),
        ({"stages": 4, "stages_per_worker": 2}, "1f1b has one stage a worker"),
        ({"update_interval": 2}, "belong to the schedule pipedream"),
        ({"schedule": "gpipe", "versions": "vertical"}, "belong to the schedule pipedream"),
        ({"schedule": "pipedream", "micro_batches": "auto"}, "cannot be auto"),
        ({"schedule": "pipedream", "warmups": [0, 1]}, "would deadlock"),
        ({"schedule": "pipedream", "versions": "macrobatch", "stages": 4, "update_interval": 2}, "at least 3"),
        ({"schedule": "interleaved_1f1b", "stages": 4, "stages_per_worker": 2, "micro_batches": 3}, "multiple of 2"),
        ({"cut": "evenly"}, "is not parameters, time, or of the form"),
        ({"cut": ["a", "b"]}, "2 entries; 2 stages need 1"),
        ({"cut": [4]}, "1 entries; 2 stages need 2"),
        ({"schedule": "zip"}, "schedule"),
        ({"stage": 2}, "Extra inputs"),
    ],
)
def test_what_cannot_run_is_refused_when_the_job_is_given(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        job(pipeline=keys)


def test_a_batch_has_a_sample_for_each_micro_batch() -> None:
    with pytest.raises(ValidationError, match="batch_size must be at least"):
        job(batch_size=7, pipeline={"micro_batches": 8})
    assert job(batch_size=7, pipeline={"schedule": "pipedream", "micro_batches": 8}).batch_size == 7


def test_what_belongs_to_the_federated_mode_is_refused() -> None:
    with pytest.raises(ValidationError, match="leave them out of a pipeline job"):
        job(mu=0.1)


def test_a_pipeline_has_as_many_workers_as_stages_and_replicas_need() -> None:
    spec = job(pipeline={"stages": 3, "replicas": 2, "replacement_seconds": 7}, min_clients_to_aggregate=1)
    assert spec.pipeline.workers == 6
    rules = rules_of(spec, grace=5)
    assert (rules.min_clients, rules.sample_clients) == (6, 6)
    assert (rules.min_to_aggregate, rules.close_at_minimum) == (1, True)
    group = group_rules(spec, target=8)  # a restarted server counts those that were enlisted, too
    assert (group.target, group.minimum, group.patience) == (6, 6, 7)
    shared = table(stages=4, stages_per_worker=2, schedule="interleaved_1f1b")
    assert (shared.width, shared.workers, shared.unit) == (2, 2, 2)


def test_the_table_travels_with_the_command_and_the_update_is_whole() -> None:
    spec = job(encoding="packed", pipeline={"cut": ["3"], "micro_batches": "auto", "loss_scale": 128.0})
    command = train_cmd(spec, job_spec(spec, 1), number=1, job_round=1)
    assert parse_table(Pipeline, "pipeline", command.job.pipeline) == spec.pipeline
    assert (command.encoding.name, command.job.data_parallel) == ("fp32", "")
    with pytest.raises(SeamError, match=r"pipeline.quantum: .* update this client"):
        parse_table(Pipeline, "pipeline", '{"quantum": true}')


def test_the_example_is_a_job_whose_model_can_be_cut() -> None:
    spec = Job.model_validate(job_of(ROOT / "deploy" / "config" / "pipeline.toml", ["pipeline.stages=4"]))
    model = build_model(spec.model, spec.model_args, 0, ["fedring"])
    counts = count_layers(model, spec.pipeline, torch.empty)
    assert len(cut_model(model, spec.pipeline, counts, [])) == 4


@pytest.mark.parametrize("dataset", list(Dataset))
def test_the_demo_has_a_pipeline_job_for_each_data_set(dataset: Dataset) -> None:
    spec = Job.model_validate(preset_job(dataset, Mode.PIPELINE))
    assert (spec.mode, spec.subset_size) == ("pipeline", 0)
    model = build_model(spec.model, spec.model_args, 0, ["fedring"])
    assert sum(count_layers(model, spec.pipeline, torch.empty)) > 2


def test_an_even_cut_leaves_no_stage_without_parameters() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.ReLU(), nn.Linear(4, 400), nn.ReLU())
    assert count_layers(model, table(), torch.empty) == [4, 2]
    timed = count_layers(model, table(cut="time"), lambda: torch.randn(2, 4))
    assert timed == [4, 2]
    with pytest.raises(SeamError, match="2 layers with parameters cannot make 3 stages"):
        count_layers(model, table(stages=3), torch.empty)
    with pytest.raises(SeamError, match="stage 1 has no parameters to train") as caught:
        cut_model(model, table(cut=[5, 1]), [], [])
    assert caught.value.reason == "cannot_cut"


def backwards(model: nn.Sequential) -> list[nn.Module]:
    return [model[:2], nn.Linear(64, 10)]


def one(model: nn.Module) -> list[nn.Module]:
    return [model]


def broken(model: nn.Module) -> list[nn.Module]:
    raise KeyError("no such layer")


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("backwards", "is no part of the model"),
        ("one", "has made 1 stages where the job says 2"),
        ("broken", "has failed: KeyError"),
    ],
)
def test_a_cut_of_ones_own_must_fit(name: str, sentence: str) -> None:
    own = table(cut=f"tests.unit.test_pipeline_job:{name}")
    with pytest.raises(SeamError, match=sentence):
        cut_model(digits_mlp(), own, [], ["tests"])
    with pytest.raises(SeamError, match="trusted"):
        cut_model(digits_mlp(), own, [], ["fedring"])


@pytest.mark.parametrize(
    ("samples", "size", "most", "unit", "parts"),
    [
        (32, 4, 8, 1, [4] * 8),
        (33, 4, 8, 1, [5, *[4] * 7]),
        (13, 4, 8, 1, [5, 4, 4]),
        (3, 4, 8, 1, [3]),
        (13, 4, 8, 2, [7, 6]),
        (1, 4, 8, 2, [1, 1]),  # taken again
        (30, 3, 8, 1, [4, 4, 4, 4, 4, 4, 3, 3]),
    ],
)
def test_a_short_batch_has_fewer_micro_batches(samples: int, size: int, most: int, unit: int, parts: list[int]) -> None:
    made = micro_batches(torch.arange(samples), size=size, most=most, unit=unit)
    assert [len(part) for part in made] == parts
    assert set(torch.cat(list(made)).tolist()) == set(range(samples))


def test_every_number_of_micro_batches_has_a_schedule() -> None:
    spec = table(stages=4, stages_per_worker=2, schedule="interleaved_1f1b", micro_batches="auto")
    assert spec.schedule_of(6).micro_batches == 6
    with pytest.raises(ScheduleError):
        spec.schedule_of(5)
    asynchronous = table(schedule="pipedream", micro_batches=12, update_interval=3, stages=4, warmups=[5, 3, 1, 0])
    assert [asynchronous.schedule_of(count).micro_batches for count in (1, 2, 12)] == [1, 2, 12]
