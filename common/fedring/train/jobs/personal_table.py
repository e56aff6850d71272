"""The table [personal] of a job: models of the clients' own.

Each client also trains a model of its own.
"""

from typing import ClassVar, Literal

from pydantic import Field

from fedring.train.bounds import NonNegative, PositiveCount
from fedring.train.jobs.algorithm_checks import PERSONAL, check_keys
from fedring.train.jobs.job_table import JobTable, JobView


class Personal(JobTable):
    """All settings of personal models.

    Each client trains a model of its own, which never leaves it.
    """

    alone: ClassVar[str] = "its clients train models of their own, as [personal] says"

    method: Literal["ditto", "fine_tuning"] = Field(
        "ditto",
        description="what a client's own model starts from in each round: ditto = from its values after the client's "
        "last round; fine_tuning = from the round's model, anew",
    )
    mu: NonNegative = Field(
        0.1, description="weight of the term that pulls a client's own model to the round's model (Ditto's lambda)"
    )
    epochs: PositiveCount = Field(1, description="passes over the drawn samples, in addition to those of the job")

    def check(self, job: JobView) -> None:
        """See JobTable."""
        check_keys(job, "the table [personal]", PERSONAL)
