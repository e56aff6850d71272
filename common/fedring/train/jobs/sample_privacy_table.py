"""The table [sample_dp] of a job: privacy for single samples.

Each client adds the noise of their differential privacy.
"""

from typing import Annotated, ClassVar

from pydantic import Field

from fedring.train.bounds import NonNegative
from fedring.train.jobs.algorithm_checks import SAMPLE_PRIVATE, check_private
from fedring.train.jobs.job_table import JobTable, JobView


class SamplePrivacy(JobTable):
    """All settings of DP-SGD (Abadi et al. 2016) at the clients."""

    hides: ClassVar[bool] = True
    alone: ClassVar[str] = "sample_dp trains in a loop of its own"

    noise_multiplier: float = Field(
        ge=1e-9,
        le=1e6,
        description="standard deviation of the noise on the sum of a step's gradients, in units of max_grad_norm",
    )
    max_grad_norm: float = Field(
        1.0, ge=1e-12, le=1e12, description="norm to which the gradient of each sample is shortened"
    )
    delta: Annotated[float, Field(gt=0, lt=1)] = Field(
        1e-5, description="the probability that epsilon may fail; below 1 / the number of samples of a client"
    )
    max_epsilon: NonNegative = Field(
        0.0,
        description="a client trains in no round that would take the epsilon of its samples in this job above it; "
        "0 = no limit",
    )

    def check(self, job: JobView) -> None:
        """See JobTable."""
        check_private(job, "sample_dp", SAMPLE_PRIVATE, job.best_by)
