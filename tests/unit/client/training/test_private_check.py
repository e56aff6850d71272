"""DP-SGD refuses models for reasons that depend on no sample and no server."""

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedring.client.training.local_training import LoadedJob, loop_of
from fedring.data import Samples, digits
from fedring.train.errors import SeamError, TrainError
from fedring.train.losses import cross_entropy
from fedring.train.models import digits_mlp
from fedring.train.optimizers import sgd
from fedring.train.plan import Plan
from fedring.train.private_check import check_private_training
from fedring.v1 import federation_pb2 as pb

CPU = torch.device("cpu")


class Listed(Dataset[Any]):
    """Samples as they are, such as a dict and a label."""

    def __init__(self, *samples: Any) -> None:
        self.samples, self.read = samples, list[int]()

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Any:
        self.read.append(index)
        return self.samples[index]


class Words(nn.Module):
    """Classifies texts by their words; if `mixing`, also by those of others."""

    def __init__(self, *, mixing: bool) -> None:
        super().__init__()
        self.words, self.last, self.mixing = nn.Embedding(9, 4), nn.Linear(4, 3), mixing

    def forward(self, words: Tensor) -> Tensor:
        each = self.words(words).mean(1)
        outputs: Tensor = self.last(each - each.mean(0) if self.mixing else each)
        return outputs


class Person(nn.Module):
    """Takes numbers and a town; mixes one of them with those of other persons."""

    def __init__(self, *, mixing: str = "") -> None:
        super().__init__()
        self.towns, self.last, self.mixing = nn.Embedding(5, 4), nn.Linear(7, 3), mixing

    def forward(self, numbers: Tensor, town: Tensor) -> Tensor:
        parts = {"numbers": numbers, "town": self.towns(town)}
        outputs: Tensor = self.last(torch.cat([self._mixed(name, part) for name, part in parts.items()], 1))
        return outputs

    def _mixed(self, name: str, part: Tensor) -> Tensor:
        return part - part.mean(0) if name == self.mixing else part


def check(model: nn.Module, samples: Dataset[Any], *, loss: Any = cross_entropy) -> None:
    check_private_training(model, samples, loss=loss, device=CPU)


def refused(sentence: str) -> Any:
    return pytest.raises(SeamError, match=re.escape(sentence), check=lambda error: error.reason == "no_sample_dp")


def texts() -> Samples:
    return Samples(torch.full((6, 5), 8), torch.tensor([2, 1, 0, 2, 1, 0]))


def persons() -> Listed:
    one = {"numbers": torch.tensor([7.0, 8.0, 9.0]), "town": torch.tensor(4)}
    return Listed((one, 2), (one, 1))


def test_the_check_sees_no_value_of_a_sample_and_none_of_the_servers() -> None:
    seen: list[Tensor] = []

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(3, 9)

        def forward(self, inputs: Tensor) -> Tensor:
            seen.extend((inputs.clone(), *(parameter.detach().clone() for parameter in self.parameters())))
            outputs: Tensor = self.last(inputs)
            return outputs

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        seen.append(torch.tensor(labels.item()))  # vmap cannot do that
        return cross_entropy(outputs, labels)

    model, samples = Watched(), Listed(*((torch.full((3,), 77.0), 7) for _ in range(4)))
    nn.init.constant_(model.last.weight, 66.0)
    nn.init.constant_(model.last.bias, 66.0)
    check(model, samples, loss=loss)
    assert len(seen) >= 12
    assert max(float(values.abs().max()) for values in seen) < 10
    assert samples.read == [0]  # for its shapes and types
    assert all((parameter == 66).all() for parameter in model.parameters())


def test_one_sample_is_enough() -> None:
    check(digits_mlp(), Samples(torch.zeros(1, 8, 8), torch.zeros(1, dtype=torch.int64)))


def test_inputs_may_be_indices() -> None:
    check(Words(mixing=False), texts())
    with refused("The gradients of words.weight for single samples depend on other samples"):
        check(Words(mixing=True), texts())


def test_inputs_may_have_names() -> None:
    check(Person(), persons())
    for mixed in ("numbers", "town"):
        with refused("The gradients of towns.weight for single samples depend on other samples"):
            check(Person(mixing=mixed), persons())


def test_a_server_cannot_hide_by_its_values_that_a_model_mixes_samples() -> None:
    model = Words(mixing=True)
    nn.init.zeros_(model.last.weight)  # so that no gradient reaches what is before it
    with refused("The gradients of words.weight for single samples depend on other samples"):
        check(model, texts())


def test_a_model_is_as_it_was_afterwards() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.GroupNorm(2, 16), nn.Dropout(0.5), nn.Linear(16, 10))
    model[4].requires_grad_(False)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    state = torch.get_rng_state()
    check(model, digits().train)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(parameter.grad is None and not vars(parameter) for parameter in model.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_a_loss_may_leave_out_a_class_and_need_its_samples_one_by_one() -> None:
    def padded(outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(outputs, labels, ignore_index=0)

    def one_by_one(outputs: Tensor, labels: Tensor) -> Tensor:
        assert labels[0].item() >= 0  # vmap cannot do that
        return cross_entropy(outputs, labels)

    for loss in (padded, one_by_one):
        check(Words(mixing=False), texts(), loss=loss)
        with refused("depend on other samples"):
            check(Words(mixing=True), texts(), loss=loss)


def test_what_nobody_can_compare_is_refused() -> None:
    def broken(outputs: Tensor, labels: Tensor) -> Tensor:
        raise KeyError("Jane Doe")

    with refused("The model or the loss fails for samples that are made up (KeyError)."):
        check(digits_mlp(), digits().train, loss=broken)
    for factor in (torch.inf, 0.0):
        with refused("The gradients for samples that are made up are not finite, or all zero"):
            check(digits_mlp(), digits().train, loss=lambda outputs, labels: cross_entropy(outputs, labels) * factor)  # noqa: B023
    with pytest.raises(TrainError, match="A sample must be a pair"):
        check(digits_mlp(), Listed("Jane Doe"))


def test_a_loop_without_noise_does_not_train_on_nothing() -> None:
    split = digits()
    loaded = LoadedJob(digits_mlp(), split, cross_entropy, sgd, None, None)
    with pytest.raises(SeamError, match="without noise"):
        loop_of(pb.JobSpec()).train(loaded, split.train, Plan(), device=CPU, on_nothing=True)
