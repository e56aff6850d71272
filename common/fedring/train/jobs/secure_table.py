"""The table [secure_aggregation] of a job: only sums are learned.

The server learns sums of updates, and no single one.
"""

from collections.abc import Mapping
from typing import Annotated, ClassVar, Self

from pydantic import Field, model_validator

from fedring.codec.encoding import DELTA_ONLY
from fedring.secure.limits import MAX_BLOCK, MAX_GROUP, MAX_LEVELS, MIN_BLOCK, MIN_GROUP, group_count, threshold
from fedring.secure.masks import MAX_BITS
from fedring.train.bounds import Positive, Seconds
from fedring.train.jobs.aggregation_table import MEAN
from fedring.train.jobs.algorithm_checks import check_needs, value_of, written
from fedring.train.jobs.job_table import JobTable, JobView

_TOTALS = 4 * MAX_GROUP**2
"""Numbers of clients that show all sizes of groups: more clients have groups of the same sizes."""


_NEEDS: Mapping[str, tuple[object, str]] = {
    "mode": ("federated", "the workers of the other modes see each other's gradients"),
    "evaluate": (False, "the clients' evaluations are not masked; evaluate_on_server may be true"),
    "normalize_steps": (False, "numbers of steps are not masked"),
    "scaffold": (False, "control variates are made of single updates"),
    "update_clip_factor": (0.0, "nobody knows the norm of one update"),
    "close_at_minimum": (False, "the server would choose whose updates count"),
    "select_factor": (1.0, "the server would choose whose updates count"),
    "straggler_factor": (0.0, "the server would choose whose updates count"),
}
"""The demands of the table [secure_aggregation], with reasons."""


class SecureAggregation(JobTable):
    """All settings of secure aggregation."""

    hides: ClassVar[bool] = True
    at_once: ClassVar[str] = "the clients of a sum exchange keys within one round"
    opens_seed: ClassVar[bool] = True
    """Clients help to unmask different sums of updates to one model only if these differ by several clients."""

    levels: int = Field(
        7,
        ge=1,
        le=MAX_LEVELS,
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
        256, ge=MIN_BLOCK, le=MAX_BLOCK, description="number of neighbouring values that share one step, a power of two"
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
        "that keeps to the protocol adds at most levels times max_weight steps to a sum",
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
        _check_keys(job, job.best_by)
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
        if job.override:
            raise ValueError(
                "override does not go with [secure_aggregation], whose clients check that all of them were told the "
                "same: start a job for each kind of client, chosen by the key clients"
            )

    def updates_of(self, clients: int) -> tuple[int, str]:
        """See JobTable. The sum of a group is one update."""
        if not self.group_size:
            return clients, ""
        return group_count(clients, self.group_size), ", of which each group of secure_aggregation has one"


def _check_keys(job: object, best_by: str) -> None:
    """Check that no key needs updates that secure aggregation hides.

    Raises:
        ValueError: If a key has another value than it must have; the sentence says why.
    """
    check_needs(job, "secure_aggregation", _NEEDS, best_by, "figures of the training are not masked")
    if (encoding := value_of(job, "encoding", "")) in DELTA_ONLY:
        why = "which values a client sends would reveal what it learned from: set secure_aggregation.keep_ratio"
        raise ValueError(f"secure_aggregation: encoding is {written(encoding)}, and must not be sparse, because {why}")
    rule, group_size = value_of(job, "aggregation.rule", MEAN), value_of(job, "secure_aggregation.group_size", 0)
    if rule != MEAN and not group_size:
        why = "the server has one sum, and no updates to compare: set secure_aggregation.group_size"
        raise ValueError(
            f"secure_aggregation: aggregation.rule is {written(rule)}, and must be {written(MEAN)}, because {why}"
        )
