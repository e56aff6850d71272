"""Overrides of a job: which hold for a client, what it is told, and which are refused."""

from typing import Any

import pytest
from pydantic import ValidationError

from fedring.control.job_file import check_job
from fedring.daemon.config import ConfigError, explain
from fedring.privacy.account import SampledSteps
from fedring.server.aggregation.fednova import accumulation, factors_of
from fedring.server.model.control import ControlPlan, plan_control
from fedring.server.state.rows import UpdateRow
from fedring.train.jobs.job import Job
from fedring.train.jobs.override_table import Override, no_client_has, overrides_of, unmatched, with_overrides
from fedring.train.orders.commands import client_command, job_spec, train_cmd
from fedring.train.plan import Plan
from fedring.train.private_loop import sampled_steps
from fedring.v1 import federation_pb2 as pb

GPU = {"gpu": "yes"}
ROWS = [UpdateRow(1, client, "", "", (), 100, 0, 0.0, 1.0, 0.0) for client in ("a", "b")]


def job(*overrides: dict[str, Any], **keys: Any) -> Job:
    return Job.model_validate({"rounds": 3, **keys, "override": list(overrides)})


def told(job: Job, labels: dict[str, str], job_round: int = 1) -> pb.TrainCmd:
    """Return the command of a client with these labels."""
    command = train_cmd(job, job_spec(job, 1), number=7, job_round=job_round)
    places = overrides_of({"a": labels}, job.override).get("a", [])
    return client_command(command, with_overrides(job, places))


def test_the_later_of_two_overrides_wins_key_by_key() -> None:
    made = job(
        {"where": GPU, "epochs": 2, "lr": 0.2},
        {"where": {"site": ["eu", "us"]}, "lr": 0.3, "batch_size": 9},
        {"where": {**GPU, "site": "eu"}, "epochs": 5},
        epochs=1,
        lr=0.1,
        batch_size=64,
    )
    found = {
        "none": told(made, {}),
        "other": told(made, {"gpu": "no", "site": "asia"}),
        "gpu": told(made, GPU),
        "site": told(made, {"site": "us"}),
        "both": told(made, {**GPU, "site": "eu", "more": "1"}),
    }
    assert {name: (each.epochs, each.lr, each.batch_size) for name, each in found.items()} == {
        "none": (1, 0.1, 64),
        "other": (1, 0.1, 64),
        "gpu": (2, 0.2, 64),
        "site": (1, 0.3, 9),
        "both": (5, 0.3, 9),
    }


def test_a_client_is_told_nothing_else_than_its_own_settings() -> None:
    values = {
        "subset_size": 0, "epochs": 3, "batch_size": 2, "lr": 0.5, "momentum": 0.0, "mu": 0.0, "clip_norm": 0.0,
        "precision": "bf16",
    }  # fmt: skip
    assert set(values) == Override.model_fields.keys() - {"where"}
    made = job({"where": GPU, **values}, subset_size=9, momentum=0.9, mu=0.1, clip_norm=2.0)
    own = told(made, GPU)
    assert {key: getattr(own, key) for key in values} == values
    for key in values:
        own.ClearField(key)  # type: ignore[arg-type]  # the names are known to be fields
    common = told(made, {})
    for key in values:
        common.ClearField(key)  # type: ignore[arg-type]
    assert own == common


def test_an_override_may_follow_a_schedule_and_wins_over_that_of_the_job() -> None:
    rate = {"schedule": "linear", "start": 0.4, "end": 0.2}
    made = job({"where": GPU, "lr": rate, "epochs": 2}, epochs={"schedule": "linear", "start": 3, "end": 1})
    assert [told(made, GPU, number).lr for number in (1, 2, 3)] == pytest.approx([0.4, 0.3, 0.2])
    assert [told(made, GPU, number).epochs for number in (1, 2, 3)] == [2, 2, 2]
    assert [told(made, {}, number).epochs for number in (1, 2, 3)] == [3, 2, 1]
    assert Job.model_validate(made.model_dump(mode="json")) == made


def test_fednova_divides_each_delta_by_the_steps_and_the_rate_of_its_own_client() -> None:
    made = job({"where": GPU, "epochs": 2, "batch_size": 50, "lr": 0.1, "momentum": 0.5}, normalize_steps=True, lr=0.05)
    own = {"b": with_overrides(made, [0])}
    found = factors_of(made, 1, ROWS, {"a": 1.0, "b": 1.0}, told=own)
    a, b = accumulation(2, 0.9), accumulation(4, 0.5) * 2
    assert found == pytest.approx({"a": (a + b) / 2 / a, "b": (a + b) / 2 / b})
    assert factors_of(made, 1, ROWS, {"a": 1.0, "b": 1.0}) == {"a": 1.0, "b": 1.0}


def test_scaffold_divides_each_delta_by_the_steps_and_the_rate_of_its_own_client() -> None:
    needed = {"scaffold": True, "momentum": 0.0, "weights": "uniform"}
    made = job({"where": GPU, "epochs": 4, "batch_size": 10, "lr": 0.1}, **needed, lr=0.05)
    plan = plan_control(made, 1, ROWS, None, told={"b": with_overrides(made, [0])})
    assert isinstance(plan, ControlPlan)
    assert plan.scales == pytest.approx({"a": 2 * 0.05, "b": 40 * 0.1})


def test_the_noise_of_a_client_is_charged_for_its_own_steps() -> None:
    private = {"sample_dp": {"noise_multiplier": 1.5}, "weights": "uniform", "evaluate": False}
    made = job({"where": GPU, "epochs": 4, "batch_size": 10}, **private)
    own, common = (told(made, labels) for labels in (GPU, {}))
    costs = []
    for each in (own, common):
        plan = Plan(epochs=each.epochs, batch_size=each.batch_size, subset_size=each.subset_size)
        assert made.sample_dp is not None
        costs.append(sampled_steps(plan, made.sample_dp, 100))
    assert costs == [SampledSteps(0.1, 1.5, 40), SampledSteps(0.64, 1.5, 2)]


def test_overrides_that_hold_for_nobody_are_named() -> None:
    made = job({"where": GPU, "epochs": 2}, {"where": {"site": ["eu", "us"]}, "epochs": 2})
    assert unmatched([GPU, {"site": "us"}], made.override) == []
    text = no_client_has(unmatched([{"gpu": "no"}], made.override), who="no client here")
    assert text == "no client here has gpu=yes or site=eu|us, for which the job has [[override]]"
    assert no_client_has([], who="no client here") == ""


WRONG: list[tuple[dict[str, Any], Any, str]] = [
    ({}, {"where": GPU}, "override.0: an override changes nothing: set one of subset_size, epochs, batch_size"),
    ({}, {"where": {}, "epochs": 2}, "override.0.where: names no label, and an override for all clients is the key"),
    ({}, {"epochs": 2}, "override.0.where: must be given"),
    ({}, {"where": GPU, "epoch": 2}, "unknown key 'override.0.epoch' in job.toml; did you mean 'override.0.epochs'?"),
    ({}, {"where": GPU, "seed": 2}, "unknown key 'override.0.seed' in job.toml; valid keys: where, subset_size"),
    ({}, {"where": GPU, "epochs": 0}, "override.0.epochs: must be greater than or equal to 1, not 0"),
    ({}, {"where": GPU, "momentum": 1.5}, "override.0.momentum: must be less than 1, not 1.5"),
    ({}, {"where": GPU, "lr": float("inf")}, "override.0.lr: must be a finite number"),
    ({}, {"where": GPU, "precision": "fp8"}, "override.0.precision: must be 'fp32' or 'bf16', not 'fp8'"),
    ({}, {"where": {"gpu": "a b"}, "epochs": 2}, "override.0.where: gpu in it must be text of 1 to 64"),
    ({"mode": "data_parallel"}, {"where": GPU, "epochs": 2}, "override belongs to the mode federated"),
    (
        {"secure_aggregation": {}, "evaluate": False, "min_clients": 3, "min_clients_to_aggregate": 3},
        {"where": GPU, "epochs": 2},
        "override does not go with [secure_aggregation], whose clients check",
    ),
    (
        {"scaffold": True, "momentum": 0.0, "weights": "uniform"},
        {"where": GPU, "momentum": 0.5},
        "override.0: scaffold = true needs momentum = 0.0, and it is 0.5",
    ),
    ({"normalize_steps": True}, {"where": GPU, "mu": 0.1}, "override.0: normalize_steps does not go with mu=0.1"),
    ({"trainer": "a:b"}, {"where": GPU, "precision": "bf16"}, 'override.0: precision = "bf16" needs trainer = ""'),
    (
        {},
        {"where": GPU, "lr": {"schedule": "linear", "start": 1, "end": 2, "warmup_rounds": 9}},
        "override.0: lr.warmup_rounds must be below rounds=3",
    ),
]


@pytest.mark.parametrize(("keys", "override", "sentence"), WRONG)
def test_an_override_that_cannot_hold_is_refused_with_a_sentence(
    keys: dict[str, Any], override: dict[str, Any], sentence: str
) -> None:
    table = {"rounds": 3, **keys, "override": [override]}

    def check() -> None:
        check_job(table, where="job.toml")  # as flctl does
        Job.model_validate(table)  # as the server does

    with pytest.raises((ConfigError, ValidationError)) as caught:
        check()
    error = caught.value
    text = explain(error, {}, Job) if isinstance(error, ValidationError) else str(error)
    assert sentence in text
    assert "\n" not in text


def test_one_pair_of_brackets_is_not_enough() -> None:
    with pytest.raises(ConfigError, match=r"must be a list of tables: \[\[override\]\], with two brackets"):
        check_job({"override": {"where": GPU, "epochs": 2}}, where="job.toml")
