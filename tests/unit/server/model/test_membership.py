"""Attacks on DP-SGD: what they prove stays below the claimed epsilon, and passes it as soon as the noise is missing.

The chance that one of these tests fails without a fault is below one in a million: a bound of 95 % confidence may fail
in 5 % of all cases, but only by little, and the claims are far above what these attacks can prove.
"""

from math import sqrt

import pytest
import torch
from tests.attacks.membership import canary_scores, counted_bound, guessed_bound
from torch import Tensor

from fedring.data import Samples, digits
from fedring.privacy.account import sampled_epsilon
from fedring.train.jobs.sample_privacy_table import SamplePrivacy
from fedring.train.losses import cross_entropy
from fedring.train.models import digits_mlp
from fedring.train.optimizers import sgd
from fedring.train.plan import Plan
from fedring.train.private_loop import sampled_steps, train_privately

COUNT = 4000
DELTA = 1e-5
NO_NOISE = 1e-9


def noisy(multiplier: float, **keys: float) -> SamplePrivacy:
    return SamplePrivacy.model_validate({"noise_multiplier": multiplier, **keys})


def halves(count: int, seed: int = 0) -> Tensor:
    """Return which samples are members, [count] bool: each with probability 1/2."""
    return torch.rand(count, generator=torch.Generator().manual_seed(seed)) < 0.5


MEMBERS = halves(COUNT)
WHOLE = Plan(epochs=1, batch_size=int(MEMBERS.sum()), lr=1.0, momentum=0.0)  # one step with all samples
SAMPLED = Plan(epochs=1, batch_size=int(MEMBERS.sum()) // 4, lr=1.0, momentum=0.0)  # four, each with a quarter


@pytest.mark.parametrize("plan", [WHOLE, SAMPLED], ids=["whole", "sampled"])
@pytest.mark.parametrize("share", [1.0, 0.1, 0.0], ids=["noise", "a-tenth-of-it", "no-noise"])
def test_canaries_prove_no_more_than_is_claimed_and_more_without_the_noise(plan: Plan, share: float) -> None:
    claimed = noisy(1.5)
    taken = sampled_steps(plan, claimed, int(MEMBERS.sum()))
    epsilon = sampled_epsilon([taken], DELTA)
    added = noisy(max(NO_NOISE, share * claimed.noise_multiplier))
    width = 2.0 if share == 1.0 else 3.5  # how far above others the threshold is, in standard deviations
    threshold = max(0.5, width * added.noise_multiplier * sqrt(taken.steps))
    bound = counted_bound(canary_scores(MEMBERS, plan, added), MEMBERS, threshold, DELTA)
    print(f"claimed {epsilon:.2f}, proven {bound:.2f}")
    assert 2 < epsilon < 3
    if share == 1.0:
        assert bound < epsilon
    else:
        assert bound > epsilon + 1


@pytest.mark.parametrize("noise", [5.0, NO_NOISE], ids=["noise", "no-noise"])
def test_losses_betray_samples_that_were_trained_on_only_without_the_noise(noise: float) -> None:
    count, generator = 1000, torch.Generator().manual_seed(1)
    samples = digits().train
    assert isinstance(samples, Samples)
    inputs = samples.inputs[:count]
    labels = torch.randint(0, 10, (count,), generator=generator)  # which can only be learned by heart
    members = halves(count, 1)
    torch.manual_seed(0)
    model = digits_mlp(hidden=256)
    plan = Plan(epochs=60 if noise == NO_NOISE else 10, batch_size=100, lr=0.1, momentum=0.9)
    privacy = noisy(noise, max_grad_norm=1e6 if noise == NO_NOISE else 1.0)
    cpu = torch.device("cpu")
    known = Samples(inputs[members], labels[members])
    train_privately(model, known, plan, privacy, loss=cross_entropy, optimizer_factory=sgd, device=cpu)
    with torch.no_grad():
        scores = -torch.nn.functional.cross_entropy(model(inputs), labels, reduction="none")
    bound = guessed_bound(scores, members, 150, DELTA)
    claimed = noisy(5.0)
    epsilon = sampled_epsilon([sampled_steps(Plan(epochs=10, batch_size=100), claimed, len(known))], DELTA)
    print(f"claimed {epsilon:.2f}, proven {bound:.2f}")
    assert 1 < epsilon < 2
    if noise == NO_NOISE:
        assert bound > epsilon + 1
    else:
        assert bound < epsilon


def test_the_bounds_are_those_of_the_papers() -> None:
    members = torch.tensor([True] * 1000 + [False] * 1000)
    assert counted_bound(members.float(), members, 0.5, 0.0) == pytest.approx(5.597, abs=0.01)
    assert counted_bound(torch.zeros(2000), members, 0.5, 0.0) == 0.0
    assert guessed_bound(members.float(), members, 50, 0.0) == pytest.approx(3.49, abs=0.01)  # 0.05 ** (1 / 100)
    assert guessed_bound(members.float(), members, 50, 1e-5) < 3.49
    assert guessed_bound(-members.float(), members, 50, 0.0) == 0.0
