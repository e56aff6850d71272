"""Cuts through which several tensors pass: every tensor has a name, and goes straight to the stages that use it."""

import copy
from collections.abc import Mapping

import pytest
import torch
from tests.encoder_decoder import EncoderDecoder
from torch import Tensor, nn
from torch.nn import functional

from fedring.pipeline.cut import as_cut, cut_at, cut_by_counts, cut_evenly
from fedring.pipeline.errors import CutError
from fedring.pipeline.layers import Layers, Stages
from fedring.pipeline.stage import Stage
from fedring.pipeline.stash import WeightStashing
from fedring.schedules.routes import BATCH, Routes


class Skips(nn.Module):
    """A model of one tensor whose first and last layers are connected, so that no single tensor passes in between."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up, self.last = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, values: Tensor) -> Tensor:
        """Return [batch, 4] of [batch, 4]."""
        low = self.down(values)
        high = self.up(torch.relu(self.middle(low)))
        result: Tensor = self.last(high + low) + values
        return result


def batch(size: int = 3) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    source, target = (torch.randint(1, 9, (size, 5), generator=generator) for _ in range(2))
    source[:, 3:] = 0
    return {"source": source, "target": target}


def follow(stages: Stages, tensors: Mapping[str, Tensor], targets: Tensor) -> tuple[float, list[Tensor]]:
    """Do a forward and a backward through all stages by their routes, and return the loss and all gradients."""
    routes, count = stages.routes, len(stages)
    parts = []
    for module in stages:
        trained = list(module.parameters())
        module.zero_grad()
        parts.append(Stage(module, WeightStashing(torch.optim.SGD(trained, lr=0.1))))
    parts[-1] = Stage(
        stages[-1], parts[-1].stash, loss=lambda y, t: functional.cross_entropy(y.flatten(0, -2), t.flatten())
    )
    made: dict[str, Tensor] = dict(tensors)
    for number, part in enumerate(parts):
        if len(routes.consumers(number)) == 1:
            (part.output,) = routes.consumers(number)
        inputs = {name: made[name].detach() for name in routes.sources[number]}
        for name, source in routes.sources[number].items():
            inputs[name].requires_grad_(source != BATCH and inputs[name].is_floating_point())
        outputs = part.forward(0, inputs, target=targets if number == count - 1 else None)
        assert set(outputs) == (set(routes.consumers(number)) if number < count - 1 else {"loss"})
        made |= outputs
    gradients: dict[str, Tensor] = {}
    for number in reversed(range(count)):
        given = {name: gradients[name] for name in routes.consumers(number) if name in gradients}
        for name, gradient in parts[number].backward(0, given).items():
            gradients[name] = gradients[name] + gradient if name in gradients else gradient
    return made["loss"].item(), [p.grad for part in parts for p in part.stash.parameters if p.grad is not None]


def same_as_alone(model: nn.Module, stages: Stages, tensors: Mapping[str, Tensor], targets: Tensor) -> None:
    """Check that the stages have the model's parameters, and give its loss and gradients."""
    assert sorted(n for s in stages for n, _ in s.named_parameters()) == sorted(n for n, _ in model.named_parameters())
    parameters = [parameter for stage in stages for parameter in stage.parameters()]
    torch.manual_seed(5)
    outputs = model(*tensors.values())
    loss = functional.cross_entropy(outputs.flatten(0, -2), targets.flatten())
    expected = torch.autograd.grad(loss, parameters)
    torch.manual_seed(5)
    found, gradients = follow(stages, tensors, targets)
    assert found == pytest.approx(loss.item(), abs=1e-6)
    torch.testing.assert_close(gradients, list(expected))


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_an_encoder_and_decoder_in_three_stages_train_as_one_model(dropout: float) -> None:
    torch.manual_seed(0)
    model = EncoderDecoder(dropout)
    stages = cut_at(model, ["encoder.1", "decoder.1"])
    assert stages.routes == Routes(
        (
            {"source": BATCH},
            {"encoder_0": 0, "eq_1": 0, "target": BATCH},
            {"decoder_0": 1, "encoder_1": 1, "causal": 1, "eq_1": 0},
        )
    )
    assert stages.routes.consumers(0) == {"encoder_0": (1,), "eq_1": (1, 2)}
    same_as_alone(model, stages, batch(), batch()["target"])


def test_a_mask_skips_the_stage_that_does_not_use_it() -> None:
    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, values: Tensor, weights: Tensor) -> Tensor:
            mask = values > 0
            result: Tensor = self.third(self.second(self.first(values)) * weights).masked_fill(mask, 0.0)
            return result

    model = Late()
    stages = cut_at(model, ["second", "third"])
    assert stages.routes.consumers(0) == {"gt": (2,), "first": (1,)}
    assert stages.routes.from_batch(1) == ("weights",)
    tensors = {"values": torch.randn(3, 4), "weights": torch.randn(3, 4)}
    same_as_alone(model, stages, tensors, torch.tensor([0, 1, 2]))


def test_a_cut_inside_a_residual_block_passes_both_tensors() -> None:
    model = Skips()
    stages = cut_at(model, ["up", "last"])
    assert stages.routes.sources == (
        {"inputs": BATCH},
        {"relu": 0, "down": 0},
        {"add": 1, "inputs": BATCH},
    )
    same_as_alone(model, stages, {"inputs": torch.randn(3, 4)}, torch.tensor([0, 1, 2]))


def test_cuts_by_costs_use_single_tensors_as_long_as_they_give_enough_layers() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left, self.right = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, values: Tensor) -> Tensor:
            result: Tensor = self.right(torch.relu(self.left(values))) + values
            return result

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.Sequential(Block(), Block())
            self.norm = nn.LayerNorm(4)

        def forward(self, values: Tensor) -> Tensor:
            result: Tensor = self.norm(self.blocks(values))
            return result

    model = Blocks()
    assert Layers(model).names == ["blocks.0.left", "blocks.1.left", "norm"]
    assert Layers(model, stages=4).names == [
        "blocks.0.left", "blocks.0.right", "blocks.1.left", "blocks.1.right", "norm",
    ]  # fmt: skip
    assert cut_evenly(model, 2).routes.sources == ({"inputs": BATCH}, {"stage0": 0})
    for stages in (cut_evenly(model, 4), cut_by_counts(model, [1, 2, 1, 1])):
        same_as_alone(model, stages, {"inputs": torch.randn(3, 4)}, torch.tensor([0, 1, 2]))


@pytest.mark.parametrize("timed", [False, True], ids=["by parameters", "by time"])
def test_a_model_of_several_tensors_is_cut_evenly(timed: bool) -> None:
    torch.manual_seed(0)
    model = EncoderDecoder()
    stages = cut_evenly(model, 3, sample=batch() if timed else None)
    same_as_alone(model, stages, batch(), batch()["target"])


def test_a_sample_without_a_tensor_of_the_model_is_refused() -> None:
    with pytest.raises(CutError, match="the sample has no 'target', which the model takes; it has source"):
        cut_evenly(EncoderDecoder(), 3, sample={"source": batch()["source"]})


def test_an_argument_with_a_default_keeps_it() -> None:
    class Optional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, values: Tensor, mask: Tensor | None = None, factor: float = 3.0) -> Tensor:
            hidden = self.first(values) if mask is None else self.first(values) * mask
            result: Tensor = self.second(hidden) * factor
            return result

    model = Optional()
    stages = cut_at(model, ["second"])
    assert stages.routes.sources == ({"inputs": BATCH}, {"stage0": 0})
    same_as_alone(model, stages, {"inputs": torch.randn(3, 4)}, torch.tensor([0, 1, 2]))


def test_no_stage_begins_where_an_earlier_tensor_is_changed_in_place_later() -> None:
    class Changing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second, self.third = (nn.Linear(4, 4) for _ in range(3))

        def forward(self, values: Tensor) -> Tensor:
            low = self.first(values)
            high = self.second(low * 2)
            low.add_(1.0)
            result: Tensor = self.third(high + low)
            return result

    with pytest.raises(CutError, match=r"no layer begins at 'second'.* or works in place; choose from first, third"):
        cut_at(Changing(), ["second"])
    model = Changing()
    same_as_alone(model, cut_at(model, ["third"]), {"inputs": torch.randn(3, 4)}, torch.tensor([0, 1, 2]))


def test_a_model_that_takes_any_arguments_is_refused() -> None:
    class Any(nn.Module):
        def forward(self, *values: Tensor) -> Tensor:
            return torch.stack(values).sum(0)

    with pytest.raises(CutError, match="takes tensors by name"):
        cut_at(Any(), [])


class Left(nn.Module):
    """A user's own first stage."""

    def __init__(self, model: Skips) -> None:
        super().__init__()
        self.down, self.middle = model.down, model.middle

    def forward(self, values: Tensor) -> dict[str, Tensor]:
        """Return what the second stage needs."""
        low = self.down(values)
        return {"low": low, "hidden": torch.relu(self.middle(low))}


class Right(nn.Module):
    """A user's own last stage."""

    def __init__(self, model: Skips) -> None:
        super().__init__()
        self.up, self.last = model.up, model.last

    def forward(self, low: Tensor, hidden: Tensor, values: Tensor) -> Tensor:
        """Return the model's result."""
        result: Tensor = self.last(self.up(hidden) + low) + values
        return result


def test_a_users_own_stages_may_have_routes() -> None:
    model = Skips()
    routes = Routes(({"values": BATCH}, {"low": 0, "hidden": 0, "values": BATCH}))
    stages = as_cut(([Left(model), Right(model)], routes))
    assert stages.routes is routes
    tensors, targets = {"values": torch.randn(3, 4)}, torch.tensor([0, 1, 2])
    loss, _ = follow(stages, tensors, targets)
    assert loss == pytest.approx(functional.cross_entropy(model(**tensors), targets).item())
    with pytest.raises(CutError, match="the routes are of 2 stages, but there are 1 modules"):
        as_cut(([Left(model)], routes))
    with pytest.raises(CutError, match="a pair of such a list and its Routes"):
        as_cut(([Left(model), Right(model)], "routes"))
    assert as_cut((left := nn.Linear(2, 2), right := nn.Linear(2, 2))) == [left, right]


def test_a_cut_whose_stage_makes_nothing_that_is_used_is_refused() -> None:
    model = Skips()
    routes = Routes(({"values": BATCH}, {"values": BATCH}))
    with pytest.raises(CutError, match="no later stage uses what stage 0 makes"):
        as_cut(([Left(model), Right(model)], routes))


@pytest.mark.parametrize("training", [True, False])
def test_functional_dropout_follows_the_mode_of_the_stage(training: bool) -> None:
    class Dropped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 64)
            self.frozen = nn.Dropout(0.5).eval()

        def forward(self, values: Tensor) -> Tensor:
            hidden = functional.dropout(self.first(values) + torch.arange(4), 0.5, self.training)
            result: Tensor = functional.dropout(self.second(hidden), p=0.5, training=self.training)
            return result

    model = Dropped().train(training)
    model.frozen.eval()
    stages = cut_at(model, ["second"])
    assert (model.training, model.frozen.training) == (training, False)
    inputs = torch.ones(8, 4)
    for mode in (True, False):
        for stage in stages:
            stage.train(mode)
        hidden = stages[0](inputs)
        outputs = copy.deepcopy(stages[1])(hidden)
        for tensor in (hidden, outputs):
            assert (tensor == 0).any() == mode
