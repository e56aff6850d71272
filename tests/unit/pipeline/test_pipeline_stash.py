"""Weight stashing: old versions of the weights do not change, and their number is bounded."""

import pytest
import torch
from torch import Tensor, nn

from fedring.pipeline.errors import PipelineError
from fedring.pipeline.stage import Stage
from fedring.pipeline.stash import WeightStashing


def stash_of(bound: int = 2, loss_scale: float = 1.0) -> tuple[nn.Linear, WeightStashing]:
    torch.manual_seed(0)
    module = nn.Linear(3, 2)
    return module, WeightStashing(
        torch.optim.SGD(module.parameters(), lr=1.0, momentum=0.9), bound=bound, loss_scale=loss_scale
    )


def ones(stash: WeightStashing) -> list[Tensor | None]:
    return [torch.ones_like(parameter) for parameter in stash.parameters]


def add_gradients(stash: WeightStashing, gradients: list[Tensor | None]) -> None:
    """Let a backward add these gradients to those of the newest version's weights."""
    for weight, gradient in zip(stash.weights(), gradients, strict=True):
        if gradient is not None:
            weight.backward(gradient)  # type: ignore[no-untyped-call]  # torch's


def test_a_kept_version_does_not_change_and_a_dropped_one_cannot_be_used() -> None:
    module, stash = stash_of()
    old = [weight.detach().clone() for weight in stash.weights()]
    add_gradients(stash, ones(stash))
    assert stash.step(keep=[0]) == 1
    torch.testing.assert_close([w.detach() for w in stash.weights(0)], old, rtol=0, atol=0)
    torch.testing.assert_close([w.detach() + 1 for w in stash.weights(1)], old)
    assert stash.weights(1)[0].data_ptr() == module.weight.data_ptr()
    stash.drop(0)
    stash.drop(1)
    with pytest.raises(PipelineError, match=r"version 0 no longer exist: only \[1\] are kept"):
        stash.weights(0)


def test_weights_are_copied_only_if_the_old_version_is_kept() -> None:
    module, stash = stash_of()
    before = module.weight.data_ptr()
    add_gradients(stash, ones(stash))
    stash.step()
    assert module.weight.data_ptr() == before
    add_gradients(stash, [torch.ones_like(module.weight), None])
    bias = module.bias.data_ptr()
    stash.step(keep=[1])
    assert module.weight.data_ptr() != before
    assert module.bias.data_ptr() == bias


def test_more_versions_than_the_bound_are_refused_and_nothing_is_stepped() -> None:
    module, stash = stash_of(bound=2)
    for keep in ([0], [0, 1]):
        add_gradients(stash, ones(stash))
        before = module.weight.detach().clone()
        if len(keep) == 2:
            with pytest.raises(PipelineError, match="more than bound=2"):
                stash.step(keep=keep)
            torch.testing.assert_close(module.weight.detach(), before, rtol=0, atol=0)
        else:
            stash.step(keep=keep)
    assert stash.version == 1


def test_an_update_keeps_the_weights_of_micro_batches_in_flight() -> None:
    module, stash = stash_of()
    stage = Stage(module, stash)
    inputs = torch.ones(1, 3, requires_grad=True)
    expected = module.weight.detach().sum(0)
    stage.forward(0, {"inputs": inputs})
    add_gradients(stash, ones(stash))
    stage.update()
    gradients = stage.backward(0, {"output": torch.ones(1, 2)})
    torch.testing.assert_close(gradients["inputs"][0], expected)


def test_stages_in_half_precision_update_parameters_in_full_precision() -> None:
    losses = {}
    for dtype in (None, torch.bfloat16):
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(module.parameters(), lr=0.02)
        stash = WeightStashing(optimizer, bound=1, compute_dtype=dtype, loss_scale=1.0 if dtype is None else 1024.0)
        stage = Stage(module, stash, loss=nn.functional.mse_loss)
        generator = torch.Generator().manual_seed(1)
        inputs = torch.randn(64, 8, generator=generator)
        targets = inputs[:, :1] * inputs[:, 1:2]
        losses[dtype] = [_step(stage, inputs, targets) for _ in range(60)]
        assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
        assert {weight.dtype for weight in stash.weights()} == {dtype or torch.float32}
    assert losses[None][-1] < 0.6 * losses[None][0]
    assert losses[torch.bfloat16][-1] == pytest.approx(losses[None][-1], rel=0.1)


def _step(stage: Stage, inputs: Tensor, targets: Tensor) -> float:
    loss = stage.forward(0, {"inputs": inputs}, target=targets)["loss"]
    stage.backward(0, {})
    stage.update()
    return loss.item()


class Tied(nn.Module):
    """Uses one weight twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(6)

    def forward(self, inputs: Tensor) -> Tensor:
        found: Tensor = self.second(self.norm(torch.tanh(self.first(inputs))))
        return found


@pytest.mark.parametrize("recompute", [False, True])
def test_a_stage_with_one_version_trains_its_own_parameters_to_the_same_bits(recompute: bool) -> None:
    states = []
    for bound in (1, 2):
        torch.manual_seed(0)
        module = Tied()
        stash = WeightStashing(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), bound=bound)
        assert (stash.weights()[0] is module.first.weight) is (bound == 1)
        stage = Stage(module, stash, loss=nn.functional.mse_loss, recompute=recompute)
        for seed in range(4):
            inputs, targets = torch.randn(2, 3, 8, 6, generator=torch.Generator().manual_seed(seed))
            for micro_batch in range(3):
                stage.forward(micro_batch, {"inputs": inputs[micro_batch]}, target=targets[micro_batch], share=1 / 3)
            for micro_batch in range(3):
                stage.backward(micro_batch, {})
            stage.update()
            assert module.first.weight.grad is None
        states.append(module.state_dict())
    torch.testing.assert_close(*states, rtol=0, atol=0)


def test_a_parameter_that_is_frozen_during_the_training_keeps_its_value() -> None:
    module, stash = stash_of(bound=1)
    stage = Stage(module, stash, loss=nn.functional.mse_loss)
    _step(stage, torch.ones(4, 3), torch.zeros(4, 2))
    module.bias.requires_grad = False
    weight, bias = module.weight.detach().clone(), module.bias.detach().clone()
    _step(stage, torch.ones(4, 3), torch.zeros(4, 2))
    assert torch.equal(module.bias, bias)
    assert not torch.equal(module.weight, weight)


@pytest.mark.parametrize("bound", [1, 2])
def test_a_frozen_parameter_of_the_optimizer_is_stepped_once_it_is_not_frozen_any_more(bound: int) -> None:
    module, stash = stash_of(bound)
    before = module.bias.detach().clone()
    for frozen in (True, False):
        module.bias.requires_grad = not frozen
        stash.reload()
        stage = Stage(module, stash, loss=lambda output, target: output.sum())
        stage.forward(0, {"inputs": torch.ones(2, 3)}, target=torch.ones(2))
        stage.backward(0, {})
        stage.update()
        assert torch.equal(module.bias, before) == frozen


def test_an_update_is_skipped_if_a_scaled_gradient_overflows() -> None:
    module, stash = stash_of(loss_scale=2.0)
    before = module.weight.detach().clone()
    add_gradients(stash, [torch.full((2, 3), torch.inf), torch.ones(2)])
    stash.step()
    assert stash.skipped == 1
    torch.testing.assert_close(module.weight.detach(), before, rtol=0, atol=0)
    add_gradients(stash, ones(stash))
    stash.step()
    torch.testing.assert_close(module.weight.detach(), before - 0.5)


def test_after_a_reload_the_new_weights_are_the_only_version() -> None:
    module, stash = stash_of()
    module.weight.data = torch.full((2, 3), 4.0)
    stash.reload()
    assert stash.versions == [0]
    assert stash.weights()[0].eq(4.0).all()


@pytest.mark.parametrize(("bound", "loss_scale"), [(0, 1.0), (1, 0.0)])
def test_bounds_and_scales_must_be_positive(bound: int, loss_scale: float) -> None:
    with pytest.raises(ValueError, match="must be positive"):
        stash_of(bound, loss_scale)


def test_an_optimizer_of_another_module_is_refused() -> None:
    _, stash = stash_of()
    with pytest.raises(ValueError, match="2 of the optimizer's parameters are not in the stage's module"):
        Stage(nn.Linear(3, 2), stash)
