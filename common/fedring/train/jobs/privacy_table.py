"""The table [dp] of a job: differential privacy for whole clients.

The server or the clients add the noise.
"""

from collections.abc import Collection, Mapping
from functools import lru_cache
from math import sqrt
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from fedring.privacy.charges import SkellamCharge
from fedring.privacy.integer_plan import IntegerPlan, fewest_bits, integer_plan
from fedring.secure.limits import honest_survivors
from fedring.secure.masks import MAX_BITS
from fedring.train.bounds import NonNegative
from fedring.train.jobs.algorithm_checks import PRIVATE, check_needs, check_private, value_of
from fedring.train.jobs.job_table import Budget, JobTable, JobView

COUNT_NOISE = 20
"""The standard deviation of the noise on the number of updates within the clip is clients / COUNT_NOISE (Andrew et al.
2021, section 2.3)."""

CLIP_RATE = 0.2
"""The learning rate of the logarithm of the clip (Andrew et al. 2021, section 3)."""

CLIP_QUANTILE = 0.5
"""The share of the updates that an adaptive clip lets pass as they are."""

MIN_CLIP, MAX_CLIP = 1e-12, 1e12
"""The bounds of the clip, also of an adaptive one."""

_BY_CLIENTS: Mapping[str, tuple[object, str]] = {
    "dp.adaptive": (False, "nobody knows how many updates are within the clip: choose dp.clip"),
    "secure_aggregation.keep_ratio": (1.0, "noise covers all values, and nothing is left for later rounds"),
}
"""The demands of noise by clients, with reasons."""

_TRIES = 20
_MORE = 1.0 + 2.0**-30


class ClientPrivacy(JobTable):
    """All settings of differential privacy for whole clients."""

    hides: ClassVar[bool] = True

    noise_multiplier: float = Field(
        ge=1e-9, le=1e6, description="standard deviation of the noise on the sum of the updates, in units of the clip"
    )
    clip: float = Field(
        0.1,
        ge=MIN_CLIP,
        le=MAX_CLIP,
        description="norm to which updates are shortened; if adaptive, at first",
    )
    adaptive: bool = Field(
        True, description="the clip follows the median norm of the updates, which costs a little of the privacy"
    )
    delta: Annotated[float, Field(gt=0, lt=1)] = Field(
        1e-5, description="the probability that epsilon may fail; below 1 / the number of clients"
    )
    max_epsilon: NonNegative = Field(
        0.0, description="no round starts that would take the epsilon of all jobs of this server above it; 0 = no limit"
    )
    noise_by: Literal["server", "clients"] = Field(
        "server",
        description="who adds the noise: the server, which sees each update; or the clients, each its share before its "
        "update is masked, which needs secure_aggregation and adaptive = false",
    )
    bits: int = Field(
        0, ge=0, le=MAX_BITS, description="bits of each masked value, if clients add the noise; 0 = as many as it needs"
    )

    trust_clients: bool = Field(
        False,
        description="if clients add the noise: whether all of them do, and keep theirs to themselves; otherwise the "
        "noise is enough if fewer than a third of a group do not",
    )

    def check(self, job: JobView) -> None:
        """See JobTable."""
        check_private(job, "dp", PRIVATE, job.best_by)
        _check_noise_by(job)
        self.sum_multiplier(job.fewest_updates)
        if self.delta * job.fewest_updates >= 1:
            raise ValueError(f"dp.delta = {self.delta:g} must be below 1 / {job.fewest_updates} clients")

    @property
    def budget(self) -> Budget:
        """See JobTable."""
        return Budget(self.max_epsilon, self.delta, server_noise=not self.by_clients)

    @property
    def by_clients(self) -> bool:
        """Whether the clients add the noise."""
        return self.noise_by == "clients"

    def plan(self, clients: int, dimension: int, needed: int) -> IntegerPlan:
        """Return the plan by which a group's clients make noisy integers.

        The server learns the sum of these integers. The noise of the honest ones among the fewest survivors is
        noise_multiplier, in units of the most that one client can change the sum.

        Args:
            clients: of the group.
            dimension: number of parameters.
            needed: results that a round of the job needs.

        Raises:
            ValueError: if there is no such plan.
        """
        honest = honest_survivors(clients, needed, trusted=self.trust_clients)
        return _plan(self.clip, self.noise_multiplier, self.bits, clients, honest, dimension)

    def charge_of(self, groups: Collection[int], dimension: int, needed: int) -> SkellamCharge:
        """Return the cost of a round in which clients add noise.

        No group's sum costs more. Each client is in one group only. At the same noise in units of one client's largest
        change, smaller integers cost more.

        Args:
            groups: the numbers of clients of its groups.
            dimension: number of parameters.
            needed: results that a round of the job needs.

        Raises:
            ValueError: if there is no plan for one of them.
        """
        charges = [self.plan(clients, dimension, needed).charge for clients in set(groups)]
        norm = min(charge.norm for charge in charges)
        variance = min(charge.variance * (norm / charge.norm) ** 2 for charge in charges)
        return SkellamCharge(norm, charges[0].dimension, variance)

    def sum_multiplier(self, clients: int) -> float:
        """Return the noise multiplier of the sum of the updates.

        See Andrew et al. 2021, theorem 1. An adaptive clip spends part of the privacy on the number of updates within
        the clip, so that the sum needs more noise for both to cost as much as noise_multiplier says.

        Args:
            clients: the denominator of the mean.

        Raises:
            ValueError: if the noise on the number alone costs more than that.
        """
        if not self.adaptive:
            return self.noise_multiplier
        count = 2.0 * clients / COUNT_NOISE  # each update moves the count, from which a half is subtracted, by a half
        if self.noise_multiplier >= count:
            raise ValueError(
                f"noise_multiplier = {self.noise_multiplier:g} with adaptive needs rounds of more than "
                f"{int(self.noise_multiplier * COUNT_NOISE / 2)} clients, and this job's may have {clients}: set "
                "adaptive = false and choose clip"
            )
        return 1.0 / sqrt(self.noise_multiplier**-2 - count**-2)


def _check_noise_by(job: object) -> None:
    """Check that dp.noise_by fits the job.

    Raises:
        ValueError: If another key must change; the sentence says which, and why.
    """
    secure, by_clients = value_of(job, "secure_aggregation", None), value_of(job, "dp.noise_by", "") == "clients"
    if secure is not None and not by_clients:
        why = "the server would have to clip each update, and sees none: let the clients clip and add the noise"
        raise ValueError(f'dp: noise_by is "server", and must be "clients" with secure_aggregation, because {why}')
    if by_clients:
        if secure is None:
            why = "the noise of one client alone hides little"
            raise ValueError(f'dp: noise_by = "clients" needs the table [secure_aggregation], because {why}')
        check_needs(job, 'dp.noise_by = "clients"', _BY_CLIENTS, "", "")


@lru_cache(maxsize=512)
def _plan(clip: float, noise_multiplier: float, bits: int, clients: int, honest: int, dimension: int) -> IntegerPlan:
    aim = noise_multiplier
    if not bits:
        needed = fewest_bits(noise_multiplier=noise_multiplier, clients=clients, survivors=honest, dimension=dimension)
        bits = min(needed, MAX_BITS)
    for _ in range(_TRIES):
        plan = integer_plan(
            clip=clip, noise_multiplier=aim, clients=clients, survivors=honest, dimension=dimension, bits=bits
        )
        if plan.multiplier >= noise_multiplier:
            return plan
        aim *= noise_multiplier / plan.multiplier * _MORE  # rounding makes the clients' vectors longer
    raise ValueError(f"no noise for {clients} clients is as much as noise_multiplier = {noise_multiplier:g}")
