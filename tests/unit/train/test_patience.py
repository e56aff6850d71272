"""The keys beside `patience`, as they are checked when a job is queued."""

from math import inf, nan
from typing import Any

import pytest
from pydantic import ValidationError

from fedring.train.jobs.job import Job


def test_patience_takes_min_delta_and_min_rounds() -> None:
    job = Job.model_validate({"patience": 2, "min_delta": 0.01, "min_rounds": 5, "rounds": 5})
    assert (job.min_delta, job.min_rounds) == (0.01, 5)


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"min_delta": -0.1}, "greater than or equal to 0"),
        ({"min_delta": nan}, "finite number"),
        ({"min_delta": inf}, "finite number"),
        ({"min_rounds": -1}, "greater than or equal to 0"),
        ({"min_rounds": 11}, "min_rounds must be at most rounds=10, and is 11"),
        ({"patience": 0, "min_delta": 0.1}, "min_delta and min_rounds belong to patience"),
        ({"patience": 0, "min_rounds": 2}, "min_delta and min_rounds belong to patience"),
    ],
)
def test_a_value_that_makes_no_sense_is_refused(keys: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        Job.model_validate({"rounds": 10, "patience": 2, **keys})
