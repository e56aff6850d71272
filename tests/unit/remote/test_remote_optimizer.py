"""The distributed optimizer: all owners do a step of the whole model, or none does, and one step at a time."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import pytest
import torch
from tests.remote_functions import Scaled
from tests.remote_ranks import serving
from torch import Tensor, nn
from torch.optim import SGD, Adagrad, Adam, SparseAdam

from fedring import remote
from fedring.remote import requests
from fedring.remote.contexts import inside
from fedring.remote.messages import outgoing
from fedring.remote.service import _MAX_RUNNING, Service
from fedring.remote.stepping import OwnedOptimizer
from fedring.train.names.offered import collect

F = "tests.remote_functions:"
Ranks = list[remote.Owners]


class Offset(nn.Module):
    """Adds a parameter; its gradient is what flows back."""

    def __init__(self) -> None:
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.offset


class Product(nn.Module):
    """Multiplies with a parameter, whose value a backward pass needs."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.factor


def modules(rank: int) -> dict[str, nn.Module]:
    return {"layer": Scaled(rank), "offset": Offset(), "product": Product(), "table": nn.Embedding(6, 4, sparse=True)}


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    with serving(3, modules) as owners:
        yield owners


def batch(seed: int) -> Tensor:
    return torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))


def held(ranks: Ranks, rank: int, name: str) -> nn.Module:
    module: nn.Module = ranks[rank][rank].agent.service.holdings.get(rank, name)
    return module


def values(ranks: Ranks, name: str, *where: int) -> list[Tensor]:
    return [parameter.detach().clone() for rank in where for parameter in held(ranks, rank, name).parameters()]


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        (Adagrad, {"lr": 0.1}),
        (Adam, {"lr": 0.01, "betas": (0.8, 0.99)}),
    ],
)
def test_steps_equal_those_of_one_optimizer_for_all_parameters(
    ranks: Ranks, kind: type[torch.optim.Optimizer], options: dict[str, Any]
) -> None:
    head, alone = Scaled(7), nn.Sequential(Scaled(1), Scaled(2), Scaled(7))
    first, second = (ranks[0][rank].module("layer") for rank in (1, 2))
    mine = held(ranks, 0, "layer")
    mine.load_state_dict(head.state_dict())
    everything = remote.parameters(first, second, ranks[0][0].module("layer"))
    assert [parameter.name for parameter in everything] == 3 * ["linear.weight", "linear.bias"]
    optimizer = remote.DistributedOptimizer(kind, everything, **options)
    expected = kind(alone.parameters(), **options)
    for seed in range(5):
        with remote.context() as step:
            step.backward(mine(second(first(batch(seed)))).square().mean())
            optimizer.step(step)
        expected.zero_grad()
        alone(batch(seed)).square().mean().backward()
        expected.step()
    found = [*values(ranks, "layer", 1, 2), *mine.parameters()]
    torch.testing.assert_close(found, list(alone.parameters()), rtol=1e-6, atol=1e-6)


def test_a_tensor_can_be_a_parameter_and_sparse_gradients_step(ranks: Ranks) -> None:
    tensor, table = ranks[0][1].remote(F + "random_tensor", 1), ranks[0][2].module("table")
    before, rows = tensor.fetch(), held(ranks, 2, "table").weight.detach().clone()  # type: ignore[operator]
    sgd = remote.DistributedOptimizer(SGD, remote.parameters(tensor), lr=0.05)
    sparse = remote.DistributedOptimizer(SparseAdam, remote.parameters(table), lr=0.1)
    with remote.context() as step:
        step.backward(tensor.fetch().sum() + table(torch.tensor([2, 2, 4])).sum())
        sgd.step(step)
        sparse.step(step)
    torch.testing.assert_close(tensor.fetch(), before - 0.05)
    changed = (values(ranks, "table", 2)[0] != rows).any(dim=1)
    assert changed.nonzero().flatten().tolist() == [2, 4]


def test_if_an_owner_fails_none_steps_and_all_errors_are_raised_together(ranks: Ranks) -> None:
    layers = [ranks[0][rank].module("layer") for rank in range(3)]
    optimizer = remote.DistributedOptimizer(Adam, remote.parameters(*layers), lr=0.1)
    twins = [Scaled(rank) for rank in range(3)]
    expected = Adam([parameter for twin in twins for parameter in twin.parameters()], lr=0.1)
    for seed, broken in ((1, ()), (2, (1, 2)), (3, ())):
        before = values(ranks, "layer", 0, 1, 2)
        expected.zero_grad()
        with remote.context() as step:
            for rank in range(3):
                factor = torch.inf if rank in broken else 1.0
                step.backward((factor * layers[rank](batch(seed))).sum())
                twins[rank](batch(seed)).sum().backward()
            if not broken:
                optimizer.step(step)
                expected.step()  # whose state has not seen the step that failed
                continue
            with pytest.raises(ExceptionGroup, match="no owner has stepped") as raised:
                optimizer.step(step)
        errors = [error for error in raised.value.exceptions if isinstance(error, remote.RemoteError)]
        assert [(error.owner, error.reason) for error in errors] == [("rank 1", "non_finite"), ("rank 2", "non_finite")]
        torch.testing.assert_close(values(ranks, "layer", 0, 1, 2), before, rtol=0, atol=0)
    wanted = [parameter.detach() for twin in twins for parameter in twin.parameters()]
    torch.testing.assert_close(values(ranks, "layer", 0, 1, 2), wanted, rtol=1e-6, atol=1e-6)


def test_an_optimizer_that_fails_in_the_middle_of_its_step_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Breaks(SGD):
        def step(self, closure: Any = None) -> Any:
            super().step()
            raise ArithmeticError("in the middle")

    parameter = torch.ones(3, requires_grad=True)
    monkeypatch.setattr(torch.optim, "Breaks", Breaks, raising=False)
    optimizer = OwnedOptimizer("Breaks", {"x": parameter}, {"lr": 0.1, "momentum": 0.9})
    with pytest.raises(ArithmeticError):
        optimizer.prepare({parameter: torch.ones(3)})
    optimizer.abort()
    assert parameter.tolist() == [1, 1, 1]
    assert not optimizer._optimizer.state


@pytest.mark.parametrize(
    ("kind", "options", "text"),
    [
        (SGD, {"lr": -1.0}, "Invalid learning rate"),
        (SGD, {"speed": 1}, "unexpected keyword argument"),
    ],
)
def test_an_error_in_building_an_optimizer_names_the_owners(
    ranks: Ranks, kind: Any, options: dict[str, Any], text: str
) -> None:
    layers = [ranks[0][rank].module("layer") for rank in (1, 2)]
    with pytest.raises(ExceptionGroup, match="cannot be built") as raised:
        remote.DistributedOptimizer(kind, remote.parameters(*layers), **options)
    assert [(str(error)[:6], text in str(error)) for error in raised.value.exceptions] == [
        ("rank 1", True),
        ("rank 2", True),
    ]


def test_only_the_optimizers_of_torch_are_built(ranks: Ranks) -> None:
    class Own(SGD):
        pass

    layer = ranks[0][1].module("layer")
    with pytest.raises(remote.CallRefused, match=r"torch\.optim has no optimizer 'Own'"):
        remote.DistributedOptimizer(Own, remote.parameters(layer), lr=0.1)
    with pytest.raises(ValueError, match="remote_parameters is empty"):
        remote.DistributedOptimizer(SGD, [], lr=0.1)
    Own.__name__ = "SGD"
    with pytest.raises(ValueError, match=r"is not in torch\.optim"):
        remote.DistributedOptimizer(Own, remote.parameters(layer), lr=0.1)


def test_a_step_without_gradients_is_an_error(ranks: Ranks) -> None:
    offset, layer = ranks[0][1].module("offset"), ranks[0][1].module("layer")
    optimizer = remote.DistributedOptimizer(SGD, remote.parameters(layer), lr=0.1)
    with remote.context() as step:
        step.backward(offset(batch(0)).sum())
        with pytest.raises(ExceptionGroup) as raised:
            optimizer.step(step)
    assert "has no gradients of these parameters" in str(raised.value.exceptions[0])


def test_a_backward_pass_uses_the_weights_of_its_forward_pass(ranks: Ranks) -> None:
    """Although another rank's step comes between them."""
    x = batch(0).requires_grad_()
    product = ranks[0][1].module("product")
    theirs = ranks[2][1].module("product")
    optimizer = remote.DistributedOptimizer(SGD, remote.parameters(theirs), lr=1.0)
    with remote.context() as mine:
        output = product(x)
        with ThreadPoolExecutor(1) as pool:

            def work() -> None:
                with remote.context() as step:
                    step.backward(theirs(torch.ones(5, 4)).sum())
                    optimizer.step(step)

            pool.submit(work).result()
        mine.backward(output.sum())
        torch.testing.assert_close(mine.gradients()[x], torch.ones(5, 4))
        torch.testing.assert_close(product(torch.ones(4)), torch.full((4,), -4.0))


def test_steps_of_all_ranks_on_the_same_owners_run_one_after_the_other(ranks: Ranks) -> None:
    """Four coordinators, two of them at one rank, step different sets of owners 15 times each."""
    together = threading.Barrier(4, timeout=60)
    sets = ((0, (0, 1, 2)), (1, (2, 1)), (2, (0, 2)), (2, (1,)))

    def work(number: int) -> None:
        rank, owners = sets[number]
        offsets = [ranks[rank][owner].module("offset") for owner in owners]
        optimizer = remote.DistributedOptimizer(SGD, remote.parameters(*offsets), lr=1.0)
        together.wait()
        for _ in range(15):
            with remote.context() as step:
                step.backward(torch.stack([10.0**number * offset(torch.zeros(4)) for offset in offsets]).sum())
                optimizer.step(step)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    for owner in range(3):
        total = 15 * sum(10.0**number for number, (_, owners) in enumerate(sets) if owner in owners)
        torch.testing.assert_close(values(ranks, "offset", owner)[0], torch.full((4,), -total))


def test_the_end_of_a_context_in_the_middle_of_a_step_undoes_it(ranks: Ranks) -> None:
    owner, offset = ranks[0][1], ranks[0][1].module("offset")
    optimizer = remote.DistributedOptimizer(SGD, remote.parameters(offset), lr=1.0)
    with remote.context() as step:
        step.backward(offset(torch.zeros(4)).sum())
        number = step.begun().number
        key = int(optimizer._optimizers[owner].key)
        assert owner.ask(requests.Prepare(context=number, optimizer=key)).result()
    with remote.context() as step:
        step.backward(offset(torch.zeros(4)).sum())
        optimizer.step(step)
    torch.testing.assert_close(values(ranks, "offset", 1)[0], torch.full((4,), -1.0))


@pytest.mark.parametrize("phase", ["commit", "abort", "prepare"])
def test_phases_in_a_wrong_order_change_nothing(ranks: Ranks, phase: str) -> None:
    owner, offset = ranks[0][1], ranks[0][1].module("offset")
    optimizer = remote.DistributedOptimizer(SGD, remote.parameters(offset), lr=1.0)
    with remote.context() as step:
        step.backward(offset(torch.zeros(4)).sum())
        number, key = step.begun().number, int(optimizer._optimizers[owner].key)
        if phase == "abort":
            owner.ask(requests.Abort(context=number, optimizer=key)).result()
        else:
            wrong = (
                requests.Commit(context=number, optimizer=key)
                if phase == "commit"
                else requests.Prepare(context=5, optimizer=key)
            )
            with pytest.raises(remote.RemoteError):
                owner.ask(wrong).result()
        optimizer.step(step)
    torch.testing.assert_close(values(ranks, "offset", 1)[0], torch.full((4,), -1.0))


def test_two_optimizers_in_one_step_do_not_undo_each_other(ranks: Ranks) -> None:
    offsets = [ranks[0][rank].module("offset") for rank in (1, 2)]
    optimizers = [remote.DistributedOptimizer(SGD, remote.parameters(*offsets), lr=1.0) for _ in range(2)]
    with ThreadPoolExecutor(2) as pool:
        for _ in range(10):
            with remote.context() as step:
                step.backward(torch.stack([offset(torch.zeros(4)) for offset in offsets]).sum())
                list(pool.map(lambda optimizer: optimizer.step(step), optimizers))
    torch.testing.assert_close(values(ranks, "offset", 1, 2), [torch.full((4,), -20.0)] * 2)


def test_a_context_that_ends_while_its_step_is_prepared_lets_others_step(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = Service(0, 3, {"offset": Offset()}, collect(()), cast(Any, None))

    def ask(rank: int, request: Any) -> dict[str, Any]:
        job, _ = owner.accept(rank, outgoing(requests.content_of(request), ()))
        assert job is not None
        content: dict[str, Any] = job().content
        return content

    made = requests.Create(
        kind="SGD", parameters=[requests.Place(target="offset", name="offset")], options={"dict": {"lr": 1.0}}
    )
    keys = [ask(rank, made)["value"] for rank in (1, 2)]
    contexts = [(rank << 48) | 1 for rank in (1, 2)]
    for context in contexts:
        owner.contexts.enter(context)
    acquire = owner._acquire

    def acquired(context: int, *, wait: bool) -> bool:
        held = acquire(context, wait=wait)
        owner.contexts.end(context)
        owner.undo(context)
        return held

    monkeypatch.setattr(owner, "_acquire", acquired)
    assert ask(1, requests.Prepare(context=contexts[0], optimizer=keys[0]))["error"]["reason"] == "not_locked"
    monkeypatch.undo()
    # It steps, and finds nothing to do.
    assert ask(2, requests.Prepare(context=contexts[1], optimizer=keys[1]))["error"]["reason"] == "no_gradients"


def test_a_step_can_end_while_many_others_wait(ranks: Ranks) -> None:
    owner, offset = ranks[0][1], ranks[0][1].module("offset")
    optimizer = remote.DistributedOptimizer(SGD, remote.parameters(offset), lr=1.0)
    number = int(optimizer._optimizers[owner].key)
    with remote.context() as first, remote.context() as second:
        first.backward(remote_in(first, offset).sum())
        remote_in(second, offset)
        one, other = (step.begun().number for step in (first, second))
        assert owner.ask(requests.Prepare(context=one, optimizer=number)).result(60)
        waiting = [owner.ask(requests.Lock(context=other)) for _ in range(_MAX_RUNNING)]
        owner.ask(requests.Commit(context=one, optimizer=number)).result(60)
        assert all(future.result(60) for future in waiting)
    torch.testing.assert_close(values(ranks, "offset", 1), [torch.full((4,), -1.0)])


def remote_in(step: remote.Step, module: remote.Reference) -> Tensor:
    """Call a module within a step, which need not be the innermost."""
    with inside(step):
        output: Tensor = module(torch.zeros(4))
    return output
