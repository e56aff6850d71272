"""The table [dp] of a job: differential privacy for whole clients, with noise that the server adds."""

from math import sqrt
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from fedring.train.bounds import NonNegative

COUNT_NOISE = 20
"""The standard deviation of the noise on the number of updates within the clip is clients / COUNT_NOISE (Andrew et al.
2021, section 2.3)."""

CLIP_RATE = 0.2
"""The learning rate of the logarithm of the clip (Andrew et al. 2021, section 3)."""

CLIP_QUANTILE = 0.5
"""The share of the updates that an adaptive clip lets pass as they are."""

MIN_CLIP, MAX_CLIP = 1e-12, 1e12
"""The bounds of the clip, also of an adaptive one."""


class ClientPrivacy(BaseModel):
    """All settings of differential privacy for whole clients. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

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

    def sum_multiplier(self, clients: int) -> float:
        """Return the noise multiplier of the sum of the updates (Andrew et al. 2021, theorem 1).

        An adaptive clip spends part of the privacy on the number of updates within the clip, so that the sum needs more
        noise for both to cost what noise_multiplier says.

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
