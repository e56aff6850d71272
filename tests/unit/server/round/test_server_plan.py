"""Every key of a job reaches the state machine or the wire."""

import json
from typing import Any

import pytest
from pydantic import ValidationError

from fedring.client.policy.secret import ClientSecret
from fedring.client.round_plan import plan_of
from fedring.server.round.events import RoundRules
from fedring.server.round.plan import rules_of
from fedring.train.jobs.job import Job
from fedring.train.orders.commands import job_spec, train_cmd

JOB = Job.model_validate(
    {
        "name": "n",
        "rounds": 7,
        "model": "m:m",
        "model_args": {"hidden": 3},
        "data": "d:d",
        "loss": "l:l",
        "optimizer": "o:o",
        "optimizer_args": {"nesterov": True},
        "trainer": "t:t",
        "evaluator": "e:e",
        "partition": "dirichlet",
        "alpha": 0.25,
        "private": ["*.bn*"],
        "subset_size": 11,
        "epochs": 2,
        "batch_size": 5,
        "lr": 0.125,
        "momentum": 0.5,
        "mu": 0.75,
        "seed": 9,
        "encoding": "packed",
        "chunk": 64,
        "keep_ratio": 0.5,
        "step": 2.0,
        "min_clients": 4,
        "barrier": "joined",
        "barrier_timeout_seconds": 1.5,
        "sample_ratio": 0.5,
        "sample_clients": 3,
        "min_clients_to_aggregate": 2,
        "close_at_minimum": True,
        "deadline_seconds": 2.5,
        "evaluate_seconds": 3.5,
    }
)


def test_the_rules_of_a_round_are_those_of_its_job() -> None:
    expected = RoundRules(
        min_clients=4,
        barrier="joined",
        barrier_timeout=1.5,
        sample_ratio=0.5,
        sample_clients=3,
        min_to_aggregate=2,
        close_at_minimum=True,
        deadline=2.5,
        grace=6.0,
        evaluate_timeout=3.5,
        seed=9,
    )
    assert rules_of(JOB, grace=6.0) == expected


def test_clients_receive_every_key_of_a_job_that_concerns_training() -> None:
    spec = job_spec(JOB, 12)
    sent = {field.name for field, _ in spec.ListFields()}
    # The first two are for other modes, the next ones are tables that a job may do without, and the last ones
    # depend on the model's values, and on an operator.
    others = {"data_parallel", "pipeline", "personal", "dp", "sample_dp", "secure_aggregation", "transforms"}
    others |= {"frozen_digest", "signed"}
    assert sent == {field.name for field in spec.DESCRIPTOR.fields} - others
    assert (list(spec.shared), list(spec.private)) == (["*"], ["*.bn*"])
    assert json.loads(spec.model_args) == {"hidden": 3}
    assert (spec.job_id, spec.mode, spec.rounds, spec.alpha, spec.seed) == (12, "federated", 7, 0.25, 9)


def test_a_command_carries_the_hyperparameters_of_the_round() -> None:
    command = train_cmd(JOB, job_spec(JOB, 12), number=30, job_round=3)
    assert (command.round, command.job_round, command.job.job_id) == (30, 3, 12)
    assert (command.subset_size, command.epochs, command.batch_size) == (11, 2, 5)
    assert (command.lr, command.momentum, command.mu) == (0.125, 0.5, 0.75)
    encoding = command.encoding
    assert (encoding.name, encoding.chunk, encoding.keep_ratio, encoding.step) == ("packed", 64, 0.5, 2.0)


def test_clients_train_with_the_clip_and_the_precision_of_the_job() -> None:
    secret = ClientSecret(lambda: bytes(32))
    chosen: list[dict[str, Any]] = [{"clip_norm": 0.5, "precision": "bf16"}, {}]
    for keys in chosen:
        job = Job.model_validate(keys)
        plan = plan_of(train_cmd(job, job_spec(job, 1), number=1, job_round=1), "a", secret)
        assert (plan.clip_norm, plan.precision) == (keys.get("clip_norm", 0.0), keys.get("precision", "fp32"))


def test_a_client_of_an_older_server_trains_in_fp32() -> None:
    job = Job.model_validate({})
    command = train_cmd(job, job_spec(job, 1), number=1, job_round=1)
    command.ClearField("precision")
    assert plan_of(command, "a", ClientSecret(lambda: bytes(32))).precision == "fp32"


SAMPLE_DP: dict[str, Any] = {"sample_dp": {"noise_multiplier": 1.0}, "weights": "uniform", "evaluate": False}


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"clip_norm": -1.0}, "greater than or equal to 0"),
        ({"clip_norm": float("nan")}, "finite"),
        ({"clip_norm": float("inf")}, "finite"),
        ({"precision": "fp16"}, "'fp32' or 'bf16'"),
        ({"clip_norm": 1.0, "trainer": "a:b"}, 'clip_norm = 1 needs trainer = "", and it is "a:b"'),
        ({"precision": "bf16", "trainer": "a:b"}, 'precision = "bf16" needs trainer = "", and it is "a:b"'),
        ({"clip_norm": 1.0, "mode": "pipeline"}, 'clip_norm = 1 needs mode = "federated", and it is "pipeline"'),
        (
            {"precision": "bf16", "mode": "data_parallel"},
            'precision = "bf16" needs mode = "federated", and it is "data',
        ),
        (SAMPLE_DP | {"clip_norm": 1.0}, "sample_dp: clip_norm is 1, and must be 0, because the gradient of each"),
        (SAMPLE_DP | {"precision": "bf16"}, 'sample_dp: precision is "bf16", and must be "fp32", because gradients of'),
    ],
)
def test_a_clip_or_a_precision_that_would_not_be_followed_is_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError) as refused:
        Job.model_validate(keys)
    assert sentence in str(refused.value)


def test_rounds_have_different_seeds_and_a_repeated_job_has_the_same_seeds() -> None:
    first, second = (train_cmd(JOB, job_spec(JOB, 1), number=n, job_round=n).seed for n in (1, 2))
    again = train_cmd(JOB, job_spec(JOB, 2), number=51, job_round=1).seed
    assert first == again != second
