"""The local epochs of one round, evaluation, and users' own trainers."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fedring.data import Samples
from fedring.train.batches import cut, draw
from fedring.train.errors import TrainError, TrainingStopped
from fedring.train.evaluation import Counts, evaluate
from fedring.train.loop import train
from fedring.train.losses import cross_entropy
from fedring.train.names.offered import collect
from fedring.train.names.seam import build_model
from fedring.train.optimizers import adam, sgd
from fedring.train.plan import Plan, TrainResult
from fedring.train.tensors.state import read_vectors
from fedring.train.user_trainer import run_trainer

CPU = torch.device("cpu")
PLAN = Plan(epochs=2, batch_size=8, lr=0.1, momentum=0.9, seed=3)


def blobs(n: int = 50) -> Samples:
    """Return samples of three classes that a linear model can separate."""
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(n) % 3
    inputs = nn.functional.one_hot(labels, 4).float() + 0.1 * torch.randn(n, 4, generator=generator)
    return Samples(inputs, labels)


def linear() -> nn.Module:
    return build_model("torch.nn:Linear", {"in_features": 4, "out_features": 3}, 0, collect(["torch.nn:Linear"]))


def learn(model: nn.Module, samples: Dataset[Any], plan: Plan = PLAN, **more: Any) -> TrainResult:
    return train(model, samples, plan, **{"loss": cross_entropy, "optimizer_factory": sgd, "device": CPU, **more})


class Seen(Dataset[tuple[Tensor, Tensor]]):
    """A dataset that records which samples it was asked for."""

    def __init__(self, n: int) -> None:
        self.n = n
        self.asked: list[list[int]] = []

    def __len__(self) -> int:
        return self.n

    def batch(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        self.asked.append(indices.tolist())
        return torch.zeros(len(indices), 4), torch.zeros(len(indices), dtype=torch.int64)


@pytest.mark.parametrize("factory", [sgd, adam])
def test_training_learns(factory: Any) -> None:
    model, samples = linear(), blobs()
    result = learn(model, samples, replace(PLAN, epochs=10), optimizer_factory=factory)
    counts = evaluate(model, samples, loss=cross_entropy, device=CPU)
    assert counts.correct == counts.total == 50
    assert result.accuracy == 1.0
    assert result.loss is not None
    assert counts.loss_sum / counts.total < result.loss < 0.5
    assert (result.num_samples, result.steps) == (50, 70)
    assert result.seconds > 0
    assert result.metrics == {"loss": result.loss, "accuracy": 1.0}


def test_the_same_seed_gives_the_same_model_and_another_seed_another_model() -> None:
    def trained(seed: int) -> str:
        torch.rand(1)  # the state of the global generator must not matter
        model = nn.Sequential(linear(), nn.Dropout(0.5))
        learn(model, blobs(), replace(PLAN, seed=seed))
        return read_vectors(model).digest()

    assert trained(2**64 - 1) == trained(2**64 - 1) != trained(4)


def test_training_leaves_the_global_generator_as_it_was() -> None:
    before = torch.get_rng_state()
    learn(nn.Sequential(linear(), nn.Dropout(0.5)), TensorDataset(*blobs().batch(torch.arange(50))))
    assert torch.equal(torch.get_rng_state(), before)


def test_any_map_style_dataset_trains_to_the_same_model() -> None:
    samples, model, other = blobs(), linear(), linear()
    mine = learn(model, samples)
    theirs = learn(other, TensorDataset(samples.inputs, samples.labels))
    assert read_vectors(model).digest() == read_vectors(other).digest()
    assert replace(mine, seconds=0) == replace(theirs, seconds=0)


def test_a_subset_is_drawn_once_per_round_and_shuffled_in_each_epoch() -> None:
    seen = Seen(100)
    assert learn(linear(), seen, replace(PLAN, subset_size=16)).num_samples == 16
    first, second = ([i for batch in part for i in batch] for part in (seen.asked[:2], seen.asked[2:]))
    assert len(set(first)) == 16
    assert sorted(first) == sorted(second)
    assert first != second
    learn(linear(), seen, replace(PLAN, subset_size=16, seed=4))
    assert set(seen.asked[4] + seen.asked[5]) != set(first)


@pytest.mark.parametrize("subset_size", [0, 20, 999])
def test_a_subset_size_of_zero_or_above_the_data_means_all_samples(subset_size: int) -> None:
    assert sorted(draw(20, subset_size, torch.Generator()).tolist()) == list(range(20))


@pytest.mark.parametrize(
    ("n", "sizes"), [(0, []), (1, [1]), (4, [4]), (5, [5]), (6, [4, 2]), (9, [4, 5])], ids=lambda value: str(value)
)
def test_a_single_sample_left_over_joins_the_last_batch(n: int, sizes: Sequence[int]) -> None:
    assert [len(piece) for piece in cut(torch.arange(n), 4)] == sizes


def test_the_proximal_term_pulls_towards_the_starting_values() -> None:
    """A step of SGD from w0 gives w1 = w0 - lr g(w0), and the next one adds mu (w1 - w0) to the gradient."""
    samples, lr, mu = Samples(torch.ones(4, 1), torch.zeros(4)), 0.1, 2.0

    def slope(outputs: Tensor, labels: Tensor) -> Tensor:
        return outputs.mean() + 0 * labels.sum()  # its gradient is 1 for every value of the weight

    def weight(mu: float) -> float:
        model = nn.Linear(1, 1, bias=False)
        model.weight.data.fill_(5.0)
        learn(model, samples, Plan(epochs=2, batch_size=4, lr=lr, momentum=0.0, mu=mu), loss=slope)
        return model.weight.item()

    assert weight(0.0) == pytest.approx(5 - 2 * lr)
    assert weight(mu) == pytest.approx(5 - lr - lr * (1 - mu * lr))


class TwoWeights(nn.Module):
    """The product with a vector whose two values are parameters of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs[:, :1] * self.a + inputs[:, 1:] * self.b


@pytest.mark.parametrize(
    ("clip_norm", "steps"),
    [(0.0, 5.0), (100.0, 5.0), (1.0, 1.0), (0.25, 0.25)],
    ids=["any", "longer", "one", "quarter"],
)
def test_a_gradient_that_is_too_long_is_shortened_over_all_parameters(clip_norm: float, steps: float) -> None:
    """The gradient is (3, 4) in two parameters; the norm counts over both, and the direction stays."""
    model = TwoWeights()
    samples = Samples(torch.tensor([[3.0, 4.0]] * 2), torch.zeros(2))
    plan = Plan(batch_size=2, lr=1.0, momentum=0.0, clip_norm=clip_norm)
    learn(model, samples, plan, loss=lambda outputs, labels: outputs.mean() + 0 * labels.sum())
    found = torch.cat([model.a, model.b])
    torch.testing.assert_close(found, -torch.tensor([0.6, 0.8]) * steps, rtol=1e-5, atol=1e-5)


def test_terms_that_do_not_come_from_samples_are_not_shortened() -> None:
    model = nn.Linear(1, 1, bias=False)
    nn.init.zeros_(model.weight)
    samples, plan = Samples(torch.ones(2, 1), torch.zeros(2)), Plan(batch_size=2, lr=1.0, momentum=0.0, clip_norm=0.5)
    extra: dict[str, Any] = {
        "corrections": {"weight": torch.full((1, 1), 10.0)},
        "towards": {"weight": torch.full((1, 1), -100.0)},
        "loss": lambda outputs, labels: 8 * outputs.mean() + 0 * labels.sum(),
    }
    learn(model, samples, replace(plan, mu=2.0), **extra)
    assert model.weight.item() == pytest.approx(-(0.5 + 10 + 2 * 100))


class Watched(nn.Module):
    """A linear model that records the types of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()
        self.types: set[torch.dtype] = set()

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.inner(inputs)
        self.types.add(outputs.dtype)
        return outputs


def test_bf16_is_of_the_passes_and_not_of_the_values_or_the_evaluation() -> None:
    within: set[bool] = set()

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        within.add(torch.is_autocast_enabled("cpu"))
        return cross_entropy(outputs, labels)

    results, samples = {}, blobs()
    for precision, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = Watched()
        within.clear()
        result = learn(model, samples, replace(PLAN, epochs=10, precision=precision), loss=loss)
        assert within == {precision == "bf16"}
        assert model.types == {dtype}
        assert {p.dtype for p in model.parameters()} == {torch.float32}
        assert result.accuracy == 1.0
        model.types.clear()
        assert evaluate(model, samples, loss=cross_entropy, device=CPU).correct == 50
        assert model.types == {torch.float32}
        results[precision] = read_vectors(model)
    assert results["bf16"].digest() != results["fp32"].digest()
    assert abs(results["bf16"].parameters - results["fp32"].parameters).max() < 0.05


def test_a_precision_of_a_newer_server_is_refused() -> None:
    with pytest.raises(TrainError, match=r"trains in fp32 and bf16, and not in 'fp8'") as refused:
        learn(linear(), blobs(), replace(PLAN, precision="fp8"))
    assert refused.value.reason == "bad_precision"


def test_momentum_is_not_kept_after_a_round() -> None:
    plan = Plan(epochs=1, batch_size=50, lr=0.1, momentum=0.9)
    one, two, plain = linear(), linear(), linear()
    learn(one, blobs(), replace(plan, epochs=2))
    for _ in range(2):
        learn(two, blobs(), plan)
    learn(plain, blobs(), replace(plan, epochs=2, momentum=0.0))
    torch.testing.assert_close(two.state_dict(), plain.state_dict())
    assert not torch.equal(next(one.parameters()), next(plain.parameters()))


def test_frozen_parameters_do_not_change() -> None:
    model = nn.Sequential(linear(), nn.Linear(3, 3))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    before = read_vectors(model[0]).digest()
    learn(model, blobs(), replace(PLAN, mu=0.1))
    assert read_vectors(model[0]).digest() == before


class FrozenNorm(nn.Sequential):
    """A model whose norm stays as it is in training."""

    def train(self, mode: bool = True) -> "FrozenNorm":
        super().train(mode)
        self[0].eval()
        return self


def test_a_model_that_says_itself_how_it_trains_is_asked() -> None:
    model = FrozenNorm(nn.BatchNorm1d(4), nn.Linear(4, 3))  # new modules are in training mode
    learn(model, blobs())
    assert model[0].num_batches_tracked == 0


def test_training_stops_between_two_batches_when_asked_to() -> None:
    seen, shares = Seen(80), list[float]()
    with pytest.raises(TrainingStopped):
        learn(linear(), seen, progress=shares.append, stopped=lambda: len(seen.asked) > 3)
    assert len(seen.asked) == 4
    assert shares == [share / 20 for share in (1, 2, 3)]


def test_progress_rises_to_one() -> None:
    shares = list[float]()
    learn(linear(), blobs(), replace(PLAN, batch_size=1), progress=shares.append)
    assert shares == sorted(shares)
    assert len(shares) == 100
    assert shares[-1] == 1.0


def test_a_loss_that_is_not_finite_ends_training() -> None:
    with pytest.raises(TrainError, match="learning rate below 1e\\+38") as caught:
        learn(linear(), blobs(), replace(PLAN, lr=1e38))
    assert caught.value.reason == "diverged"


def test_training_without_samples_is_an_error() -> None:
    with pytest.raises(TrainError) as caught:
        learn(linear(), Seen(0))
    assert caught.value.reason == "no_data"


def test_a_dataset_whose_samples_are_not_pairs_is_refused() -> None:
    with pytest.raises(TrainError) as caught:
        learn(linear(), TensorDataset(torch.zeros(4, 4)))
    assert caught.value.reason == "bad_batch"


def test_a_regression_has_a_loss_and_no_accuracy() -> None:
    result = learn(nn.Linear(2, 1), Samples(torch.zeros(8, 2), torch.zeros(8, 1)), loss=nn.functional.mse_loss)
    assert result.accuracy is None
    assert list(result.metrics) == ["loss"]


def test_the_counts_of_parts_add_up_to_those_of_the_whole() -> None:
    model, samples = linear(), blobs()
    whole = evaluate(model, samples, loss=cross_entropy, device=CPU, batch_size=50)
    odd = evaluate(model, samples, loss=cross_entropy, device=CPU, batch_size=7)
    parts = [TensorDataset(samples.inputs[s], samples.labels[s]) for s in (slice(0, 20), slice(20, 50))]
    added = sum((evaluate(model, part, loss=cross_entropy, device=CPU) for part in parts), Counts())
    for counts in (odd, added):
        assert (counts.correct, counts.total) == (whole.correct, whole.total)
        assert counts.loss_sum == pytest.approx(whole.loss_sum)
    with torch.no_grad():
        outputs = model(samples.inputs)
    assert whole.correct == int((outputs.argmax(1) == samples.labels).sum())
    assert whole.loss_sum == pytest.approx(float(nn.functional.cross_entropy(outputs, samples.labels, reduction="sum")))


def test_evaluation_changes_neither_the_model_nor_its_mode() -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), linear()).train()
    model[1].eval()
    before = read_vectors(model).digest()
    evaluate(model, blobs(), loss=cross_entropy, device=CPU)
    assert read_vectors(model).digest() == before
    assert (model.training, model[0].training, model[1].training) == (True, True, False)


def test_a_client_without_test_samples_counts_nothing() -> None:
    assert evaluate(linear(), Seen(0), loss=cross_entropy, device=CPU) == Counts(0, 0, 0.0)


@pytest.mark.parametrize(
    ("returned", "result"),
    [
        (7, TrainResult(7)),
        ({"num_samples": 7, "loss": torch.tensor(0.5)}, TrainResult(7, loss=0.5)),
        ({"num_samples": 7, "loss": 0.5, "accuracy": 1, "extra": "x"}, TrainResult(7, 0.5, 1.0)),
        (TrainResult(7, 0.5, steps=3), TrainResult(7, 0.5, steps=3)),
    ],
)
def test_a_users_trainer_returns_how_many_samples_it_used(returned: object, result: TrainResult) -> None:
    calls = []

    def trainer(*args: object) -> object:
        calls.append(args)
        return returned

    model, samples = linear(), blobs()
    got = run_trainer(trainer, model, samples, PLAN, device=CPU)
    assert calls == [(model, samples, PLAN)]
    assert got.seconds > 0
    assert replace(got, seconds=0) == result


@pytest.mark.parametrize(
    ("returned", "reason"),
    [
        (None, "bad_result"),
        (0, "bad_result"),
        (-1, "bad_result"),
        (True, "bad_result"),
        (2.5, "bad_result"),
        ({}, "bad_result"),
        ({"num_samples": "7"}, "bad_result"),
        ({"num_samples": 7, "loss": "low"}, "bad_result"),
        ({"num_samples": 7, "loss": math.nan}, "diverged"),
        (TrainResult(0), "bad_result"),
    ],
)
def test_a_trainer_that_returns_something_else_is_refused(returned: object, reason: str) -> None:
    with pytest.raises(TrainError) as caught:
        run_trainer(lambda *_: returned, linear(), blobs(), PLAN, device=CPU)
    assert caught.value.reason == reason


def test_a_users_trainer_gives_the_same_model_for_the_same_seed() -> None:
    def noise(model: nn.Module, samples: Any, plan: Plan) -> int:
        nn.init.normal_(next(model.parameters()))
        return len(samples)

    models = [linear(), linear()]
    for model in models:
        run_trainer(noise, model, blobs(), PLAN, device=CPU)
    assert read_vectors(models[0]).digest() == read_vectors(models[1]).digest()


def test_no_gradients_are_left_and_those_of_a_training_that_failed_do_not_count() -> None:
    def fails_after_backward(outputs: Tensor, labels: Tensor) -> Tensor:
        cross_entropy(outputs, labels).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        raise RuntimeError("after the gradients were made")

    once, again = linear(), linear()
    learn(once, blobs(30))
    with pytest.raises(RuntimeError, match="after the gradients"):
        learn(again, blobs(30), loss=fails_after_backward)
    learn(again, blobs(30))
    assert all(parameter.grad is None for parameter in again.parameters())
    assert [p.tolist() for p in again.parameters()] == [p.tolist() for p in once.parameters()]
