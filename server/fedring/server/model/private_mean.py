"""Differential privacy for whole clients.

The sum of clipped updates, with noise, is divided by a fixed number of clients. One client changes the sum of the
updates by at most the clip, in L2 norm. So Gaussian noise with the standard deviation z times the clip makes the sum
private (McMahan et al. 2018, algorithm 1, with weights of 1 and the fixed denominator). The clip may follow the median
norm of the updates (Andrew et al. 2021, algorithm 1).

If the clients add the noise, the server divides the sum by the same number, and adds nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import exp
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedring.privacy.noise import Noise
from fedring.server.model.guards import Guard
from fedring.server.state.rows import UpdateRow
from fedring.train.jobs.privacy_table import (
    CLIP_QUANTILE,
    CLIP_RATE,
    COUNT_NOISE,
    MAX_CLIP,
    MIN_CLIP,
    ClientPrivacy,
)

_ROUNDING = 1e-9
"""By how much less than the clip an update is shortened to, for the rounding of its norm in float64."""


@dataclass(frozen=True, slots=True)
class NoisyMean:
    """A sum of updates over a fixed number, with noise."""

    divisor: float
    deviation: float = 0.0  # of the noise on each value of the mean
    noise: Noise | None = None  # None = the sum has noise already

    def added(self, mean: NDArray[np.float64], start: int) -> NDArray[np.float64]:
        """Add noise to the mean's piece at `start`, in place.

        Returns:
            The piece.
        """
        if self.noise is not None:
            mean += self.deviation * self.noise.normal(start, start + len(mean))
        return mean


@dataclass(frozen=True, slots=True)
class PrivateRound:
    """The effect of differential privacy on one round."""

    guarded: Guard  # the updates' factors
    mean: NoisyMean
    noise_multiplier: float  # what the round costs
    clip: float
    next_clip: float  # of the job's next round

    def stats(self) -> dict[str, Any]:
        """Return the figures for the round's row.

        They say nothing of the clients that the model does not.
        """
        return {
            "dp": {
                "noise_by": "server" if self.mean.noise else "clients",
                "noise_multiplier": self.noise_multiplier,
                "clip": self.clip,
                "next_clip": self.next_clip,
                "clients": self.mean.divisor,
            }
        }


def summed_round(privacy: ClientPrivacy, clients: int) -> PrivateRound:
    """Return the private round of sums with the clients' noise.

    Args:
        privacy: the job's settings.
        clients: how many were drawn for the round, the denominator of the mean.
    """
    clip = privacy.clip
    return PrivateRound(Guard(), NoisyMean(float(clients)), privacy.noise_multiplier, clip, clip)


def private_round(
    privacy: ClientPrivacy, updates: Sequence[UpdateRow], clients: int, clip: float, secret: bytes, run_id: str
) -> PrivateRound:
    """Return the effect of differential privacy on a round.

    Args:
        privacy: the job's settings.
        updates: the accepted updates, of one round. The noise depends on which they are.
        clients: how many were drawn for the round, the denominator of the mean.
        clip: the norm to which updates are shortened in this round.
        secret: from the operating system, for this round only.
        run_id: of the run.
    """
    ordered = sorted(updates, key=lambda row: row.client_id)
    names = [run_id, *(text for row in ordered for text in (str(row.round), row.client_id, row.name))]
    bound = clip * (1.0 - _ROUNDING)
    factors = {row.client_id: bound / row.norm for row in ordered if row.norm > bound}
    next_clip = clip
    if privacy.adaptive:
        # Andrew et al. 2021: a client counts as 1/2 or -1/2, so that one more changes the noisy count by 1/2 only.
        within = sum((row.norm <= clip) - 0.5 for row in ordered)
        noise = Noise(secret, ["clip", *names]).normal(0, 1).item() * clients / COUNT_NOISE
        share = min(1.0, max(0.0, 0.5 + (within + noise) / clients))
        next_clip = min(MAX_CLIP, max(MIN_CLIP, clip * exp(-CLIP_RATE * (share - CLIP_QUANTILE))))
    return PrivateRound(
        guarded=Guard(weights=dict.fromkeys((row.client_id for row in ordered), 1.0), factors=factors),
        mean=NoisyMean(
            divisor=float(clients),
            deviation=privacy.sum_multiplier(clients) * clip / clients,
            noise=Noise(secret, ["sum", *names]),
        ),
        noise_multiplier=privacy.noise_multiplier,
        clip=clip,
        next_clip=next_clip,
    )
