"""The distributed optimizer: all owners do a step of the whole model, or none does."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam

from fedring.pipeline.optimizer import DistributedOptimizer, new_context
from fedring.pipeline.owners import LocalOwner


def owners_of(count: int = 3) -> tuple[list[LocalOwner], nn.Sequential]:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(count)))
    return [LocalOwner(f"worker {i}", dict(part.named_parameters())) for i, part in enumerate(model)], model


def named(model: nn.Module, name: str) -> Tensor:
    return dict(model.named_parameters())[name]


def loss_of(model: nn.Module, seed: int) -> Tensor:
    result: Tensor = model(torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))).square().mean()
    return result


def backward(owners: list[LocalOwner], model: nn.Module, context: int, seed: int) -> None:
    for owner in owners:
        owner.backward(context, [loss_of(model, seed)])


def everything(owners: list[LocalOwner]) -> list[Any]:
    return [reference for owner in owners for reference in owner.references()]


@pytest.mark.parametrize(("kind", "options"), [(SGD, {"lr": 0.1, "momentum": 0.9}), (Adam, {"lr": 0.01})])
def test_a_step_equals_that_of_one_optimizer_for_all_parameters(kind: Any, options: dict[str, float]) -> None:
    (owners, model), (_, expected) = owners_of(), owners_of()
    optimizer, alone = DistributedOptimizer(kind, everything(owners), **options), kind(expected.parameters(), **options)
    for seed in range(4):
        context = new_context()
        backward(owners, model, context, seed)
        optimizer.step(context)
        alone.zero_grad()
        loss_of(expected, seed).backward()  # type: ignore[no-untyped-call]  # torch's
        alone.step()
        assert owners[0].gradients(context) == {}
    torch.testing.assert_close(list(model.parameters()), list(expected.parameters()))


def test_gradients_add_up_within_a_context_and_not_across_contexts() -> None:
    (owner, *_), model = owners_of(1)
    first, second = new_context(), new_context()
    backward([owner], model, first, 1)
    once = owner.gradients(first)["weight"]
    backward([owner], model, second, 2)
    backward([owner], model, first, 1)
    torch.testing.assert_close(owner.gradients(first)["weight"], 2 * once)
    assert not torch.allclose(owner.gradients(second)["weight"], once)
    assert named(model, "0.weight").grad is None


def test_if_an_owner_fails_none_steps_and_all_errors_are_raised_together() -> None:
    (owners, model), (others, expected) = owners_of(4), owners_of(4)
    optimizer = DistributedOptimizer(Adam, everything(owners), lr=0.1)
    twin = DistributedOptimizer(Adam, everything(others), lr=0.1)
    good, bad = new_context(), new_context()
    backward(owners, model, good, 1)
    optimizer.step(good)
    backward(owners, model, bad, 2)
    owners[1].add_gradients(bad, {"weight": torch.full((4, 4), torch.inf)})
    owners[3].add_gradients(bad, {"bias": torch.full((4,), torch.nan)})
    before = [parameter.detach().clone() for parameter in model.parameters()]
    with pytest.raises(ExceptionGroup, match="no owner has stepped") as raised:
        optimizer.step(bad)
    assert [error.__notes__ for error in raised.value.exceptions] == [["at owner worker 1"], ["at owner worker 3"]]
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)
    after = (
        new_context()
    )  # the optimizers' state was restored, so the next step equals that of a twin without a failure
    for pair, net, seeds in ((owners, model, (3,)), (others, expected, (1, 3))):
        for seed in seeds:
            context = after if seed == 3 else new_context()
            backward(pair, net, context, seed)
            (optimizer if pair is owners else twin).step(context)
    torch.testing.assert_close(list(model.parameters()), list(expected.parameters()))


def test_an_optimizer_that_fails_in_the_middle_of_its_step_changes_nothing() -> None:
    class Breaks(SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            raise ArithmeticError("in the middle")

    owners, model = owners_of(2)
    optimizer = DistributedOptimizer(Breaks, everything(owners), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    context = new_context()
    backward(owners, model, context, 1)
    with pytest.raises(ExceptionGroup) as raised:
        optimizer.step(context)
    assert [type(error) for error in raised.value.exceptions] == [ArithmeticError, ArithmeticError]
    torch.testing.assert_close(list(model.parameters()), before, rtol=0, atol=0)


def test_a_step_without_gradients_is_an_error() -> None:
    owners, _ = owners_of(1)
    with pytest.raises(ExceptionGroup) as raised:
        DistributedOptimizer(SGD, everything(owners), lr=0.1).step(new_context())
    assert "has no gradients" in str(raised.value.exceptions[0])


def test_an_error_in_building_an_optimizer_names_the_owners() -> None:
    owners, _ = owners_of(2)
    with pytest.raises(ExceptionGroup, match="cannot be built") as raised:
        DistributedOptimizer(SGD, everything(owners), lr=-1.0)
    assert [error.__notes__ for error in raised.value.exceptions] == [["at owner worker 0"], ["at owner worker 1"]]


def test_steps_on_the_same_owners_never_run_at_the_same_time() -> None:
    owners, model = owners_of(3)
    running, most, lock = 0, 0, threading.Lock()
    together = threading.Barrier(4, timeout=60)

    class Counts(SGD):
        def step(self, closure: Any = None) -> Any:
            nonlocal running, most
            mine = int(self.param_groups[0]["params"][0] is first)
            with lock:
                running += mine
                most = max(most, running)
            super().step()
            with lock:
                running -= mine

    one = owners[:1]
    first = named(model, "0.weight")
    before = named(model, "0.bias").detach().clone()
    optimizers = [DistributedOptimizer(Counts, everything(owners if i % 2 else owners[::-1]), lr=1.0) for i in range(4)]
    alone = DistributedOptimizer(Counts, everything(one), lr=1.0)

    def work(number: int) -> None:
        together.wait()
        for _ in range(20):
            context = new_context()
            for owner in owners:
                owner.add_gradients(context, {"bias": torch.ones(4)})
            (optimizers[number] if number else alone).step(context)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    torch.testing.assert_close(named(model, "0.bias").detach(), before - 80)
    assert most == 1
