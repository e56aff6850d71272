"""Settings that follow a schedule: their values, what is refused, and how they reach clients and operators."""

from math import cos, pi
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from tests.unit.host import running, spec

from fedring.daemon.config import explain, parse_overrides
from fedring.server.operator.job_requests import _defaults_for
from fedring.server.round.report import round_message
from fedring.train.bounds import MAX_COUNT
from fedring.train.jobs.job import Job
from fedring.train.jobs.round_settings import RoundSettings
from fedring.train.orders.commands import job_spec, train_cmd


def job(**keys: Any) -> Job:
    return Job.model_validate({"rounds": 10, **keys})


def rates(**keys: Any) -> list[float]:
    made = job(lr={"start": 0.1, **keys})
    return [made.settings_of(number).lr for number in range(1, made.rounds + 1)]


def refusal(**keys: Any) -> str:
    with pytest.raises(ValidationError) as refused:
        job(**keys)
    return explain(refused.value, {}, Job)


def test_a_number_holds_for_all_rounds() -> None:
    made = job(lr=0.5, epochs=3)
    assert made.settings_of(1) == made.settings_of(10) == RoundSettings(0.5, 3, 0)


def test_a_line_goes_from_start_to_end() -> None:
    assert rates(schedule="linear", end=0.01) == pytest.approx([0.1 - 0.01 * done for done in range(10)])


def test_a_cosine_goes_from_start_to_end() -> None:
    expected = [0.02 + 0.08 * (1 + cos(pi * done / 9)) / 2 for done in range(10)]
    assert rates(schedule="cosine", end=0.02) == pytest.approx(expected)
    assert expected[0] == 0.1
    assert expected[-1] == pytest.approx(0.02)


def test_steps_multiply_the_value_after_every_few_rounds() -> None:
    assert rates(schedule="step", every=4, gamma=0.5) == [0.1] * 4 + [0.05] * 4 + [0.025] * 2


def test_a_warm_up_rises_to_start_in_equal_steps_and_the_schedule_follows() -> None:
    values = rates(schedule="linear", end=0.04, warmup_rounds=3)
    assert values == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.09, 0.08, 0.07, 0.06, 0.05, 0.04])


def test_a_schedule_of_one_round_is_its_start() -> None:
    for keys in ({"schedule": "cosine", "end": 0.5}, {"schedule": "linear", "end": 0.5}):
        assert job(rounds=1, lr={"start": 0.1, **keys}).settings_of(1).lr == 0.1


def test_whole_numbers_are_rounded_and_at_least_1() -> None:
    made = job(
        epochs={"schedule": "step", "start": 4, "every": 2, "gamma": 0.5},
        subset_size={"schedule": "linear", "start": 100, "end": 10, "warmup_rounds": 1},
    )
    settings = [made.settings_of(number) for number in range(1, 11)]
    assert [each.epochs for each in settings] == [4, 4, 2, 2, 1, 1, 1, 1, 1, 1]
    assert [each.subset_size for each in settings] == [50, 100, 89, 78, 66, 55, 44, 32, 21, 10]


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"lr": "cosine"}, "lr: must be a number, or a table such as"),
        ({"lr": [0.1]}, "lr: must be a number, or a table such as"),
        ({"lr": 0}, "lr: must be greater than 0"),
        ({"epochs": 1.5}, "epochs: must be a whole number"),
        ({"lr": {"schedule": "cosin", "start": 1, "end": 1}}, "lr.schedule: must be 'cosine', 'linear' or 'step'"),
        ({"lr": {"schedule": "cosine", "end": 1}}, "lr.start: must be given"),
        ({"lr": {"schedule": "cosine", "start": 1}}, 'lr: schedule = "cosine" needs end'),
        ({"lr": {"schedule": "step", "start": 1, "every": 2}}, 'lr: schedule = "step" needs every and gamma'),
        (
            {"lr": {"schedule": "step", "start": 1, "every": 2, "gamma": 1, "end": 1}},
            'lr: schedule = "step" takes no end, but every and gamma',
        ),
        ({"lr": {"schedule": "linear", "start": -1, "end": 1}}, "lr.start: must be greater than 0"),
        ({"lr": {"schedule": "linear", "start": 1, "end": 0}}, "lr.end: must be greater than 0"),
        (
            {"lr": {"schedule": "linear", "start": 1, "end": 2, "warmup_rounds": 10}},
            "lr.warmup_rounds must be below rounds=10, and is 10",
        ),
        ({"lr": {"schedule": "step", "start": 1, "every": 1, "gamma": 1e-60}}, "and is 0 in round 10"),
        ({"lr": {"schedule": "step", "start": 1, "every": 1, "gamma": 1e60}}, "and is inf in round 10"),
        ({"epochs": {"schedule": "linear", "start": 1, "end": 1e12}}, "epochs must be above 0 and at most 4.29497e+09"),
        (
            {"mode": "pipeline", "lr": {"schedule": "linear", "start": 1, "end": 2}},
            "lr follows a schedule in the mode federated only: give a pipeline job a number",
        ),
    ],
)
def test_what_cannot_be_a_schedule_is_refused_in_one_sentence(keys: dict[str, Any], sentence: str) -> None:
    assert sentence in refusal(**keys)
    assert "\n" not in refusal(**keys)


def test_the_largest_values_of_a_schedule_fit_the_wire() -> None:
    made = job(epochs={"schedule": "linear", "start": 1, "end": MAX_COUNT})
    assert train_cmd(made, job_spec(made, 1), number=1, job_round=10).epochs == MAX_COUNT


def test_a_stored_job_has_the_same_schedule() -> None:
    made = job(lr={"schedule": "cosine", "start": 0.1, "end": 0.01})
    assert Job.model_validate_json(made.model_dump_json()) == made


def test_keys_of_the_command_line_change_one_value_of_a_schedule() -> None:
    overrides = parse_overrides(["lr.schedule=linear", "lr.start=0.1", "lr.end=0.01"])
    assert job(**overrides) == job(lr={"schedule": "linear", "start": 0.1, "end": 0.01})


def test_a_job_that_names_a_schedule_takes_no_key_of_the_servers_default() -> None:
    defaults = job(lr={"schedule": "cosine", "start": 0.1, "end": 0.01})
    step = {"schedule": "step", "start": 1, "every": 2, "gamma": 0.5}
    assert "lr" not in _defaults_for({"lr": step}, defaults)
    assert "lr" in _defaults_for({"epochs": step}, defaults)


async def test_each_round_has_the_values_of_its_number_also_after_a_restart(tmp_path: Path) -> None:
    keys = {"lr": {"schedule": "linear", "start": 0.4, "end": 0.1}, "rounds": 4, "epochs": 2}
    async with running(tmp_path) as host:
        session = host.join("a")
        row, _ = await host.jobs.start(spec(**keys), "")
        rates = []
        for _ in range(2):
            command = await host.command(session)
            rates.append(command.lr)
            await host.offer(host.update(command, "a"))
    async with running(tmp_path) as host:
        session = host.join("a")
        for _ in range(2):
            command = await host.command(session)
            rates.append(command.lr)
            await host.offer(host.update(command, "a"))
        assert await host.ended(row.job_id) == "completed"
        told = [dict(round_message(each).settings) for each in host.store.rounds.newest(10, row.job_id)]
    assert rates == pytest.approx([0.4, 0.3, 0.2, 0.1])
    assert told == [{"lr": rate} for rate in reversed(rates)]
