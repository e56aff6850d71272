"""Every key of a job reaches the state machine or the wire."""

import json

from fedring.server.round.events import RoundRules
from fedring.server.round.plan import job_spec, rules_of, train_cmd
from fedring.train.jobs.job import Job

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
    # The first two are for other modes, the next ones are tables that a job may do without, and the last one depends on
    # the model's values.
    others = {"data_parallel", "pipeline", "personal", "dp", "sample_dp", "secure_aggregation", "transforms"}
    others |= {"frozen_digest"}
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


def test_rounds_have_different_seeds_and_a_repeated_job_has_the_same_seeds() -> None:
    first, second = (train_cmd(JOB, job_spec(JOB, 1), number=n, job_round=n).seed for n in (1, 2))
    again = train_cmd(JOB, job_spec(JOB, 2), number=51, job_round=1).seed
    assert first == again != second
