"""Calls between ranks: results, references, errors, limits."""

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from itertools import pairwise
from typing import Any

import pytest
import torch
from tests import remote_functions
from tests.remote_functions import Scaled
from tests.remote_ranks import TRUSTED, serving, serving_on
from tests.ring_groups import WAIT, ring_groups
from torch import nn
from torch._C._distributed_c10d import HashStore
from torch.optim import SGD

from fedring import remote
from fedring.remote import requests
from fedring.remote.messages import Message
from fedring.remote.service import MAX_CALLS, MAX_ELSEWHERE
from fedring.remote.values import Handle
from fedring.ring import NotSupported, PeerLost, RingError, RingProcessGroup

F = "tests.remote_functions:"
Ranks = list[remote.Owners]


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with serving(3, lambda rank: {"layer": Scaled(rank)}) as owners:
        yield owners


def wait_until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds that other threads bring about."""
    waited = threading.Event()
    for _ in range(600):
        if condition():
            return
        waited.wait(0.1)
    pytest.fail("the condition does not hold after 60 s")


@pytest.mark.parametrize("to", [0, 1, 2])
def test_a_call_returns_what_the_function_returns(ranks: Ranks, to: int) -> None:
    tensor = torch.arange(6).view(2, 3)
    (args, kwargs) = ranks[0][to].call(F + "echo", 1, [2.5, None], (True, "x"), {"a": tensor}, k=tensor.t())
    assert args[:3] == (1, [2.5, None], (True, "x"))
    torch.testing.assert_close([args[3]["a"], kwargs["k"]], [tensor, tensor.t()])


def test_arguments_may_have_any_names(ranks: Ranks) -> None:
    names = {"method": "m", "function": "f", "self": "s"}
    assert ranks[0][1].call(F + "keywords", 1, **names) == [1, "m", "f", "s"]
    assert ranks[0][1].module("layer").call("named", torch.ones(4), method="m")[1] == "m"


def test_every_rank_calls_every_rank_at_once(ranks: Ranks) -> None:
    futures = {
        (a, b, n): ranks[a][b].call_async(F + "echo", a, b, n) for a in range(3) for b in range(3) for n in range(20)
    }
    for numbers, future in futures.items():
        assert future.result(60)[0] == numbers


def test_calls_that_wait_do_not_keep_others_waiting(ranks: Ranks) -> None:
    remote_functions.EVENTS["go"] = event = threading.Event()
    waiting = [ranks[0][1].call_async(F + "wait_for", "go") for _ in range(5)]
    assert ranks[0][1].call(F + "echo", 1) == [(1,), {}]
    assert not any(future.done() for future in waiting)
    event.set()
    assert [future.result(60) for future in waiting] == ["go"] * 5


def test_a_rank_with_too_many_calls_is_refused_and_others_are_not(ranks: Ranks) -> None:
    remote_functions.EVENTS["many"] = event = threading.Event()
    waiting = [ranks[0][1].call_async(F + "wait_for", "many") for _ in range(MAX_CALLS)]
    with pytest.raises(remote.RemoteError, match="wait for some of them") as raised:
        ranks[0][1].call(F + "echo", 1)
    assert raised.value.reason == "overloaded"
    assert ranks[2][1].call(F + "echo", 1) == [(1,), {}]
    event.set()
    assert {future.result(60) for future in waiting} == {"many"}


@pytest.mark.parametrize("to", [0, 1])
def test_an_error_has_the_owner_the_type_the_text_and_the_traceback(ranks: Ranks, to: int) -> None:
    with pytest.raises(remote.RemoteError, match=f"rank {to}: ArithmeticError: too much") as raised:
        ranks[0][to].call(F + "fail", "too much")
    error = raised.value
    assert (error.owner, error.type_name, error.reason) == (f"rank {to}", "ArithmeticError", "remote_failed")
    assert "remote_functions.py" in error.__notes__[0]


@pytest.mark.parametrize(("kind", "text"), [("OddReason", "odd"), ("NoText", "cannot be described")])
def test_an_error_of_any_class_is_answered(ranks: Ranks, kind: str, text: str) -> None:
    with pytest.raises(remote.RemoteError, match=f"rank 1: {kind}: .*{text}") as raised:
        ranks[0][1].call_async(F + "fail_with", kind).result(30)
    assert raised.value.reason == "remote_failed"


def test_a_call_that_is_under_way_cannot_be_cancelled(ranks: Ranks) -> None:
    remote_functions.EVENTS["kept"] = event = threading.Event()
    future = ranks[0][1].call_async(F + "wait_for", "kept")
    assert not future.cancel()
    event.set()
    assert future.result(60) == "kept"


def test_more_references_than_a_message_can_name_are_dropped_at_once(ranks: Ranks) -> None:
    agent = ranks[0][0].agent
    for number in range(200_000):
        agent.drop(Handle(1, 2**40 + number))
    wait_until(lambda: not agent._dropped)
    assert ranks[1][0].call_async(F + "echo", 1).result(60) == [(1,), {}]


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        *((name, "not_offered") for name in ("os:getcwd", "builtins:eval", "tests.remote_functions_more:x")),
        *((F + name, "not_offered") for name in ("_hidden", "torch", "nothing", "Tensor", "run_anything")),
        *((F + "random_bytes", "not_offered"), (F + "unmarked", "not_offered")),
        *((F + "Scaled.scaled", "bad_name"), ("getcwd", "bad_name"), ("", "unknown_module")),
    ],
)
def test_only_marked_functions_are_called(ranks: Ranks, function: str, reason: str) -> None:
    with pytest.raises(remote.RemoteError) as raised:
        ranks[0][1].call(function)
    assert raised.value.reason == reason


@pytest.mark.parametrize(
    "method",
    [
        *(
            "_hidden",
            "__init__",
            "__class__",
            "linear",
            "nothing",
            "state_dict",
            "load_state_dict",
            "training",
            "forward",
        ),
        *("share_memory", "register_module", "unmarked", ""),
    ],
)
def test_only_marked_methods_are_called(ranks: Ranks, method: str) -> None:
    layer = ranks[0][1].module("layer")
    with pytest.raises(remote.RemoteError, match=r"offers no method .*, but named, scaled: mark it") as raised:
        layer.call(method)
    assert raised.value.reason == "not_offered"
    x = torch.ones(2, 4)
    torch.testing.assert_close(layer.call("scaled", x, by=2.0), 2 * Scaled(1)(x).detach())


def test_a_served_module_can_be_called_although_nothing_is_trusted() -> None:
    with serving(2, lambda rank: {"layer": nn.Linear(2, 2)}, trusted=[]) as ranks:
        assert ranks[0][1].module("layer")(torch.ones(2)).shape == (2,)
        with pytest.raises(remote.RemoteError, match="there is layer") as raised:
            ranks[0][1].module("other")(1)
        assert raised.value.reason == "unknown_module"


def test_a_value_stays_at_its_owner_and_is_used_there(ranks: Ranks) -> None:
    made = ranks[0][1].remote(F + "Scaled", 5)
    x = torch.ones(3, 4)
    torch.testing.assert_close(made(x), Scaled(5)(x).detach())
    tensor = ranks[0][1].remote(F + "random_tensor", 3)
    ((fetched,), _) = ranks[0][1].call(F + "echo", tensor)
    torch.testing.assert_close(fetched, tensor.fetch())
    with pytest.raises(remote.RemoteError, match="a reference to what rank 1 holds cannot be a result"):
        ranks[0][2].call(F + "echo", tensor)
    with pytest.raises(remote.RemoteError, match="a Scaled cannot be sent"):
        made.fetch()


def test_a_reference_is_there_before_its_value(ranks: Ranks) -> None:
    remote_functions.EVENTS["value"] = event = threading.Event()
    made = ranks[0][1].remote(F + "wait_for", "value")
    assert repr(made) == "<reference without a value at rank 1>"
    event.set()
    assert made.fetch() == "value"
    assert made.wait() is made
    assert ranks[0][1].call(F + "echo", made) == [("value",), {}]


@pytest.mark.parametrize("to", [0, 1])
def test_the_error_of_a_call_arrives_when_its_reference_is_used(ranks: Ranks, to: int) -> None:
    made = ranks[0][to].remote(F + "fail", "too much")
    uses: list[Callable[[], Any]] = [
        *(made.wait, made.fetch, lambda: made(1), lambda: made.call_async("scaled")),
        *(lambda: ranks[0][to].call(F + "echo", made), lambda: ranks[0][2].call_async(F + "echo", [made])),
        lambda: remote.parameters(made),
    ]
    for use in uses:
        with pytest.raises(remote.RemoteError, match=f"rank {to}: ArithmeticError: too much"):
            use()
    with pytest.raises(remote.RemoteError) as raised:
        ranks[0][to].remote("os:getcwd").wait()
    assert raised.value.reason == "not_offered"


@pytest.mark.parametrize("holder", [0, 1])
def test_a_third_rank_uses_what_it_was_handed_until_it_drops_it(ranks: Ranks, holder: int) -> None:
    gc.collect()
    held = ranks[holder][holder].agent.service.holdings
    wait_until(lambda: len(held) == 0)
    tensor = ranks[0][holder].remote(F + "random_tensor", 3)
    value = tensor.fetch()
    ranks[0][2].call(F + "keep", "mine", {"handed": [tensor]})
    assert len(held) == 2
    first = weakref.ref(tensor)
    del tensor
    gc.collect()
    assert first() is None
    wait_until(lambda: len(held) == 1)  # the third rank's own
    torch.testing.assert_close(ranks[0][2].call(F + "fetch_kept", "mine"), value)
    # The third rank hands it on, and back to where it came from.
    kept = remote_functions.KEPT["mine"]["handed"][0]
    assert kept.owner.agent is ranks[2][2].agent
    ranks[2][1].call(F + "keep", "next", {"handed": [kept]})
    remote_functions.KEPT.pop("mine")
    del kept
    gc.collect()
    torch.testing.assert_close(ranks[0][1].call(F + "fetch_kept", "next"), value)
    remote_functions.KEPT.clear()
    gc.collect()
    wait_until(lambda: len(held) == 0)


def test_gradients_flow_through_a_module_that_was_handed_to_a_third_rank(ranks: Ranks) -> None:
    x = torch.ones(2, 4, requires_grad=True)
    for layer, alone in (
        (ranks[0][1].remote(F + "Scaled", 5), Scaled(5)),
        (ranks[0][1].module("layer"), Scaled(1)),
    ):
        with remote.context() as step:
            step.backward(ranks[0][2].call(F + "apply", layer, x).sum())
            found = remote.gradients(step, layer)["linear.weight"]
        alone(x.detach()).sum().backward()
        torch.testing.assert_close(found, alone.linear.weight.grad)


@pytest.mark.parametrize(
    ("elsewhere", "reason"),
    [
        *(([1, 5], "unknown_reference"), ([1, 2**62], "unknown_reference"), ([1, "nothing"], "unknown_module")),
        *(([2, 5], "bad_message"), ([3, 5], "bad_message"), ([-1, 5], "bad_message"), ([1, -5], "bad_message")),
        *(([1, 2**63], "bad_message"), ([1, "x" * 1001], "bad_message"), ([1], "bad_message")),
        *(([True, 5], "bad_message"), ([1, None], "bad_message"), ({"reference": 5}, "bad_message")),
    ],
    ids=lambda value: repr(value)[:30],
)
def test_a_reference_that_nobody_was_given_is_refused(ranks: Ranks, elsewhere: Any, reason: str) -> None:
    call = requests.Call(function=F + "fetch", arguments=[[{"elsewhere": elsewhere}], {"dict": {}}])
    with pytest.raises(remote.RemoteError) as raised:
        ranks[0][2].ask(call).result(60)
    assert raised.value.reason == reason, raised.value


def test_a_call_names_only_so_many_references_to_other_ranks(ranks: Ranks) -> None:
    tensor = ranks[0][1].remote(F + "random_tensor", 3)
    many = requests.Call(
        function=F + "fetch", arguments=[[[{"elsewhere": [1, tensor.key]}] * (MAX_ELSEWHERE + 1)], {"dict": {}}]
    )
    with pytest.raises(remote.RemoteError, match="more than 1000 references to other ranks"):
        ranks[0][2].ask(many).result(60)
    gc.collect()
    wait_until(lambda: len(ranks[1][1].agent.service.holdings) == 1)


def test_numbers_of_references_tell_nothing_of_others(ranks: Ranks) -> None:
    made = [ranks[0][1].remote(F + "random_tensor", seed) for seed in range(20)]
    numbers = sorted(int(one.key) for one in made)
    assert len(set(numbers)) == 20
    assert min(after - before for before, after in pairwise(numbers)) > 2**32


def test_a_reference_belongs_to_the_rank_that_made_it(ranks: Ranks) -> None:
    tensor = ranks[0][1].remote(F + "random_tensor", 3)
    with pytest.raises(remote.RemoteError) as raised:
        ranks[2][1].fetch(tensor.key)
    assert raised.value.reason == "unknown_reference"


@pytest.mark.parametrize("to", [0, 1])
def test_what_nobody_refers_to_any_more_is_dropped(ranks: Ranks, to: int) -> None:
    gc.collect()
    held = ranks[to][to].agent.service.holdings
    wait_until(lambda: len(held) == 0)
    kept, dropped = (ranks[0][to].remote(F + "random_tensor", seed) for seed in (1, 2))
    future = ranks[0][to].call_async(F + "echo", dropped)
    del dropped
    assert future.result(60)[0][0].shape == (3, 3)
    del future
    gc.collect()
    wait_until(lambda: len(held) == 1)
    assert kept.fetch().shape == (3, 3)


def test_a_rank_that_leaves_with_an_error_ends_the_generation_everywhere() -> None:
    with ring_groups(2) as groups:
        one, other = (remote.serve(group=group) for group in groups)
        owners, _ = one.__enter__(), other.__enter__()
        assert not other.__exit__(KeyError, KeyError("mine"), None)
        with pytest.raises(RingError, match=r"rank 1 has left fedring\.remote with KeyError: 'mine'"):
            owners[1].call(F + "echo")
        with pytest.raises(RingError, match="rank 1 has left"):
            one.__exit__(None, None, None)


def test_blocks_can_follow_each_other_on_one_group() -> None:
    with ring_groups(2) as groups:
        for number in range(3):
            with serving_on(groups) as ranks:
                assert ranks[0][1].call(F + "echo", number) == [(number,), {}]


def test_a_group_of_some_ranks_has_ranks_of_its_own() -> None:
    with ring_groups(3) as groups:
        some = [RingProcessGroup(groups[rank].world, HashStore(), [1, 2], name="some", timeout=WAIT) for rank in (1, 2)]
        with serving_on(some, lambda rank: {"layer": Scaled(rank)}) as ranks:
            assert [owners.rank for owners in ranks] == [0, 1]
            torch.testing.assert_close(ranks[0][1].module("layer")(torch.ones(4)), Scaled(1)(torch.ones(4)).detach())


def test_what_a_rank_had_is_freed_when_it_leaves_and_the_others_go_on() -> None:
    with ring_groups(3) as groups, ExitStack() as stack:
        blocks = [
            remote.serve({"layer": Scaled(rank)}, trusted=TRUSTED, group=group) for rank, group in enumerate(groups)
        ]
        ranks = [stack.push(block).__enter__() for block in blocks]
        service = ranks[0][0].agent.service
        kept = ranks[2][0].remote(F + "random_tensor", 1)
        optimizer = remote.DistributedOptimizer(SGD, remote.parameters(kept), lr=0.1)
        with remote.context() as step:
            step.backward(kept.fetch().sum())
            request = requests.Prepare(
                context=step.begun().number, optimizer=int(optimizer._optimizers[ranks[2][0]].key)
            )
            assert ranks[2][0].ask(request).result()
            assert (len(service.contexts), len(service.holdings)) == (1, 2)
            groups[2].world.close()
            wait_until(lambda: (len(service.contexts), len(service.holdings)) == (0, 0))
        layer = ranks[1][0].module("layer")
        optimizer = remote.DistributedOptimizer(SGD, remote.parameters(layer), lr=0.1)
        with remote.context() as step:
            step.backward(layer(torch.ones(4)).sum())
            optimizer.step(step)  # the rank that has left has not kept the lock
        for block in blocks[:2]:
            with pytest.raises(RingError, match="rank 2"):
                block.__exit__(None, None, None)
        with suppress(RingError):
            blocks[2].__exit__(None, None, None)


def test_after_the_end_of_the_generation_everything_raises_what_has_ended_it() -> None:
    with ring_groups(2) as groups, ExitStack() as stack:
        blocks = [remote.serve({"layer": Scaled(1)}, group=group) for group in groups]
        ranks = [stack.push(block).__enter__() for block in blocks]
        layer = ranks[0][1].module("layer")
        optimizer = remote.DistributedOptimizer(SGD, remote.parameters(layer), lr=0.1)
        with remote.context() as step:
            output = layer(torch.ones(4))
            ranks[0][0].agent.fail(PeerLost("rank 1 is lost: it was a test", rank=1))
            for work in (
                lambda: layer(torch.ones(4)),
                lambda: step.backward(output.sum()),
                lambda: optimizer.step(step),
            ):
                with pytest.raises(PeerLost, match="rank 1 is lost"):
                    work()
        for block in blocks:
            with pytest.raises(PeerLost):
                block.__exit__(None, None, None)


def test_each_group_counts_its_own_blocks() -> None:
    with ring_groups(2) as groups:
        both = [RingProcessGroup(group.world, HashStore(), [0, 1], name="both", timeout=WAIT) for group in groups]
        one = RingProcessGroup(groups[1].world, HashStore(), [1], name="one", timeout=WAIT)
        with remote.serve(group=one):
            pass
        with serving_on(both) as ranks:
            assert ranks[0][1].call_async(F + "echo", 1).result(30) == [(1,), {}]


def test_a_group_of_one_rank_drops_references_and_ends() -> None:
    with serving(1) as ranks:
        for seed in range(5):
            ranks[0][0].remote(F + "random_tensor", seed)
        gc.collect()

        def dropped() -> bool:
            assert ranks[0][0].call(F + "echo") == [
                (),
                {},
            ]  # each message of a lone rank tells it of dropped references
            return len(ranks[0][0].agent.service.holdings) == 0

        wait_until(dropped)
    with pytest.raises(RingError, match="rank 0 does not serve any more"):
        ranks[0][0].call(F + "echo")


def test_one_name_is_not_a_list_of_names() -> None:
    with pytest.raises(ValueError, match="trusted='torch' is a string"), remote.serve(trusted="torch"):
        pass


class Liar:
    """An owner's agent that answers every request with the same value."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def name_of(self, rank: int) -> str:
        return "the liar"

    def request(self, rank: int, message: Message, context: Any = None) -> "Future[Message]":
        future: Future[Message] = Future()
        future.set_result(Message(self.value, [torch.ones(2)], [True]))
        return future


@pytest.mark.parametrize(
    "value",
    [
        *(None, 5, [], {"value": {"tensor": 1}}, {"value": {"reference": 1}}, {"record": -1}, {"more": 1}),
        *({"error": {"type": "E"}}, {"error": {"type": "E", "message": "x", "reason": "No Reason"}}, {"value": True}),
    ],
    ids=repr,
)
def test_an_answer_that_no_owner_gives_is_refused(value: Any) -> None:
    liar: Any = Liar(value)
    owner = remote.Owner(liar, 1)
    for work in (lambda: owner.remote(F + "echo").wait(), lambda: remote.parameters(owner.module("layer"))):
        with pytest.raises(remote.BadMessage, match=r"the liar|tensor|form"):
            work()


def test_a_group_of_another_backend_is_refused() -> None:
    with pytest.raises(NotSupported, match="is not a group of the backend fedring"), remote.serve():
        pass
