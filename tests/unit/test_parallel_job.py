"""What a data-parallel job may say, and what it means to server and client."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn

from fedring.client.hooks import Compressed, make_hook
from fedring.ctl.presets import Dataset, Mode, preset_job
from fedring.ctl.start import job_of
from fedring.ddp import DGC
from fedring.server.plan import group_rules, job_spec, rules_of, train_cmd
from fedring.train.errors import SeamError
from fedring.train.job import Job
from fedring.train.parallel import DataParallel
from fedring.train.plan import Plan
from fedring.train.usage import TimedHook

ROOT = Path(__file__).parents[2]


def job(**keys: Any) -> Job:
    return Job.model_validate({"mode": "data_parallel", **keys})


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"mu": 0.1}, "trainer and mu belong"),
        ({"trainer": "mine:train"}, "trainer and mu belong"),
        ({"data_parallel": {"hook": "zip"}}, "hook 'zip' is none of none, fp16, bf16, dgc"),
        ({"data_parallel": {"rati": 0.1}}, "Extra inputs"),
        ({"data_parallel": {"ratio": 0}}, "greater than 0"),
        ({"data_parallel": {"buffers": "never"}}, "buffers"),
    ],
)
def test_what_has_no_meaning_is_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        job(**keys)


def test_one_worker_delivers_for_the_group() -> None:
    spec = job(min_clients=4, min_clients_to_aggregate=2, data_parallel={"replacement_seconds": 3})
    rules = rules_of(spec, grace=5)
    assert (rules.min_to_aggregate, rules.close_at_minimum) == (1, True)
    group = group_rules(spec, target=4)
    assert (group.target, group.minimum, group.patience) == (4, 2, 3)
    assert group_rules(spec, target=1).minimum == 1


def test_the_table_travels_with_the_command_and_the_update_is_whole() -> None:
    spec = job(encoding="packed", data_parallel={"hook": "dgc", "buffers": 10})
    command = train_cmd(spec, job_spec(spec, 1), number=1, job_round=1)
    assert DataParallel.model_validate_json(command.job.data_parallel) == spec.data_parallel
    assert command.encoding.name == "fp32"
    federated = Job.model_validate({"encoding": "packed"})
    command = train_cmd(federated, job_spec(federated, 1), number=1, job_round=1)
    assert (command.job.data_parallel, command.encoding.name) == ("", "packed")


def test_the_example_is_a_job() -> None:
    path = ROOT / "deploy" / "config" / "data-parallel.toml"
    table = job_of(path, ["data_parallel.hook=fp16"])
    assert Job.model_validate(table).data_parallel.hook == "fp16"
    assert tomllib.loads(path.read_text())["data_parallel"]["hook"] == "dgc"


@pytest.mark.parametrize("dataset", list(Dataset))
def test_the_demo_has_a_data_parallel_job_for_each_data_set(dataset: Dataset) -> None:
    keys = preset_job(dataset, Mode.DATA_PARALLEL)
    spec = Job.model_validate(keys)
    assert (spec.mode, spec.subset_size, spec.name) == ("data_parallel", 0, f"{dataset} demo")


@pytest.mark.parametrize("name", ["none", "fp16", "bf16", "dgc"])
def test_each_hook_can_be_made(name: str) -> None:
    hook = make_hook(DataParallel.model_validate({"hook": name}), Plan(), nn.Linear(2, 2).named_parameters(), [])
    assert isinstance(hook, Compressed if name == "dgc" else TimedHook)


def test_a_hook_of_ones_own_must_be_trusted() -> None:
    table = DataParallel.model_validate({"hook": "tests.unit.group_member:own_hook"})
    assert isinstance(make_hook(table, Plan(), [], ["tests"]), TimedHook)
    with pytest.raises(SeamError, match="trusted"):
        make_hook(table, Plan(), [], ["fedring"])


def test_a_broken_step_leaves_no_trace_in_what_workers_share() -> None:
    hook = Compressed(DGC(), [("bias", nn.Parameter(torch.zeros(3)))])
    momentum = hook.state.shared()["bias"]
    momentum.fill_(1)
    hook.end_step()
    momentum.add_(5)  # a part of the next step's gradients has arrived
    hook.leave()
    assert momentum.tolist() == [1, 1, 1]
