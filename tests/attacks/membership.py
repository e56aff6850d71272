"""Membership inference: what can be told of who was trained on, and the epsilon that this proves at least.

`counted_bound` is for experiments that do not influence each other (Jagielski et al. 2020), `guessed_bound` for many
guesses about a single training (Steinke et al. 2023).
"""

from math import exp, log

import torch
from scipy.stats import beta, binom
from torch import Tensor, nn

from fedring.train.jobs.sample_privacy_table import SamplePrivacy
from fedring.train.plan import Plan
from fedring.train.private_loop import train_privately

_CONFIDENCE = 0.95


class Canaries:
    """Samples of which each changes one weight of a linear model, and no other sample changes that one.

    Args:
        chosen: Which of them these are, [n] int64.
        count: How many there are.
    """

    def __init__(self, chosen: Tensor, count: int) -> None:
        self._chosen, self._count = chosen, count

    def __len__(self) -> int:
        return len(self._chosen)

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Return inputs [batch, count], with gradients far above any clip, and labels that nothing looks at."""
        inputs = torch.zeros(len(indices), self._count)
        inputs[torch.arange(len(indices)), self._chosen[indices]] = 1e3
        return inputs, torch.zeros(len(indices))


def canary_scores(members: Tensor, plan: Plan, privacy: SamplePrivacy) -> Tensor:
    """Train on half of the canaries, and return how often each seems to have been in a batch, [count].

    Args:
        members: Which canaries are trained on, [count] bool.
        plan: How; with a momentum of 0.
        privacy: The noise.
    """
    model = nn.Linear(len(members), 1, bias=False)
    before = model.weight.detach().clone()
    chosen = members.nonzero().flatten()
    samples = Canaries(chosen, len(members))
    train_privately(
        model,
        samples,  # type: ignore[arg-type]  # it has all that a dataset needs
        plan,
        privacy,
        loss=lambda outputs, labels: outputs.mean(),
        optimizer_factory=lambda parameters, lr, momentum: torch.optim.SGD(parameters, lr),
        device=torch.device("cpu"),
    )
    moved = (before - model.weight.detach()).flatten()
    return moved * min(plan.batch_size, len(chosen)) / (plan.lr * privacy.max_grad_norm)


def counted_bound(scores: Tensor, members: Tensor, threshold: float, delta: float) -> float:
    """Return an epsilon that is exceeded with 95 % confidence, by the bounds of Clopper and Pearson; at least 0.

    Args:
        scores: Of independent experiments, [n]; those above the threshold are called members.
        members: Which of them are, [n] bool.
        threshold: It must not be chosen by these scores.
        delta: The delta of the claim.
    """
    error = (1 - _CONFIDENCE) / 2
    hits, inside = int((scores[members] > threshold).sum()), int(members.sum())
    alarms, outside = int((scores[~members] > threshold).sum()), int((~members).sum())
    least = float(beta.ppf(error, hits, inside - hits + 1)) if hits else 0.0
    most = float(beta.ppf(1 - error, alarms + 1, outside - alarms)) if alarms < outside else 1.0
    return max(0.0, log((least - delta) / most)) if least > delta else 0.0


def guessed_bound(scores: Tensor, members: Tensor, guesses: int, delta: float) -> float:
    """Return an epsilon that is exceeded with 95 % confidence, by theorem 5.2 of Steinke et al. (2023); at least 0.

    Args:
        scores: Of samples of which each was trained on with probability 1/2, independently, [n].
        members: Which of them were, [n] bool.
        guesses: As many of the highest scores are called members, and as many of the lowest are called others.
        delta: The delta of the claim.
    """
    order = scores.argsort()
    right = int((~members[order[:guesses]]).sum() + members[order[-guesses:]].sum())
    low, high = 0.0, 20.0
    for _ in range(40):
        middle = (low + high) / 2
        if _chance(middle, delta, len(scores), 2 * guesses, right) < 1 - _CONFIDENCE:
            low = middle
        else:
            high = middle
    return low


def _chance(epsilon: float, delta: float, samples: int, guesses: int, right: int) -> float:
    """Return the most that the probability of so many right guesses can be."""
    q = 1 / (1 + exp(-epsilon))
    total = slope = 0.0
    for i in range(1, right + 1):
        total += float(binom.pmf(right - i, guesses, q))
        slope = max(slope, total / i)
    return min(1.0, float(binom.sf(right - 1, guesses, q)) + slope * delta * 2 * samples)
