"""Whatever bytes a peer sends as a request: they end in one answer, and the owner goes on."""

import itertools
import json
import struct
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.remote_ranks import TRUSTED
from tests.ring_groups import ring_groups
from torch import nn

from fedring import remote
from fedring.remote.messages import Incoming, outgoing, receive, send
from fedring.remote.requests import Reply
from fedring.ring.engine.group import Group
from fedring.ring.engine.program import Expect, Program, Send
from fedring.ring.transport.frames import MAX_PAYLOAD

SECONDS = 60.0
MAX_BYTES = 1 << 16


class Peer:
    """A rank that speaks the protocol by hand. The other one is an owner."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._numbers = itertools.count()

    def ask(self, parts: list[bytes]) -> Reply:
        """Send the parts of a request, and return the answer."""
        number = next(self._numbers)
        self._group.start("a remote call", sending(parts), key=f"0>1?{number}", timeout=SECONDS).wait()
        incoming = Incoming(MAX_BYTES)
        self._group.start(
            "the reply to a remote call", receive(1, incoming), key=f"1>0!{number}", timeout=SECONDS
        ).wait()
        return Reply.model_validate(incoming.take().content)


def sending(parts: list[bytes]) -> Program:
    yield Expect({}, 0)
    yield Send(1, parts[0])
    for part, data in enumerate(parts[1:]):
        yield Send(1, data, 1, part)


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    with ring_groups(2) as groups, ExitStack() as stack:
        mine = groups[0].world.enter("0/remote/0", [0, 1])
        owner = remote.serve({"layer": nn.Linear(2, 2)}, trusted=TRUSTED, group=groups[1], max_message_bytes=MAX_BYTES)
        owner.__enter__()
        stack.callback(owner.__exit__, KeyboardInterrupt, KeyboardInterrupt(), None)
        yield Peer(mine)


def check(peer: Peer, parts: list[bytes]) -> Reply:
    """Send a request. Whatever the answer is, the owner must answer the next one rightly."""
    answer = peer.ask(parts)
    if answer.error is not None:
        assert answer.error.type
        assert len(answer.error.message) < 4001
    good = outgoing({"verb": "call", "function": "tests.remote_functions:echo", "arguments": [[1], {"dict": {}}]})
    echoed = peer.ask([bytes(step.data) for step in send(1, good) if isinstance(step, Send)])
    assert echoed.value == [{"tuple": [1]}, {"dict": {}}]
    return answer


def framed(header: bytes, parts: list[bytes], small: bytes = b"") -> list[bytes]:
    return [struct.pack("<4sII", b"FRC1", len(parts), len(header)) + header + small, *parts]


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["tensor", "tuple", "dict", "reference", "x"]) | st.text(max_size=4), inner, max_size=3
        )
    ),
    max_leaves=8,
)
verbs = st.sampled_from(
    ["call", "fetch", "parameters", "backward", "gradients", "create", "lock", "prepare", "commit", "abort", "x"]
)
small = st.integers(0, 3) | st.integers(0, 2**63 - 1)
fields: dict[str, st.SearchStrategy[Any]] = {
    "context": small | st.none(),
    "record": small,
    "optimizer": small,
    "target": st.just("layer") | small,
    "function": st.sampled_from(["tests.remote_functions:echo", "os:getcwd", ":", ""]),
    "method": st.sampled_from(["__call__", "forward", "_x", "state_dict", ""]),
    "arguments": st.just([[{"tensor": 0}], {"dict": {}}]) | json_values,
    "gradients": st.just([{"tensor": 0}]) | json_values,
    "options": st.just({"dict": {"lr": 0.1}}) | json_values,
    "parameters": st.just([{"target": "layer", "name": "weight"}]) | json_values,
    "kind": st.sampled_from(["SGD", "Optimizer", "lr_scheduler", "__name__"]),
    "released": st.lists(small, max_size=2),
    "stay": st.booleans(),
    "retain_graph": st.booleans(),
    "unknown": json_values,
}


@st.composite
def requests(draw: st.DrawFn) -> Any:
    """Draw a request in which some fields are right, some are wrong and some are missing."""
    chosen = draw(st.sets(st.sampled_from(sorted(fields)), max_size=6))
    content = {name: draw(fields[name] | json_values) for name in sorted(chosen)}
    return {"verb": draw(verbs | json_values), **content}


tensors = st.lists(
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from(["float32", "bool", "int64", "complex64", "float8", "object"]) | json_values,
            "shape": st.lists(st.integers(-2, 4) | st.integers(), max_size=3) | json_values,
        },
        optional={"grad": st.booleans() | json_values},
    ),
    max_size=2,
)


@given(data=st.binary(max_size=64), count=st.integers(0, 3))
def test_any_bytes_end_in_an_error(peer: Peer, data: bytes, count: int) -> None:
    answer = check(peer, [data] if count == 0 else framed(data, [b"x"] * count))
    assert answer.error is not None
    assert (answer.error.type, answer.error.reason) == ("BadMessage", "bad_message")


@given(
    content=requests(),
    described=tensors,
    parts=st.lists(st.binary(max_size=70), max_size=3),
    small=st.binary(max_size=70),
)
def test_any_request_ends_in_an_answer(
    peer: Peer, content: Any, described: list[dict[str, Any]], parts: list[bytes], small: bytes
) -> None:
    try:
        header = json.dumps({"tensors": described, "content": content}).encode()
    except UnicodeEncodeError:
        return
    check(peer, framed(header, parts, small))


@given(content=requests(), shape=st.lists(st.integers(0, 3), max_size=3), grad=st.booleans(), data=st.data())
def test_any_request_with_a_good_tensor_ends_in_an_answer(
    peer: Peer, content: Any, shape: list[int], grad: bool, data: st.DataObject
) -> None:
    size = torch.empty(shape).nbytes
    values = data.draw(st.binary(min_size=size, max_size=size))
    described = [{"dtype": "float32", "shape": shape, "grad": grad}]
    check(peer, framed(json.dumps({"tensors": described, "content": content}).encode(), [], values))


def test_tensors_that_are_too_large_are_dropped_as_they_come(peer: Peer) -> None:
    described = [{"dtype": "uint8", "shape": [3 * MAX_PAYLOAD]}]
    header = json.dumps({"tensors": described, "content": {"verb": "lock", "context": 1}}).encode()
    answer = check(peer, framed(header, [bytes(MAX_PAYLOAD)] * 3))
    assert answer.error is not None
    assert f"more than max_message_bytes={MAX_BYTES}" in answer.error.message


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ({"verb": "fetch", "target": 99}, "unknown_reference"),
        ({"verb": "fetch", "target": "nothing"}, "unknown_module"),
        ({"verb": "fetch", "target": True}, "bad_message"),
        ({"verb": "backward", "context": 3, "record": 0, "gradients": []}, "no_context"),
        ({"verb": "create", "kind": "__name__", "parameters": [], "options": {"dict": {}}}, "unknown_optimizer"),
        ({"verb": "commit", "context": 1, "optimizer": 1}, "not_locked"),
        ({"verb": "fetch", "target": 1, "released": [-1]}, "bad_message"),
    ],
)
def test_a_refusal_has_a_stable_reason(peer: Peer, content: Any, reason: str) -> None:
    answer = check(peer, framed(json.dumps({"content": content}).encode(), []))
    assert answer.error is not None
    assert answer.error.reason == reason
