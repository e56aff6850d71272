"""Differential privacy of single samples: what it costs, and what it needs of a job."""

import re
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from tests import forks

from fedring.client.transfer.update import TrainingReport, make_update
from fedring.codec import Entry, Schema, Vectors
from fedring.control.failure import Failure
from fedring.privacy.account import SampledSteps, sampled_epsilon
from fedring.rpc.errors import BadUpdate
from fedring.server.aggregation.terms import Terms
from fedring.server.model.transforms.listing import transforms_of
from fedring.server.update.admission import open_offer
from fedring.simulation import simulate
from fedring.simulation.worker import admit
from fedring.train.jobs.job import Job
from fedring.train.jobs.sample_privacy_table import SamplePrivacy
from fedring.train.orders.commands import job_spec
from fedring.train.plan import Plan
from fedring.train.private_loop import sampled_steps
from fedring.train.tensors.download import HeldModel
from fedring.v1 import federation_pb2 as pb


def noisy(multiplier: float, **keys: float) -> SamplePrivacy:
    return SamplePrivacy.model_validate({"noise_multiplier": multiplier, **keys})


QUIET = noisy(1e-9)
PRIVATE: dict[str, Any] = {"weights": "uniform", "evaluate": False}


# What it costs


@pytest.mark.parametrize(
    ("rate", "multiplier", "steps", "expected"),
    [(0.1, 1.0, 100, 7.97), (0.01, 1.0, 1000, 2.11), (1.0, 5.0, 50, 7.08)],
)
def test_epsilon_of_sampled_steps(rate: float, multiplier: float, steps: int, expected: float) -> None:
    assert sampled_epsilon([SampledSteps(rate, multiplier, steps)], 1e-5) == pytest.approx(expected, rel=0.01)


def test_epsilon_adds_up_over_trainings_and_hardly_any_noise_protects_nobody() -> None:
    assert sampled_epsilon([], 1e-5) == 0.0
    steps = [SampledSteps(0.1, 1.0, 40), SampledSteps(0.1, 1.0, 60)]
    assert sampled_epsilon(steps, 1e-5) == sampled_epsilon([SampledSteps(0.1, 1.0, 100)], 1e-5)
    assert sampled_epsilon([*steps, SampledSteps(0.2, 2.0, 9)], 1e-5) > sampled_epsilon(steps, 1e-5)
    assert sampled_epsilon([SampledSteps(0.5, 1e-9, 1)], 1e-5) > 1e9


@pytest.mark.programs
def test_the_accountant_says_nothing_of_orders_that_it_leaves_out(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(
        "from fedring.privacy.account import SampledSteps, sampled_epsilon\n"
        "sampled_epsilon([SampledSteps(0.1, 1.0, 100)], 1e-5)\n"
    )
    done = forks.run("program", cwd=tmp_path, timeout=240)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_steps_of_a_round_follow_from_the_number_of_samples() -> None:
    assert sampled_steps(Plan(epochs=3, batch_size=10), QUIET, 95) == SampledSteps(10 / 95, 1e-9, 30)
    assert sampled_steps(Plan(epochs=3, batch_size=10, subset_size=20), QUIET, 95) == SampledSteps(10 / 95, 1e-9, 6)
    assert sampled_steps(Plan(epochs=2, batch_size=10, subset_size=200), QUIET, 7) == SampledSteps(1.0, 1e-9, 2)


# The job


@pytest.mark.parametrize("told", ["samples", "metrics", "seconds", "nothing"])
def test_a_client_that_does_not_know_the_table_is_refused(told: str) -> None:
    size = 4
    schema = Schema((Entry("w", (size,), "float32", "parameter"),))
    report = {
        "samples": TrainingReport(2),
        "metrics": TrainingReport(1, 0.0, {"loss": 1.0}),
        "seconds": TrainingReport(1, 2.0),
        "nothing": TrainingReport(1),
    }[told]
    zeros = Vectors(np.zeros(size, np.float32), np.zeros(0))
    command = pb.TrainCmd(round=1, encoding=pb.Encoding(name="fp32"), schema_hash=schema.hash)
    trained = Vectors(np.ones(size, np.float32), np.zeros(0))
    update = make_update(command, "a", HeldModel("", schema, zeros), trained, report, None)
    terms = Terms("", 10_000, schema, bare=True, silent=True)
    payload = b"".join(update.parts)
    if told == "nothing":
        assert admit("a", open_offer(update.offer), payload, terms, epoch=0).num_samples == 1
        return
    with pytest.raises(BadUpdate, match="update this client") as refused:
        admit("a", open_offer(update.offer), payload, terms, epoch=0)
    assert refused.value.reason == "no_sample_dp"


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({}, 'sample_dp: weights is "samples", and must be "uniform", because numbers of samples are not private'),
        ({"weights": "uniform"}, "sample_dp: evaluate is true, and must be false"),
        (PRIVATE | {"mode": "data_parallel"}, 'sample_dp: mode is "data_parallel", and must be "federated"'),
        (PRIVATE | {"mode": "pipeline"}, 'sample_dp: mode is "pipeline", and must be "federated"'),
        (PRIVATE | {"trainer": "a:b"}, 'sample_dp: trainer is "a:b", and must be ""'),
        (PRIVATE | {"normalize_steps": True}, "sample_dp: normalize_steps is true"),
        (PRIVATE | {"scaffold": True, "momentum": 0.0}, "sample_dp: scaffold is true"),
        (PRIVATE | {"best_by": "max train/f1"}, 'sample_dp: best_by = "max train/f1" is never known'),
    ],
)
def test_a_job_that_would_leak_is_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(sentence)):
        Job.model_validate({"sample_dp": {"noise_multiplier": 1.0}, **keys})


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({}, "Field required"),
        ({"noise_multiplier": 0}, "greater than or equal to 0.000000001"),
        ({"noise_multiplier": inf}, "less than or equal to 1000000"),
        ({"noise_multiplier": 1, "max_grad_norm": 0}, "greater than or equal to 0.000000000001"),
        ({"noise_multiplier": 1, "delta": 0}, "greater than 0"),
        ({"noise_multiplier": 1, "max_epsilon": -1}, "greater than or equal to 0"),
        ({"noise_multiplier": 1, "clip": 2}, "not permitted"),
    ],
)
def test_bad_settings_are_refused(table: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=re.escape(sentence)):
        Job.model_validate({"sample_dp": table, **PRIVATE})


def test_both_kinds_of_privacy_go_together_and_reach_the_clients() -> None:
    dp = {"noise_multiplier": 1.0, "adaptive": False}
    tables = {"dp": dp, "sample_dp": {"noise_multiplier": 2.0}, "personal": {}, "aggregation": {"rule": "mean"}}
    job = Job.model_validate(tables | PRIVATE)
    assert SamplePrivacy.model_validate_json(job_spec(job, 1).sample_dp) == job.sample_dp
    assert _is_bare(job)
    assert job_spec(Job.model_validate({}), 1).sample_dp == ""
    robust = {"sample_dp": {"noise_multiplier": 2.0}, "aggregation": {"rule": "median"}, "update_clip": 1.0}
    assert _is_bare(Job.model_validate(robust | PRIVATE | {"min_clients": 5}))


def _is_bare(job: Job) -> bool:
    schema = Schema((Entry("w", (1,), "float32", "parameter"),))
    return transforms_of(job).terms(Terms("", 1, schema), pb.TrainCmd(), 0).bare


def test_a_simulation_trains_privately_and_its_clients_stop_by_themselves() -> None:
    job: dict[str, Any] = {"min_clients": 2, "rounds": 3, "max_abandoned": 1, "batch_size": 128, "lr": 0.5, **PRIVATE}
    job["sample_dp"] = {"noise_multiplier": 1.0}
    first, second = (simulate(job, clients=2, workers=1, threads=1) for _ in range(2))
    assert first["model_sha256"] != second["model_sha256"]
    spent = first["sample_epsilon"]
    assert spent == pytest.approx(sampled_epsilon([SampledSteps(128 / 719, 1.0, 18)], 1e-5), rel=0.01)
    assert not first["rounds"][0]["metrics"]
    job["sample_dp"]["max_epsilon"] = spent - 0.01
    with pytest.raises(Failure, match=r"round 3 is abandoned.* above sample_dp\.max_epsilon = "):
        simulate(job, clients=2, workers=1, threads=1)
    job["model"] = "torchvision:resnet18"
    with pytest.raises(Failure, match=r"sample_dp: the layer bn1 \(BatchNorm2d\) computes with several samples"):
        simulate(job, clients=2, workers=1, threads=1)
