"""The keys of a job, checked before they are sent."""

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from fedring.daemon.config import ConfigError, check_keys, explain
from fedring.train.jobs.job import Job


def check_job(table: Mapping[str, Any], *, where: str) -> None:
    """Check the keys and values of a job.

    The table may be only the part of it that differs from the server's defaults.

    Args:
        table: The keys.
        where: Where they are from, for the error's sentence.

    Raises:
        ConfigError: There is no such key, or a value is wrong.
    """
    check_keys(Job, table, where=where)
    try:
        Job.model_validate(table)
    except ValidationError as error:
        # Whether several keys fit together depends on the server's defaults, too, so the server checks that.
        if any(row["loc"] for row in error.errors()):
            raise ConfigError(explain(error, dict.fromkeys(table, where), Job)) from error
