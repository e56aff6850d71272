"""Which jobs can be aggregated securely; the others are refused when they are queued, with the key in the sentence."""

from typing import Any

import pytest
from pydantic import ValidationError

from fedring.train.jobs.job import Job

FITS: dict[str, Any] = {
    "min_clients": 5,
    "min_clients_to_aggregate": 4,
    "evaluate": False,
    "secure_aggregation": {},
}


def job(**keys: Any) -> Job:
    return Job.model_validate(FITS | keys)


def test_a_job_that_fits() -> None:
    assert job().secure_aggregation is not None
    job(weights="uniform", update_clip=1.0, evaluate_on_server=True, best_by="max server/accuracy", patience=3)
    job(aggregation={"rule": "median"}, min_clients=12, secure_aggregation={"group_size": 4}, sample_clients=12)
    job(aggregation={"rule": "krum", "malicious": 1}, min_clients=15, secure_aggregation={"group_size": 3})


@pytest.mark.parametrize(
    ("keys", "clause"),
    [
        ({"mode": "data_parallel"}, "mode"),
        ({"evaluate": True}, "evaluate"),
        ({"normalize_steps": True}, "normalize_steps"),
        ({"scaffold": True, "momentum": 0.0, "weights": "uniform"}, "scaffold"),
        ({"update_clip_factor": 2.0}, "update_clip_factor"),
        ({"close_at_minimum": True}, "close_at_minimum"),
        ({"straggler_factor": 2.0}, "straggler_factor"),
        ({"aggregation": {"rule": "median"}}, "group_size"),
        (
            {
                "min_clients": 12,
                "aggregation": {"rule": "krum", "malicious": 1},
                "secure_aggregation": {"group_size": 3},
            },
            "krum with malicious = 1 needs 5 updates, and has 4, of which each group of secure_aggregation has one",
        ),
        ({"encoding": "packed"}, "keep_ratio"),
        ({"best_by": "min train/loss"}, "train/loss"),
        ({"min_clients_to_aggregate": 3}, "min_clients_to_aggregate is 3, and must be at least 4"),
        ({"min_clients": 2, "min_clients_to_aggregate": 2}, "at least 3 clients"),
        ({"secure_aggregation": {"group_size": 6}}, "at least 6 clients"),
        ({"secure_aggregation": {"group_size": 2}}, "group_size must be 0 or at least 3"),
        ({"secure_aggregation": {"block": 100}}, "power of two"),
        ({"secure_aggregation": {"levels": 32767, "max_weight": 1000}}, "too large for sums of 32 bits"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_job_that_does_not_fit_is_refused(keys: dict[str, Any], clause: str) -> None:
    with pytest.raises(ValidationError, match="secure_aggregation") as refused:
        job(**keys)
    assert clause in str(refused.value)
