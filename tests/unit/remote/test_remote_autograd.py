"""Graphs over ranks: gradients equal those of one process, belong to their context, and are freed with it."""

import gc
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from tests import remote_functions
from tests.remote_functions import Scaled, Through
from tests.remote_ranks import serving
from torch import Tensor, nn

from fedring import remote
from fedring.remote.contexts import Contexts, Record, begun_by

F = "tests.remote_functions:"
Ranks = list[remote.Owners]


class Inplace(nn.Module):
    """Layers whose activations write to their inputs, and whose outputs are saved."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            Scaled(9).linear, nn.ReLU(inplace=True), nn.Linear(4, 4), nn.LeakyReLU(inplace=True)
        )
        for parameter in self.layers[2].parameters():
            nn.init.constant_(parameter, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x).exp()
        return result


class Several(nn.Module):
    """Two outputs, one of which nobody may use, beside numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scaled(1), Scaled(2)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Any]:
        return {"first": self.first(x) * mask, "second": (self.second(x), 7), "indices": x.argmax(dim=1)}


def recurrent() -> tuple[nn.Embedding, nn.LSTM, nn.Linear]:
    """Return the parts of a language model of nine words."""
    torch.manual_seed(0)
    return nn.Embedding(9, 4), nn.LSTM(4, 6, num_layers=2), nn.Linear(6, 9)


def modules(rank: int) -> dict[str, nn.Module]:
    return {
        "embed": recurrent()[0],
        "lstm": recurrent()[1],
        "layer": Scaled(rank),
        "inplace": Inplace(),
        "several": Several(),
        "through": Through(Scaled(10 + rank)),
        **WRONG,
    }


WRONG = {"wrong": nn.Sequential(Scaled(1), nn.ReLU(inplace=True))}  # tanh needs the output that ReLU overwrites


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with serving(3, modules) as owners:
        yield owners


@pytest.fixture(autouse=True)
def _nothing_is_left(ranks: Ranks) -> Iterator[None]:
    """Check that each test's contexts are freed at all owners."""
    yield
    patience = threading.Event()
    contexts = [owners[owners.rank].agent.service.contexts for owners in ranks]
    for _ in range(300):
        if not any(map(len, contexts)):
            return
        patience.wait(0.1)
    pytest.fail(f"contexts are left: {[len(one) for one in contexts]}")


def batch(seed: int = 0, size: int = 5) -> Tensor:
    return torch.randn(size, 4, generator=torch.Generator().manual_seed(seed))


def grads(module: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.grad for name, parameter in module.named_parameters() if parameter.grad is not None}


def close(found: Any, expected: Any) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("to", [(1, 2), (1, 1), (0, 1), (0, 0)])
def test_gradients_equal_those_of_one_process(ranks: Ranks, to: tuple[int, int]) -> None:
    first, second = (ranks[0][rank].module("layer") for rank in to)
    head, alone = Scaled(7), (Scaled(to[0]), Scaled(to[1]), Scaled(7))
    if to[0] == to[1]:
        alone = (alone[0], alone[0], alone[2])
    with remote.context() as step:
        loss = head(second(first(batch()))).square().mean()
        step.backward(loss)
        expected = alone[2](alone[1](alone[0](batch()))).square().mean()
        expected.backward()
        close(loss, expected)
        close(remote.gradients(step, first), grads(alone[0]))
        close(remote.gradients(step, second), grads(alone[1]))
        close([step.gradients()[p] for p in head.parameters()], list(grads(alone[2]).values()))
    assert all(parameter.grad is None for parameter in head.parameters())


def test_inputs_that_require_gradients_get_theirs(ranks: Ranks) -> None:
    x, twin = batch().requires_grad_(), batch().requires_grad_()
    with remote.context() as step:
        step.backward((ranks[0][1].module("layer")(2 * x) * x).sum())
        (Scaled(1)(2 * twin) * twin).sum().backward()
        close(step.gradients()[x], twin.grad)
        assert x.grad is None


def test_layers_that_work_in_place_and_dropped_outputs(ranks: Ranks) -> None:
    with remote.context() as step:
        inplace, several = ranks[0][1].module("inplace"), ranks[0][2].module("several")
        answer = several(inplace(batch()), mask=torch.ones(5, 4, dtype=torch.bool))
        assert (answer["second"][1], answer["indices"].dtype) == (7, torch.int64)
        step.backward(answer["first"].sum())
        one, two = Inplace(), Several()
        two(one(batch()), torch.ones(5, 4, dtype=torch.bool))["first"].sum().backward()
        close(remote.gradients(step, inplace), grads(one))
        close(remote.gradients(step, several), grads(two))


def test_a_recurrent_model_is_divided_over_two_owners(ranks: Ranks) -> None:
    """The embedding is at rank 1, the LSTM at rank 2, the last layer here; the state passes from call to call."""
    embed, lstm, words = recurrent()
    remote_embed, remote_lstm = ranks[0][1].module("embed"), ranks[0][2].module("lstm")
    text = torch.randint(9, (6, 3), generator=torch.Generator().manual_seed(1))
    losses = []
    with remote.context() as step:
        for one, two in ((embed, lstm), (remote_embed, remote_lstm)):
            state = None
            outputs = []
            for piece in torch.split(text, 2):
                output, state = two(one(piece), state)
                outputs.append(words(output))
            losses.append(nn.functional.cross_entropy(torch.cat(outputs).flatten(0, 1), text.flatten()))
        losses[0].backward()  # type: ignore[no-untyped-call]  # torch's
        step.backward(losses[1])
        close(losses[1], losses[0])
        close(remote.gradients(step, remote_embed), grads(embed))
        close(remote.gradients(step, remote_lstm), grads(lstm))
        close([step.gradients()[parameter] for parameter in words.parameters()], list(grads(words).values()))


def test_a_tensor_that_was_changed_in_place_is_noticed_as_in_one_process(ranks: Ranks) -> None:
    with remote.context() as step, pytest.raises(remote.RemoteError, match=r"shape \[5, 4\] .* was changed in place"):
        step.backward(ranks[0][1].module("wrong")(batch()).sum())


def test_a_graph_passes_through_an_owner_that_calls_another(ranks: Ranks) -> None:
    """Rank 0 calls rank 1, whose forward calls rank 2, whose forward calls rank 0."""
    held = [owners[owners.rank].agent.service.holdings for owners in ranks]
    for rank, name, to in ((1, "through", 2), (2, "layer", 0)):
        held[rank].get(rank, "through").next = ranks[rank][to].module("through" if to == 2 else name)
    with remote.context() as step:
        through = ranks[0][1].module("through")
        loss = through(batch()).square().sum()
        step.backward(loss)
        layers = {1: Scaled(11), 2: Scaled(12), 0: Scaled(0)}
        middle = layers[2](layers[0](layers[2](layers[1](batch()))))
        expected = layers[1](middle).square().sum()
        expected.backward()
        close(loss, expected)
        close({name.removeprefix("own."): g for name, g in remote.gradients(step, through).items()}, grads(layers[1]))
        other = remote.gradients(step, ranks[0][2].module("through"))
        close({name.removeprefix("own."): g for name, g in other.items()}, grads(layers[2]))
        close(remote.gradients(step, ranks[0][0].module("layer")), grads(layers[0]))


def test_a_tensor_that_is_fetched_gets_its_gradient(ranks: Ranks) -> None:
    """As in the example of torch.distributed.optim: the sum of two tensors of another rank."""
    one, two = (ranks[0][1].remote(F + "random_tensor", seed) for seed in (1, 2))
    with remote.context() as step:
        step.backward((one.fetch() + 2 * two.fetch()).sum())
        close(remote.gradients(step, one), {"": torch.ones(3, 3)})
        close(remote.gradients(step, two), {"": torch.full((3, 3), 2.0)})


def test_calls_that_run_at_once_are_in_one_graph(ranks: Ranks) -> None:
    layers = [ranks[0][rank].module("layer") for rank in (1, 2)]
    with remote.context() as step:
        outputs = [layer.call_async("__call__", batch()) for layer in layers]
        step.backward(torch.stack([output.result(60) for output in outputs]).sum())
        for rank, layer in zip((1, 2), layers, strict=True):
            alone = Scaled(rank)
            alone(batch()).sum().backward()
            close(remote.gradients(step, layer), grads(alone))


def test_gradients_add_up_within_a_context_and_not_across_contexts(ranks: Ranks) -> None:
    layer = ranks[0][1].module("layer")
    with remote.context() as outer:
        outer.backward(layer(batch()).sum())
        once = remote.gradients(outer, layer)
        with remote.context() as inner:
            inner.backward(layer(batch(1)).sum())
        outer.backward(layer(batch()).sum())
        close(remote.gradients(outer, layer), {name: 2 * gradient for name, gradient in once.items()})


def test_a_second_backward_needs_the_graph_of_the_first(ranks: Ranks) -> None:
    layer = ranks[0][1].module("layer")
    with remote.context() as step:
        loss = layer(batch()).sum()
        step.backward(loss, retain_graph=True)
        once = remote.gradients(step, layer)
        step.backward(loss)
        close(remote.gradients(step, layer), {name: 2 * gradient for name, gradient in once.items()})
        output = layer(batch())
        step.backward(output.sum())
        with pytest.raises(remote.RemoteError, match="without retain_graph=True has used it") as raised:
            step.backward((2 * output).sum())
        assert raised.value.reason == "no_graph"


def test_four_callers_at_once_have_their_own_gradients(ranks: Ranks) -> None:
    together = threading.Barrier(4, timeout=60)

    def work(number: int) -> None:
        layer = ranks[number % 3][1].module("layer")
        for turn in range(5):
            with remote.context() as step:
                together.wait()
                output = layer(batch(10 * number + turn))
                together.wait()
                step.backward(output.sum())
                together.wait()
                alone = Scaled(1)
                alone(batch(10 * number + turn)).sum().backward()
                close(remote.gradients(step, layer), grads(alone))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))


def test_outside_of_a_context_and_without_gradients_no_graph_is_kept(ranks: Ranks) -> None:
    layer = ranks[0][1].module("layer")
    assert not layer(batch()).requires_grad
    with remote.context() as step:
        with torch.no_grad():
            assert not layer(batch()).requires_grad
        with pytest.raises(remote.CallRefused, match="no remote call was made"):
            step.backward(torch.ones((), requires_grad=True))
        layer(batch())
        with pytest.raises(remote.CallRefused, match="does not depend on anything"):
            step.backward(torch.ones(()))


def test_an_error_frees_the_context_at_all_owners(ranks: Ranks) -> None:
    contexts = ranks[1][1].agent.service.contexts
    sizes = []

    def work() -> None:
        with remote.context() as step:
            output = ranks[0][1].module("layer")(batch())
            sizes.append(contexts.get(step.begun().number).size)
            step.backward(output.sum())
            sizes.append(contexts.get(step.begun().number).size)
            ranks[0][2].module("layer")(torch.ones(2, 3))

    with pytest.raises(remote.RemoteError, match="mat1 and mat2"):
        work()
    assert sizes == [(1, 0), (0, 2)]  # graphs and gradients; afterwards see _nothing_is_left


def test_a_call_that_ends_after_its_context_keeps_nothing(ranks: Ranks) -> None:
    remote_functions.EVENTS["late"] = event = threading.Event()
    with remote.context():
        late = ranks[0][1].call_async(F + "late_square", torch.ones(2, requires_grad=True), "late")
    event.set()
    output = late.result(60)
    with pytest.raises(remote.CallRefused, match="has ended"):
        output.sum().backward()


def test_a_reference_cannot_lose_gradients_silently(ranks: Ranks) -> None:
    for argument in (torch.ones(2, requires_grad=True), [torch.ones(2, requires_grad=True)]):
        with remote.context(), pytest.raises(remote.RemoteError, match="a reference would lose them") as raised:
            ranks[0][1].remote(F + "late_square", argument).wait()
        assert raised.value.reason == "history"


def test_outputs_do_not_outlive_their_caller(ranks: Ranks) -> None:
    """Graphs with remote calls leave no circles that nothing collects."""
    x = batch().requires_grad_()
    with remote.context():
        output = ranks[0][1].module("layer")(x)
    gone = weakref.ref(output)
    del output
    gc.collect()
    assert gone() is None


def test_a_context_belongs_to_one_group(ranks: Ranks) -> None:
    with remote.context():
        ranks[0][1].module("layer")(batch())
        with pytest.raises(remote.CallRefused, match="belongs to one group"):
            ranks[1][2].module("layer")(batch())


def test_a_context_that_has_ended_keeps_nothing_and_does_not_begin_again() -> None:
    contexts = Contexts(rank=3, size=4)
    context = contexts.begin()
    x = torch.ones(2, requires_grad=True)
    context.keep(Record([x * x], [x]))
    context.backward([x.sum()], None)
    context.calling(1)
    assert (context.size, begun_by(context.number), len(contexts)) == ((1, 1), 3, 1)
    assert contexts.end(context.number) == {1}
    context.keep(Record([x * x], [x]))
    assert (context.size, len(contexts)) == ((0, 0), 0)
    with pytest.raises(remote.CallRefused, match="has ended"):
        contexts.enter(context.number)
    with pytest.raises(remote.CallRefused, match="has ended"):
        context.calling(1)
    with pytest.raises(remote.CallRefused, match="no rank can have begun"):
        contexts.enter((4 << 48) | 1)
    of_another = (2 << 48) | 1
    assert contexts.enter(of_another) is contexts.enter(of_another)
    contexts.end_all(lambda rank: rank == 2)
    assert len(contexts) == 0
