"""Models without values: what they keep, and how they get values one module after the other."""

import logging

import pytest
import torch
from torch import Tensor, nn

from fedring.train.errors import SeamError
from fedring.train.models import digits_mlp
from fedring.train.names.offered import collect
from fedring.train.tensors.skeleton import build_skeleton, check_can_initialize, initialize, replace_tensors
from fedring.train.tensors.state import schema_of, tensors_of

HERE = "tests.unit.train.test_skeleton"


class Rotating(nn.Module):
    """A model with a buffer that is not persistent, and a tensor that is a plain attribute."""

    frequencies: Tensor

    def __init__(self, *, plain: bool = False) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        if plain:
            self.scale = torch.arange(4.0)
        else:
            self.register_buffer("frequencies", torch.arange(4.0), persistent=False)


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight


class Valued(nn.Module):
    """A model whose construction needs values."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(width, int(torch.ones(3).sum().item()))


class Bare(nn.Module):
    """A model with a parameter of its own and no reset_parameters()."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))


def skeleton(name: str, **args: object) -> nn.Module:
    return build_skeleton(f"{HERE}:{name}", args, 0, collect([HERE]))


def test_a_skeleton_has_the_schema_of_its_model_and_no_values() -> None:
    model = build_skeleton("fedring.train.models:digits_mlp", {"hidden": 8, "layers": 2}, 0, collect(["fedring"]))
    assert schema_of(model) == schema_of(digits_mlp(8, 2))
    assert all(tensor.is_meta for _, tensor in tensors_of(model))


@pytest.mark.parametrize("plain", [False, True])
def test_tensors_outside_of_the_state_dict_keep_their_values(plain: bool, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        model = skeleton("Rotating", plain=plain)
    kept = model.get_buffer("frequencies") if not plain else model.scale
    assert isinstance(kept, Tensor)
    assert kept.tolist() == [0, 1, 2, 3]
    assert all(tensor.is_meta for _, tensor in tensors_of(model))
    assert "is built whole in memory once" in caplog.text


def test_a_model_that_needs_values_to_be_built_is_built_whole() -> None:
    assert all(tensor.is_meta for _, tensor in tensors_of(skeleton("Valued")))
    with pytest.raises(SeamError, match="cannot be built"):
        skeleton("Valued", width=-1)


def test_tied_weights_stay_tied() -> None:
    model = skeleton("Tied")
    replace_tensors(model, lambda tensor: torch.zeros(tensor.shape))
    assert isinstance(model, Tied)
    assert model.first.weight is model.last.weight
    assert not model.first.weight.is_meta
    assert model.first.bias is not model.last.bias


def test_modules_get_the_same_values_in_the_order_of_the_schema_each_time() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2)).to("meta")
    before = torch.get_rng_state()
    first, again = (dict(initialize(model, 3, "parameter")) for _ in range(2))
    assert list(first) == [entry.name for entry, _ in schema_of(model).spans("parameter")]
    assert all(torch.equal(first[name], again[name]) for name in first)
    other = dict(initialize(model, 4, "parameter"))
    assert not torch.equal(first["0.weight"], other["0.weight"])
    assert first["0.weight"].abs().max() <= 0.5  # 1 / sqrt(4), as nn.Linear draws
    assert dict(initialize(model, 3, "buffer"))["1.running_var"].tolist() == [1] * 8
    assert all(tensor.is_meta for _, tensor in tensors_of(model))
    assert torch.equal(torch.get_rng_state(), before)


def test_a_model_without_reset_parameters_is_refused_with_the_key_to_change() -> None:
    with pytest.raises(SeamError, match=r'Bare model has no reset_parameters.*first_model = "whole"'):
        check_can_initialize(skeleton("Bare"))
