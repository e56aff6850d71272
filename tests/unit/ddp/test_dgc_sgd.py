"""The optimizer for deep gradient compression, and the check of others."""

from typing import Any

import pytest
import torch
from torch import nn

from fedring.ddp import DGC, DGCSGD, check_optimizer


def parameter(*values: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values))


def test_momentum_does_not_act_on_gradients() -> None:
    tensor = parameter(1.0, 2.0)
    optimizer = DGCSGD([tensor], 0.5, momentum=0.9)
    for _ in range(2):
        tensor.grad = torch.tensor([1.0, -2.0])
        optimizer.step()
    assert tensor.tolist() == [0, 4]


@pytest.mark.parametrize(("nesterov", "dampening"), [(False, 0.0), (True, 0.0), (False, 0.3), (False, 1.0)])
def test_momentum_acts_on_weight_decay_as_in_sgd(nesterov: bool, dampening: float) -> None:
    ours, theirs = parameter(1.0, -2.0), parameter(1.0, -2.0)
    settings: dict[str, Any] = {"momentum": 0.9, "weight_decay": 0.01, "nesterov": nesterov, "dampening": dampening}
    optimizer = DGCSGD([ours], 0.1, **settings)
    reference = torch.optim.SGD([theirs], 0.1, **settings)
    for _ in range(5):
        ours.grad, theirs.grad = torch.zeros(2), torch.zeros(2)
        optimizer.step()
        reference.step()
    assert torch.allclose(ours, theirs)
    assert ours[0] < 1


def test_dampening_does_not_act_on_gradients() -> None:
    tensor = parameter(1.0)
    optimizer = DGCSGD([tensor], 0.5, momentum=0.9, weight_decay=0.0, dampening=1.0)
    for _ in range(2):
        tensor.grad = torch.tensor([1.0])
        optimizer.step()
    assert tensor.tolist() == [0]


def test_a_state_from_before_there_was_dampening_is_taken_over() -> None:
    tensor = parameter(1.0)
    saved = DGCSGD([tensor], 0.1, momentum=0.9, weight_decay=0.1).state_dict()
    del saved["param_groups"][0]["dampening"]
    optimizer = DGCSGD([tensor], 0.1, momentum=0.9, weight_decay=0.1)
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["dampening"] == 0


def test_weight_decay_is_of_the_parameter_before_the_step() -> None:
    tensor = parameter(8.0)
    tensor.grad = torch.tensor([1.0])
    DGCSGD([tensor], 0.5, weight_decay=0.25).step()
    assert tensor.tolist() == [8 - 0.5 * (1 + 0.25 * 8)]


def test_the_momentum_is_saved_and_restored() -> None:
    def run(steps: int, tensor: nn.Parameter, optimizer: DGCSGD) -> None:
        for _ in range(steps):
            tensor.grad = torch.ones(1)
            optimizer.step()

    straight, first = parameter(1.0), parameter(1.0)
    run(6, straight, DGCSGD([straight], 0.1, momentum=0.9, weight_decay=0.1))
    before = DGCSGD([first], 0.1, momentum=0.9, weight_decay=0.1)
    run(3, first, before)
    second = parameter(first.item())
    after = DGCSGD([second], 0.1, momentum=0.9, weight_decay=0.1)
    after.load_state_dict(before.state_dict())
    run(3, second, after)
    assert torch.equal(straight, second)


def test_a_closure_is_evaluated_with_gradients() -> None:
    tensor = parameter(3.0)
    optimizer = DGCSGD([tensor], 0.5)

    def closure() -> float:
        optimizer.zero_grad()
        loss = (tensor**2).sum()
        torch.autograd.backward(loss)
        return float(loss.detach())

    assert optimizer.step(closure) == 9
    assert tensor.tolist() == [0]


def test_momentum_in_both_compression_and_optimizer_is_refused() -> None:
    tensors = [parameter(1.0)]
    for optimizer in (torch.optim.SGD(tensors, 0.1, momentum=0.9), torch.optim.Adam(tensors)):
        with pytest.raises(ValueError, match="momentum would act twice"):
            check_optimizer(optimizer, DGC())
        check_optimizer(optimizer, DGC(momentum=0))


def test_optimizers_without_momentum_of_gradients_are_accepted() -> None:
    tensors = [parameter(1.0)]
    for optimizer in (
        torch.optim.SGD(tensors, 0.1, weight_decay=0.1),
        DGCSGD(tensors, 0.1, momentum=0.9),
        torch.optim.Adam(tensors, betas=(0.0, 0.999)),
    ):
        check_optimizer(optimizer, DGC())


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"lr=-0\.1"):
        DGCSGD([parameter(1.0)], -0.1)
    with pytest.raises(ValueError, match=r"momentum=1\.0"):
        DGCSGD([parameter(1.0)], 0.1, momentum=1.0)
    with pytest.raises(ValueError, match=r"weight_decay=-1\.0"):
        DGCSGD([parameter(1.0)], 0.1, weight_decay=-1.0)
    with pytest.raises(ValueError, match="nesterov=True"):
        DGCSGD([parameter(1.0)], 0.1, nesterov=True)
    with pytest.raises(ValueError, match=r"dampening=0\.5"):
        DGCSGD([parameter(1.0)], 0.1, momentum=0.9, nesterov=True, dampening=0.5)
    with pytest.raises(ValueError, match=r"dampening=1\.5"):
        DGCSGD([parameter(1.0)], 0.1, momentum=0.9, dampening=1.5)
