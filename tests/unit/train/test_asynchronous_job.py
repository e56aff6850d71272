"""The table [asynchronous]: what goes with it, what is refused with which advice, and its formula."""

from typing import Any

import pytest
from pydantic import ValidationError

from fedring.train.jobs.asynchronous_table import staleness_weight
from fedring.train.jobs.job import Job

KEYS: dict[str, Any] = {"weights": "uniform", "evaluate": False, "min_clients": 10}
TABLE = {"concurrency": 10, "buffer": 3}


def job(table: dict[str, Any] = TABLE, **keys: Any) -> Job:
    return Job.model_validate({**KEYS, "asynchronous": table, **keys})


def test_old_updates_count_less() -> None:
    assert [staleness_weight(versions) for versions in (0, 3, 8)] == [1.0, 0.5, 1 / 3]


def test_a_buffer_close_to_the_number_of_clients_at_work_is_warned_of() -> None:
    near, far = job(TABLE | {"buffer": 6}).asynchronous, job().asynchronous
    assert near is not None
    assert far is not None
    assert far.warning == ""
    assert "buffer = 6 is close to concurrency = 10" in near.warning
    assert "a tenth to a third" in near.warning


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"asynchronous": {"concurrency": 3, "buffer": 4}}, "lower buffer, or raise concurrency"),
        ({"min_clients_to_aggregate": 4}, "must be at most buffer = 3"),
        ({"mode": "data_parallel"}, 'mode is "data_parallel", and must be "federated"'),
        ({"weights": "samples"}, 'weights is "samples", and must be "uniform"'),
        ({"evaluate": True}, "evaluate_on_server may be true"),
        ({"scaffold": True, "momentum": 0.0}, "scaffold is true, and must be false"),
        ({"transforms": [{"name": "feddyn", "args": {"alpha": 0.1, "clients": 9}}]}, "leave one of the two out"),
        ({"secure_aggregation": {}, "min_clients_to_aggregate": 3}, "asynchronous does not go with secure_aggregation"),
        ({"aggregation": {"rule": "median"}}, 'aggregation.rule is "median", and must be "mean"'),
        ({"server_optimizer": {"name": "SGD", "args": {"lr": 1.0, "momentum": 0.9}}}, "use SGD without momentum"),
        ({"server_optimizer": {"name": "Adam", "args": {"lr": 0.1}}}, "use SGD without momentum"),
        ({"select_factor": 1.3}, "raise asynchronous.concurrency"),
        ({"straggler_factor": 2.0}, "a slow client's update counts in a later version"),
        ({"close_at_minimum": True, "min_clients_to_aggregate": 2}, "asynchronous.buffer says how many"),
        ({"sample_clients": 5}, "asynchronous.concurrency says how many"),
        ({"sample_ratio": 0.5}, "asynchronous.concurrency says how many"),
        ({"normalize_steps": True}, "depends on which updates come together"),
    ],
)
def test_what_does_not_go_with_it_is_refused_with_advice(keys: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        job(**{"min_clients_to_aggregate": 2, **keys} if "min_clients_to_aggregate" not in keys else keys)
    assert words in str(refused.value)


def test_what_goes_with_it() -> None:
    job(server_optimizer={"name": "SGD", "args": {"lr": 0.5}})
    job(encoding="packed", download_encoding="uniform")
    job(dp={"noise_multiplier": 0.1, "adaptive": False})
    assert job().fewest_updates == 3
