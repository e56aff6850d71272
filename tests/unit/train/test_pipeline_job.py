"""The table [pipeline] of a job: what it may hold, and what the server and the clients make of it."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from tests.translators import Translator, model_of, sentences
from torch import nn

from fedring.client.group.round import parse_table
from fedring.ctl.local.presets import Dataset, Mode, preset_job
from fedring.ctl.operate.job_control import job_of
from fedring.offers import named
from fedring.schedules.schedule import ScheduleError
from fedring.server.round.plan import group_rules, rules_of
from fedring.train.errors import SeamError
from fedring.train.jobs.job import Job
from fedring.train.jobs.pipeline_table import Pipeline
from fedring.train.models import digits_mlp
from fedring.train.names.offered import Offered, collect
from fedring.train.names.seam import build_model
from fedring.train.orders.commands import job_spec, train_cmd
from fedring.workers.cutting import count_layers, cut_model
from fedring.workers.shards import micro_batches

ROOT = Path(__file__).parents[3]


def job(**keys: Any) -> Job:
    return Job.model_validate({"mode": "pipeline", **keys})


def table(**keys: Any) -> Pipeline:
    return Pipeline.model_validate(keys)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"stages": 3, "stages_per_worker": 2, "schedule": "interleaved_1f1b"}, "stages=3 must be a multiple of"),
        ({"stages": 4, "stages_per_worker": 2}, "the schedule 1f1b has one stage per worker"),
        ({"update_interval": 2}, "belong to the schedule pipedream"),
        ({"schedule": "gpipe", "versions": "vertical"}, "belong to the schedule pipedream"),
        ({"schedule": "pipedream", "micro_batches": "auto"}, "micro_batches=auto does not work"),
        ({"schedule": "pipedream", "warmups": [0, 1]}, "would deadlock"),
        ({"schedule": "pipedream", "versions": "macrobatch", "stages": 4, "update_interval": 2}, "at least 3"),
        ({"schedule": "interleaved_1f1b", "stages": 4, "stages_per_worker": 2, "micro_batches": 3}, "multiple of 2"),
        ({"replicas": [1, 2, 1]}, r"replicas=\[1, 2, 1\] has 3 numbers, but stages=2"),
        ({"replicas": [1, 0]}, "replicas"),
        ({"hook": "fp16"}, "hook=fp16 has no effect on replicas=1"),
        ({"hook": "fp16", "replicas": [1, 1]}, r"hook=fp16 has no effect on replicas=\[1, 1\]"),
        ({"hook": "dgc", "replicas": 2}, "hook=dgc cannot be used in a pipeline"),
        ({"hook": "zip", "replicas": 2}, "hook=zip cannot be used in a pipeline: choose from none, fp16"),
        ({"hook": "fp16(none)"}, r"hook=fp16\(none\) has no effect on replicas=1"),
        ({"stages": 3, "replicas": [0, 1, 1]}, r"must be a number from 1 to 256, or a list .*, not \[0, 1, 1\]"),
        ({"replicas": [256, 256], "micro_batches": 1 << 15}, "has 512 workers, and times .* above MAX_CELLS"),
        ({"stages": 80, "replicas": [256] * 80}, "has 20480 workers, and times 80 stages .* above MAX_CELLS"),
        ({"cut": [0, 2]}, "greater than or equal to 1"),
        ({"replicas": 257}, "replicas"),
        ({"replicas": [1, 2], "schedule": "pipedream", "update_interval": 1}, "interval of 1 .* multiple of 2"),
        (
            {"replicas": [1, 1], "schedule": "interleaved_1f1b", "stages_per_worker": 2},
            r"replicas=\[1, 1\] does not work with schedule=interleaved_1f1b",
        ),
        ({"cut": "evenly"}, "cut='evenly' must be parameters, time, or of the form"),
        ({"cut": ["a", "b"]}, r"cut=\['a', 'b'\] has 2 entries, but 2 stages need 1"),
        ({"cut": [4]}, "1 entries, but 2 stages need 2"),
        ({"schedule": "zip"}, "schedule"),
        ({"stage": 2}, "Extra inputs"),
    ],
)
def test_a_table_that_cannot_run_is_refused_with_the_job(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        job(pipeline=keys)


def test_a_batch_needs_a_sample_for_each_micro_batch() -> None:
    with pytest.raises(ValidationError, match="batch_size=7 must be at least 8"):
        job(batch_size=7, pipeline={"micro_batches": 8})
    assert job(batch_size=7, pipeline={"schedule": "pipedream", "micro_batches": 8}).batch_size == 7


def test_keys_of_the_federated_mode_are_refused() -> None:
    with pytest.raises(ValidationError, match="leave them out of a pipeline job"):
        job(mu=0.1)


@pytest.mark.parametrize("keys", [{"evaluator": "a:b"}, {"evaluate_on_server": True}])
def test_what_needs_the_whole_model_in_one_place_is_refused(keys: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="need the whole model in one place"):
        job(**keys)


def test_workers_know_whether_anybody_wants_an_evaluation() -> None:
    for wanted in (True, False):
        spec = job(evaluate=wanted)
        assert train_cmd(spec, job_spec(spec, 1), number=1, job_round=1).without_evaluation is not wanted


def test_a_pipeline_has_as_many_workers_as_stages_and_replicas_need() -> None:
    spec = job(pipeline={"stages": 3, "replicas": 2, "replacement_seconds": 7}, min_clients_to_aggregate=1)
    assert spec.pipeline.workers == 6
    rules = rules_of(spec, grace=5)
    assert (rules.min_clients, rules.sample_clients) == (6, 6)
    assert (rules.min_to_aggregate, rules.close_at_minimum) == (1, True)
    group = group_rules(spec, target=8)  # a restarted server also counts the workers that were enlisted before
    assert (group.target, group.minimum, group.patience) == (6, 6, 7)
    own = table(stages=3, replicas=[1, 2, 1])
    assert (own.width, own.pipelines, own.workers) == (4, 1, 4)
    assert [own.schedule_of(4).stages_of(worker) for worker in range(4)] == [[0], [1], [1], [2]]
    shared = table(stages=4, stages_per_worker=2, schedule="interleaved_1f1b")
    assert (shared.width, shared.workers, shared.unit) == (2, 2, 2)


def test_the_table_travels_with_the_command_and_updates_are_not_compressed() -> None:
    spec = job(encoding="packed", pipeline={"cut": ["3"], "micro_batches": "auto", "loss_scale": 128.0})
    command = train_cmd(spec, job_spec(spec, 1), number=1, job_round=1)
    assert parse_table(Pipeline, "pipeline", command.job.pipeline) == spec.pipeline
    assert (command.encoding.name, command.job.data_parallel) == ("fp32", "")
    with pytest.raises(SeamError, match=r"pipeline.quantum: .* update this client"):
        parse_table(Pipeline, "pipeline", '{"quantum": true}')


def test_the_example_job_has_a_model_that_can_be_cut() -> None:
    spec = Job.model_validate(job_of(ROOT / "deploy" / "config" / "pipeline.toml", ["pipeline.stages=4"]))
    model = build_model(spec.model, spec.model_args, 0, collect(["fedring"]))
    counts = count_layers(model, spec.pipeline, torch.empty)
    assert len(cut_model(model, spec.pipeline, counts, Offered())) == 4


@pytest.mark.parametrize("dataset", list(Dataset))
def test_flctl_try_has_a_pipeline_job_for_each_data_set(dataset: Dataset) -> None:
    spec = Job.model_validate(preset_job(dataset, Mode.PIPELINE))
    assert (spec.mode, spec.subset_size) == ("pipeline", 0)
    model = build_model(spec.model, spec.model_args, 0, collect(["fedring"]))
    assert sum(count_layers(model, spec.pipeline, torch.empty)) > 2


def test_an_even_cut_gives_parameters_to_every_stage() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 4), nn.ReLU(), nn.ReLU(), nn.Linear(4, 400), nn.ReLU())
    assert count_layers(model, table(), torch.empty) == [4, 2]
    timed = count_layers(model, table(cut="time"), lambda: torch.randn(2, 4))
    assert timed == [4, 2]
    with pytest.raises(SeamError, match="2 layers with parameters cannot make 3 stages"):
        count_layers(model, table(stages=3), torch.empty)
    with pytest.raises(SeamError, match="stage 1 has no parameters to train") as caught:
        cut_model(model, table(cut=[5, 1]), [], Offered())
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
        ("backwards", "is not a parameter of the model"),
        ("one", "returned 1 stages, but the job's table has stages=2"),
        ("broken", "raised KeyError"),
    ],
)
def test_a_users_own_cut_must_fit_the_model_and_the_table(name: str, sentence: str) -> None:
    cut = f"{__name__}:{name}"
    own = table(cut=cut)
    with pytest.raises(SeamError, match=sentence):
        cut_model(digits_mlp(), own, [], collect(named(cut=cut)))
    with pytest.raises(SeamError, match="is not offered here as cut"):
        cut_model(digits_mlp(), own, [], collect(["fedring"]))


@pytest.mark.parametrize(
    ("samples", "size", "most", "unit", "parts"),
    [
        (32, 4, 8, 1, [4] * 8),
        (33, 4, 8, 1, [5, *[4] * 7]),
        (13, 4, 8, 1, [5, 4, 4]),
        (3, 4, 8, 1, [3]),
        (13, 4, 8, 2, [7, 6]),
        (1, 4, 8, 2, [1, 1]),  # the same sample twice
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
    replicated = table(schedule="pipedream", micro_batches=12, stages=3, replicas=[2, 3, 1])
    assert (replicated.interval, replicated.width) == (6, 6)
    assert [len(replicated.schedule_of(count).workers) for count in (1, 5, 12)] == [6, 6, 6]
    assert table(schedule="pipedream", stages=2, replicas=[2, 1], versions="macrobatch").interval == 2


def test_a_jobs_own_cut_may_return_routes() -> None:
    name = "tests.unit.pipeline.test_pipeline_skips:thirds"
    stages = cut_model(Translator(), table(stages=3, cut=name), [], collect(named(cut=name)))
    assert stages.routes.consumers(0) == {"memory": (1, 2), "padding": (1, 2)}
    with pytest.raises(SeamError, match="returned 3 stages, but the job's table has stages=2"):
        cut_model(Translator(), table(stages=2, cut=name), [], collect(named(cut=name)))


def test_the_layers_of_a_model_of_several_tensors_are_counted_and_timed() -> None:
    sample = {name: parts[0] for name, parts in sentences(0)[0].items()}
    for cut in ("parameters", "time"):
        asked = table(stages=3, cut=cut)
        counts = count_layers(model_of(), asked, lambda: sample)
        stages = cut_model(model_of(), asked, counts, Offered())
        assert {name for stage in range(3) for name in stages.routes.from_batch(stage)} == {"source", "target"}
