"""The table [secure_aggregation] of a job: only sums are learned.

The server learns sums of updates, and no single one.
"""

from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from fedring.secure.limits import MAX_GROUP, MIN_GROUP, group_count, threshold
from fedring.secure.masks import MAX_BITS
from fedring.train.bounds import Positive, Seconds
from fedring.train.jobs.algorithm_checks import check_secure
from fedring.train.jobs.job_table import JobTable, JobView

MAX_BLOCK = 8192

_TOTALS = 4 * MAX_GROUP**2
"""Numbers of clients that show all sizes of groups: more clients have groups of the same sizes."""


class SecureAggregation(JobTable):
    """All settings of secure aggregation."""

    hides: ClassVar[bool] = True

    levels: int = Field(
        7,
        ge=1,
        le=32767,
        description="levels on each side of zero that the values of an update are rounded to; with weights = "
        '"samples", updates of a larger weight are rounded more finely; with [dp], dp.bits says how finely they are, '
        "and levels, step, first_norm and block are not used",
    )
    step: Positive = Field(
        1.0, le=1000, description="distance between two levels, in units of the root mean square of the last aggregate"
    )
    first_norm: Positive = Field(
        4.0, le=1e12, description="about how long the mean update of the first round is, which sets the first levels"
    )
    block: int = Field(
        256, ge=16, le=MAX_BLOCK, description="number of neighbouring values that share one step, a power of two"
    )
    keep_ratio: Annotated[float, Field(gt=0, le=1)] = Field(
        1.0,
        description="share of the blocks that is sent in each round: those in which most should have gathered since "
        "they were sent; what is not sent waits in each client, which trains on it",
    )
    max_weight: int = Field(
        1000,
        ge=1,
        le=1 << 20,
        description='largest weight of one client\'s update, with weights = "samples"; whatever its weight, a client '
        "adds at most levels times max_weight steps to a sum",
    )
    group_size: int = Field(
        0,
        ge=0,
        le=MAX_GROUP,
        description=f"clients in a group, drawn anew for each round: the server learns the sum of each group; 0 = as "
        f"few groups as possible, of at most {MAX_GROUP}",
    )
    step_seconds: Seconds = Field(
        30.0, description="longest time of each step in which clients exchange keys and shares, or remove masks"
    )

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.block & (self.block - 1):
            raise ValueError(f"block must be a power of two, and is {self.block}")
        if 0 < self.group_size < MIN_GROUP:
            raise ValueError(f"group_size must be 0 or at least {MIN_GROUP}, and is {self.group_size}")
        return self

    def group_sizes(self, fewest: int, most: int) -> frozenset[int]:
        """Return the numbers of clients that a group may have.

        Args:
            fewest: the fewest results that the job makes a model of.
            most: the most clients that a round may have; 0 = any number.
        """
        at_least = max(MIN_GROUP, fewest, threshold(self.group_size) if self.group_size else 0)
        totals = range(at_least, min(most, at_least + _TOTALS) + 1 if most else at_least + _TOTALS)
        counts = [(total, group_count(total, self.group_size)) for total in totals]
        return frozenset(size for total, count in counts for size in (total // count, -(-total // count)))

    def check(self, job: JobView) -> None:
        """See JobTable."""
        check_secure(job, job.best_by)
        fewest, needed = job.fewest_updates, job.min_clients_to_aggregate
        smallest = self.group_size or MIN_GROUP
        if fewest < smallest:
            raise ValueError(
                f"secure_aggregation needs rounds of at least {smallest} clients, and this job's may have {fewest}"
            )
        if not self.group_size and needed < threshold(min(fewest, MAX_GROUP)):
            raise ValueError(
                f"secure_aggregation: min_clients_to_aggregate is {needed}, and must be at least "
                f"{threshold(min(fewest, MAX_GROUP))}: more than two thirds of the {fewest} clients of a round"
            )
        # The largest possible group, and both signs: the modulus must hold every sum that a round can have.
        most = 2 * MAX_GROUP * self.levels * (self.max_weight if job.weights == "samples" else 1)
        if most.bit_length() > MAX_BITS:
            raise ValueError(f"secure_aggregation: levels times max_weight is too large for sums of {MAX_BITS} bits")
