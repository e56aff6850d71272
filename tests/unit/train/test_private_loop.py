"""DP-SGD: what a step does, that nobody can repeat it, and which models it refuses."""

import math
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from math import inf
from typing import Any

import pytest
import torch
from scipy.stats import binom, kstest
from torch import Tensor, nn
from torch.nn import functional

from fedring.data import Samples, digits
from fedring.privacy.noise import Noise
from fedring.train import private_loop
from fedring.train.errors import SeamError, TrainError, TrainingStopped
from fedring.train.jobs.sample_privacy_table import SamplePrivacy
from fedring.train.losses import cross_entropy
from fedring.train.models import digits_mlp, mnist_tanh_cnn
from fedring.train.optimizers import sgd
from fedring.train.plan import Plan, TrainResult
from fedring.train.private_check import check_private_training
from fedring.train.private_layers import unfit_layer
from fedring.train.private_loop import train_privately


def noisy(multiplier: float, **keys: float) -> SamplePrivacy:
    return SamplePrivacy.model_validate({"noise_multiplier": multiplier, **keys})


QUIET = noisy(1e-9)
PRIVATE: dict[str, Any] = {"weights": "uniform", "evaluate": False}
Loss = Callable[[Tensor, Tensor], Tensor]


def train(
    model: nn.Module, samples: Any, privacy: SamplePrivacy = QUIET, *, loss: Loss = cross_entropy, **keys: Any
) -> TrainResult:
    plan = Plan(**{"batch_size": 4, "lr": 1.0, "momentum": 0.0} | keys)
    cpu = torch.device("cpu")
    if len(samples):
        check_private_training(model, samples, loss=loss, device=cpu)
    return train_privately(model, samples, plan, privacy, loss=loss, optimizer_factory=sgd, device=cpu)


def straight(outputs: Tensor, labels: Tensor) -> Tensor:
    """Return a loss whose gradients do not depend on the model."""
    return outputs.mean()


def linear(width: int = 3) -> nn.Module:
    model = nn.Linear(width, 1, bias=False)
    nn.init.zeros_(model.weight)
    return model


def weights(model: nn.Module) -> Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


# A step


def test_uniform_values_are_those_that_normal_ones_are_made_of() -> None:
    noise = Noise(bytes(range(32)), ["batches"])
    whole = noise.uniform(0, 100_000)
    assert kstest(whole, "uniform").pvalue > 1e-6
    assert (noise.uniform(7, 12) == whole[7:12]).all()
    radius = math.sqrt(-2.0 * math.log(whole[0]))
    assert noise.normal(0, 1)[0] == pytest.approx(radius * math.cos(2.0 * math.pi * whole[1]))


def test_each_sample_is_in_a_batch_with_the_same_probability_and_independently() -> None:
    drawn: list[int] = []

    class Counted(Samples):
        def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
            drawn.append(len(indices))
            return super().batch(indices)

    samples = Counted(torch.zeros(100, 3), torch.zeros(100, dtype=torch.int64))
    model = linear()
    result = train(model, samples, loss=straight, batch_size=20, epochs=40)
    sizes = drawn[1:]  # the first batch compares gradients
    assert result.steps == len(sizes) == 200
    least, most = binom.interval(1 - 1e-9, 100 * len(sizes), 0.2)
    assert least <= sum(sizes) <= most
    variance = sum((size - 20) ** 2 for size in sizes) / len(sizes)
    assert 8 < variance < 28  # that of 100 independent draws is 16, and batches of one size have none


def test_gradients_are_shortened_one_by_one_and_divided_by_the_expected_number() -> None:
    inputs = torch.tensor([[3.0, 0.0, 0.0], [0.0, 0.2, 0.0], [0.0, 0.0, -100.0]])
    model = linear()
    train(model, Samples(inputs, torch.zeros(3)), noisy(1e-9, max_grad_norm=0.5), loss=straight)
    assert torch.allclose(weights(model), -torch.tensor([0.5, 0.2, -0.5]) / 3, atol=1e-5)


def test_the_noise_has_its_deviation_and_nobody_can_repeat_it() -> None:
    samples = Samples(torch.zeros(50, 20_000), torch.zeros(50))
    moved = []
    for _ in range(2):
        model = linear(20_000)
        train(model, samples, noisy(2.0, max_grad_norm=0.5), loss=straight, batch_size=50)
        moved.append(weights(model))
    assert kstest((moved[0] / (2.0 * 0.5 / 50)).numpy(), "norm").pvalue > 1e-6
    assert abs(float(torch.corrcoef(torch.stack(moved))[0, 1])) < 0.1  # the seed of both is the same


def test_masks_of_dropout_do_not_follow_from_the_seed() -> None:
    masks: list[list[Tensor]] = []

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = linear(64)

        def forward(self, inputs: Tensor) -> Tensor:
            masks[-1].append(functional.dropout(torch.ones(64)))
            outputs: Tensor = self.last(inputs * masks[-1][-1])
            return outputs

    for _ in range(2):
        masks.append([])
        train(Masked(), Samples(torch.ones(4, 64), torch.zeros(4)), loss=straight)
    assert [len(each) for each in masks] == [4, 4]  # three to compare gradients, with the same mask, and a step
    assert len({mask.numpy().tobytes() for each in masks for mask in each}) == 3


def test_each_step_and_each_parameter_has_noise_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(3000, 1, bias=False), nn.Linear(1, 3000, bias=False))
    samples = Samples(torch.zeros(8, 3000), torch.zeros(8))
    seen: list[Tensor] = []

    def recorded(parameters: Any, lr: float, momentum: float) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(parameters, lr)
        optimizer.register_step_pre_hook(lambda *_: seen.extend(gradients()))
        return optimizer

    def gradients() -> list[Tensor]:
        return [p.grad.flatten().clone() for p in model.parameters() if p.grad is not None]

    plan, privacy = Plan(epochs=2, batch_size=8, lr=1e-9), noisy(1.0)
    cpu = torch.device("cpu")
    train_privately(model, samples, plan, privacy, loss=straight, optimizer_factory=recorded, device=cpu)
    assert len(seen) == 4
    others = torch.corrcoef(torch.stack(seen)) - torch.eye(4)
    assert others.abs().max() < 0.15  # 8 standard deviations


def test_parts_of_a_batch_make_the_same_step(monkeypatch: pytest.MonkeyPatch) -> None:
    samples, after = digits().train, []
    assert isinstance(samples, Samples)
    for most in (32 << 20, 20_000):  # the second is enough for one sample at once
        monkeypatch.setattr(private_loop, "_GRADIENT_BYTES", most)
        torch.manual_seed(0)
        model = digits_mlp()
        train(model, Samples(samples.inputs[:40], samples.labels[:40]), batch_size=40, lr=0.5, epochs=2)
        after.append(weights(model))
    assert torch.allclose(after[0], after[1], atol=1e-5)


def test_the_proximal_term_pulls_to_the_start_and_momentum_counts() -> None:
    samples = Samples(torch.ones(2, 3) * 0.1, torch.zeros(2))
    model = linear()
    train(model, samples, loss=straight, batch_size=2, epochs=2, mu=0.5)
    assert torch.allclose(
        weights(model), -torch.full((3,), 0.1 + 0.05), atol=1e-5
    )  # by hand: w1 = -0.1, w2 = 0.5 w1 - 0.1
    model = linear()
    train(model, samples, loss=straight, batch_size=2, epochs=2, momentum=0.5)
    assert torch.allclose(weights(model), -torch.full((3,), 0.1 + 0.15), atol=1e-5)


def test_a_sample_that_is_not_finite_counts_as_none() -> None:
    inputs = torch.tensor([[0.5, 0.0, 0.0], [0.0, 0.5, 0.0], [inf, 0.0, 0.0], [math.nan, 0.0, 0.0], [1e30, 0.0, 0.0]])
    model = linear()
    train(model, Samples(inputs, torch.zeros(5)), loss=straight, batch_size=5)
    assert torch.allclose(weights(model), -torch.tensor([0.1, 0.1, 0.0]), atol=1e-5)


@pytest.mark.parametrize("way", ["loss", "model", "backward", "data"])
def test_a_sample_that_raises_an_error_counts_as_none(way: str) -> None:
    def raise_for(values: Tensor, where: str) -> None:
        if way == where and (values > 8).any():
            raise KeyError("Jane Doe")

    class Backward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Tensor) -> Tensor:
            ctx.save_for_backward(values)
            return values.clone()

        @staticmethod
        def backward(ctx: Any, *given: Tensor) -> Tensor:
            raise_for(ctx.saved_tensors[0], "backward")
            return given[0]

    class Picky(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = linear(), linear(1)
            nn.init.ones_(self.last.get_parameter("weight"))

        def forward(self, inputs: Tensor) -> Tensor:
            hidden = self.first(inputs)
            raise_for(inputs, "model")
            hidden = Backward.apply(hidden + inputs.sum(1, keepdim=True))  # type: ignore[no-untyped-call]  # torch's
            outputs: Tensor = self.last(hidden)
            return outputs

    class Partly(Samples):
        def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
            raise_for(self.inputs[indices], "data")
            return super().batch(indices)

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        if way == "loss" and labels.item() == 9:
            raise KeyError("Jane Doe")
        return outputs.mean()

    inputs, labels = torch.full((5, 3), 0.1), torch.zeros(5)
    inputs[[1, 4]] = labels[[1, 4], None] = 9.0
    model = Picky()
    result = train(model, Partly(inputs, labels), loss=loss, batch_size=5)
    assert torch.allclose(weights(model), torch.tensor([-0.06, -0.06, -0.06, 1 - 0.18]), atol=1e-5)
    assert result.num_samples == 5


def test_if_all_samples_raise_errors_the_training_does(caplog: pytest.LogCaptureFixture) -> None:
    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        if labels.item() == 9:
            raise KeyError("Jane Doe")
        return outputs.mean()

    with pytest.raises(KeyError, match="Jane Doe"):
        train(linear(), Samples(torch.ones(4, 3), torch.full((4,), 9.0)), loss=loss, epochs=2)
    assert "8 samples raised an error in the training, and count as zeros" in caplog.text


def test_steps_without_samples_and_parameters_without_use_get_noise_alone() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.spare = linear(), linear()

        def forward(self, inputs: Tensor) -> Tensor:
            outputs: Tensor = self.used(inputs)
            return outputs

    model = Partly()
    samples = Samples(torch.zeros(1000, 3), torch.zeros(1000))
    result = train(model, samples, noisy(1.0), loss=straight, batch_size=1, subset_size=20)
    assert (result.steps, result.num_samples) == (20, 1000)
    assert (weights(model) != 0).all()


@pytest.mark.parametrize("stopped", [False, True])
def test_the_model_is_as_it_was_afterwards(stopped: bool) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Linear(16, 10))
    kept = {module: set(vars(module)) for module in model.modules()}
    with pytest.raises(TrainingStopped) if stopped else nullcontext():
        train_privately(
            model,
            digits().train,
            Plan(batch_size=512),
            QUIET,
            loss=cross_entropy,
            optimizer_factory=sgd,
            device=torch.device("cpu"),
            stopped=lambda: stopped,
        )
    assert {module: set(vars(module)) for module in model.modules()} == kept
    assert all(not module._forward_hooks and not module._backward_hooks for module in model.modules())
    assert all(parameter.grad is None and not vars(parameter) for parameter in model.parameters())
    assert vars(model[2])["inplace"] is True


def test_a_model_learns() -> None:
    torch.manual_seed(0)
    model, split = digits_mlp(), digits()
    shares: list[float] = []
    result = train_privately(
        model,
        split.train,
        Plan(epochs=12, batch_size=256, lr=1.0, momentum=0.5),
        noisy(1.0),
        loss=cross_entropy,
        optimizer_factory=sgd,
        device=torch.device("cpu"),
        progress=shares.append,
    )
    assert result.accuracy is not None
    assert result.accuracy > 0.85
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


@pytest.mark.parametrize("way", ["item", "coupled"])
def test_the_loss_is_asked_for_single_samples(way: str) -> None:
    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        if way == "item" and not labels[0].item() >= 0:  # vmap cannot do that
            raise AssertionError
        assert len(outputs) == 1
        apart = (outputs - outputs.mean(0)).square().sum() if way == "coupled" else 0.0
        return outputs.mean() + apart

    inputs = torch.tensor([[0.1, 0.0, 0.0], [0.0, 0.2, 0.0], [0.0, 0.0, 0.3]])
    model = linear()
    train(model, Samples(inputs, torch.zeros(3)), loss=loss)
    assert torch.allclose(weights(model), -torch.tensor([0.1, 0.2, 0.3]) / 3, atol=1e-5)


def test_a_training_that_diverges_says_so_of_the_model_alone() -> None:
    with pytest.raises(TrainError, match="A parameter is not finite") as error:
        train(digits_mlp(), digits().train, noisy(1e6), batch_size=512, lr=1e38)
    assert error.value.reason == "diverged"
    with pytest.raises(TrainError, match="no samples"):
        train(linear(), Samples(torch.zeros(0, 3), torch.zeros(0)))


# What does not fit


class Mixed(nn.Module):
    """Computes with the mean of a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(64, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        outputs: Tensor = self.last(flat - flat.mean(0))
        return outputs


class Merged(nn.Module):
    """Treats the rows of an image as samples."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.last(inputs.reshape(-1, 8)).reshape(len(inputs), -1, 10).mean(1)
        return outputs


class Borrowed(nn.Module):
    """Uses the weights of a layer outside of it, too."""

    def __init__(self, alone: bool) -> None:
        super().__init__()
        self.layer, self.last, self.alone = nn.Linear(64, 64), nn.Linear(64, 10), alone

    def forward(self, inputs: Tensor) -> Tensor:
        flat = inputs.flatten(1)
        outputs: Tensor = self.last(functional.linear(flat if self.alone else self.layer(flat), self.layer.weight))
        return outputs


class Counting(nn.Module):
    """Keeps what it has seen in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = digits_mlp()
        self.seen: Tensor
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen += inputs.sum()
        outputs: Tensor = self.layer(inputs)
        return outputs


@pytest.mark.parametrize(
    ("model", "sentence"),
    [
        pytest.param(Mixed(), "The gradients of last.weight for single samples depend on other samples", id="mixed"),
        pytest.param(Merged(), "The parameter last.weight has no gradients of single samples", id="merged"),
        pytest.param(Borrowed(True), "The parameter layer.weight has no gradients of single samples", id="borrowed"),
        pytest.param(Borrowed(False), "The gradients of layer.weight for single samples", id="borrowed-too"),
        pytest.param(Counting(), "Training changes the buffer seen, which no noise covers", id="counting"),
        pytest.param(
            nn.Sequential(nn.Flatten(), nn.BatchNorm1d(64, affine=False), nn.Linear(64, 10)),
            "The layer 1 (BatchNorm1d) computes with several samples at once, so that none of them is private: use "
            "GroupNorm.",
            id="norm",
        ),
    ],
)
def test_a_model_that_hides_single_samples_is_refused(model: nn.Module, sentence: str) -> None:
    with pytest.raises(SeamError, match=re.escape(sentence)) as error:
        train(model, digits().train, batch_size=64)
    assert error.value.reason == "no_sample_dp"


def test_a_buffer_that_only_real_samples_change_is_noticed_after_the_training() -> None:
    plan, cpu = Plan(batch_size=64), torch.device("cpu")
    with pytest.raises(SeamError, match="Training changes the buffer seen"):
        train_privately(Counting(), digits().train, plan, QUIET, loss=cross_entropy, optimizer_factory=sgd, device=cpu)


@pytest.mark.parametrize(
    ("layer", "advice"),
    [
        (nn.BatchNorm2d(4), "use GroupNorm"),
        (nn.SyncBatchNorm(4), "use GroupNorm"),
        (nn.InstanceNorm1d(4, track_running_stats=True), "set track_running_stats = False"),
        (nn.LSTM(4, 4), "use opacus.layers.DPLSTM"),
        (nn.GRU(4, 4), "use opacus.layers.DPGRU"),
        (nn.RNN(4, 4), "use opacus.layers.DPRNN"),
        (nn.MultiheadAttention(4, 2), "use opacus.layers.DPMultiheadAttention"),
        (nn.EmbeddingBag(4, 2), "use Embedding"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_layers_that_do_not_fit_are_named(layer: nn.Module, advice: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), layer)
    assert unfit_layer(model) == f"the layer 1 ({type(layer).__name__}) {unfit_layer(layer).partition(') ')[2]}"
    assert unfit_layer(model).endswith(advice)


def test_whatever_opacus_refuses_is_refused_without_it() -> None:
    from opacus.validators import ModuleValidator

    made = {
        nn.BatchNorm1d: (4,), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (4,), nn.SyncBatchNorm: (4,), nn.LSTM: (4, 4),
        nn.GRU: (4, 4), nn.MultiheadAttention: (4, 2), nn.InstanceNorm1d: (4,), nn.InstanceNorm2d: (4,),
        nn.InstanceNorm3d: (4,),
    }  # fmt: skip
    assert set(made) == set(ModuleValidator.VALIDATORS)
    for kind, arguments in made.items():
        more = {"affine": True, "track_running_stats": True} if "Instance" in kind.__name__ else {}
        assert unfit_layer(kind(*arguments, **more)), kind
    fitting = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.InstanceNorm2d(4), nn.Flatten(), nn.Linear(4, 4))
    assert unfit_layer(fitting) == unfit_layer(mnist_tanh_cnn()) == ""


def test_a_missing_opacus_is_one_sentence() -> None:
    code = (
        "import sys; sys.modules['opacus'] = None\n"
        "from fedring.train.models import digits_mlp\n"
        "from fedring.train.private_loop import check_private_model\n"
        "try: check_private_model(digits_mlp())\n"
        "except Exception as error: print(error.reason, error)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=240)
    assert done.stdout == "no_opacus Install fedring[privacy], whose Opacus trains with [sample_dp].\n"
