"""Values and messages of remote calls: what is sent comes back, and what nobody sends is refused."""

import json
import struct
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from fedring.remote.errors import BadMessage
from fedring.remote.messages import MAX_HEADER, SMALL, Incoming, Message, decode, encode, outgoing, receive, send
from fedring.remote.values import MAX_DEPTH, Handle, flatten, unflatten
from fedring.ring.engine.program import Send
from fedring.ring.transport.frames import MAX_PAYLOAD


def there_and_back(value: Any) -> Any:
    """Send a value as a message to rank 1 and return what comes there."""
    tensors: list[Tensor] = []
    tree = flatten(value, tensors, owner=1)
    message = received(outgoing(tree, tensors))
    return unflatten(message.content, message.tensors, lambda key: Handle(1, key))


def received(message: Message, change: Callable[[list[bytes]], None] = lambda parts: None) -> Message:
    """Run the programs of both ends, and change the parts on the way."""
    parts = [bytes(step.data) for step in send(1, message) if isinstance(step, Send)]
    change(parts)
    incoming = Incoming(max_bytes=1 << 30)
    program = receive(0, incoming)
    next(program)  # what it expects
    next(program)
    for part in parts:
        try:
            program.send(memoryview(part))
        except StopIteration:
            break
    return incoming.take()


@pytest.mark.parametrize(
    "value",
    [
        *(None, True, False, 0, -(2**63), 2**63 - 1, 1e300, -0.5, "", "grüße"),
        *([], [1, [2, (3, "x")]], (), (1,), {}, {"a": {"tensor": 3}, "": [None]}),
    ],
)
def test_a_value_comes_as_it_was_sent(value: Any) -> None:
    came = there_and_back(value)
    assert (came, type(came)) == (value, type(value))


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
        *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.bool),
    ],
)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (2, 3), (5, 1, 1)])
def test_tensors_of_every_dtype_and_shape_come_as_they_were_sent(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.randn(shape) * 3).to(dtype)
    (came, again), handle = there_and_back([[tensor, tensor], Handle(1, 7)])
    for one in (came, again):
        torch.testing.assert_close(one, tensor, rtol=0, atol=0)
    assert handle.key == 7


def test_a_tensor_that_is_not_contiguous_and_takes_several_parts_comes_as_it_was_sent() -> None:
    tensor = torch.arange(3 * MAX_PAYLOAD // 8).view(2, -1).t()
    torch.testing.assert_close(there_and_back([tensor, torch.ones(2)])[0], tensor, rtol=0, atol=0)


def nested(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (float("nan"), "not finite"),
        (2**63, "64 bits"),
        ({1: 2}, "use strings as keys"),
        (object(), "a object cannot be sent"),
        (nested(MAX_DEPTH + 1), "nested"),
        ("x" * MAX_HEADER, "use tensors"),
        ("\ud800", "cannot be written as JSON"),
        (torch.ones(2).to(torch.float8_e4m3fn), "float8_e4m3fn cannot be sent"),
    ],
    ids=["nan", "large", "keys", "object", "nested", "long", "surrogate", "float8"],
)
def test_what_cannot_be_sent_is_refused_by_its_sender(value: Any, text: str) -> None:
    with pytest.raises(BadMessage, match=text):
        there_and_back(value)


def head(content: Any, parts: int = 0, small: bytes = b"") -> bytes:
    text = content if isinstance(content, str) else json.dumps(content)
    return struct.pack("<4sII", b"FRC1", parts, len(text)) + text.encode() + small


def described(shape: Any, dtype: Any = "float32", **more: Any) -> dict[str, Any]:
    return {"tensors": [{"dtype": dtype, "shape": shape, **more}], "content": None}


@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"", "0 bytes came"),
        (b"FRC1", "4 bytes came"),
        (b"FRC2" + head({"content": 1})[4:], "not the beginning"),
        (head("{"), "not valid"),
        (head("[" * 100_000), "not valid"),
        (head({}), "content"),
        (head({"content": 1, "extra": 2}), "extra"),
        (head({"content": 1}, parts=1), "1 parts, and 0 bytes behind its header, where its tensors need 0 and 0"),
        (head({"content": 1}, small=b"x"), "0 parts, and 1 bytes"),
        (head({"content": 1}, small=bytes(SMALL + 1)), "are to be the header"),
        (head({"content": 1})[:-1], "are to be the header"),
        (head(described([2])), "need 0 and 8"),
        (head(described([2]), parts=1, small=bytes(8)), "need 0 and 8"),
        (head(described([SMALL]), small=bytes(SMALL)), "need 1 and 0"),
        (head(described([2], dtype="quint8"), 1), "dtype"),
        (head(described([-1]), 1), "shape"),
        (head(described([1.5]), 1), "shape"),
        (head(described([True]), 1), "shape"),
        (head(described(["2"]), 1), "shape"),
        (head(described([1] * 65), 1), "shape"),
        (head(described([2], grad=1), 1), "grad"),
        (head(described([2**40]), 1), "more than max_message_bytes"),
        (head(described([2**47, 2**47, 2**47]), 1), "more than max_message_bytes"),
        (head(described([2**47, 0]), 0), "more than max_message_bytes"),
        (head("x" * (MAX_HEADER + 1)), "are to be the header"),
    ],
    ids=range(25),
)
def test_a_header_that_nobody_sends_is_refused(data: bytes, text: str) -> None:
    with pytest.raises(BadMessage, match=text) as raised:
        decode(data, max_bytes=1 << 30)
    assert (raised.value.reason, len(str(raised.value)) < 300) == ("bad_message", True)


@pytest.mark.parametrize(
    "tree",
    [
        *({}, {"tensor": 0, "tuple": []}, {"tensor": 1}, {"tensor": -1}, {"tensor": True}, {"tensor": 0.0}),
        *({"tuple": {}}, {"dict": []}, {"reference": 1.5}, {"reference": None}, {"unknown": 1}, 2**63, float("inf")),
        *({"dict": {"a": {"dict": 1}}}, nested(MAX_DEPTH + 1)),
        *(
            {"elsewhere": [1, 5]},
            {"elsewhere": 1},
            {"elsewhere": [1]},
            {"elsewhere": [True, 5]},
            {"elsewhere": [1, 5, 5]},
        ),
    ],
    ids=repr,
)
def test_a_tree_that_nobody_sends_is_refused(tree: Any) -> None:
    with pytest.raises(BadMessage):
        unflatten(tree, [torch.ones(1)], lambda key: key)


def test_a_handle_comes_as_what_its_holder_has_and_to_others_with_its_rank() -> None:
    tensors: list[Tensor] = []
    tree = flatten([Handle(1, 7), Handle(2, "layer")], tensors, owner=1)
    assert unflatten(tree, [], lambda key: f"held {key}", Handle)[0] == "held 7"
    _, other = unflatten(tree, [], lambda key: key, Handle)
    assert (other.rank, other.key) == (2, "layer")
    with pytest.raises(BadMessage, match="cannot be a result"):
        flatten(Handle(1, 7), tensors, owner=-1)
    forms: list[Any] = [[1], [True, 5], [1, 5.0], [1, None], [1, 5, 5], {}, "1"]
    for elsewhere in forms:
        with pytest.raises(BadMessage):
            unflatten({"elsewhere": elsewhere}, [], lambda key: key, Handle)


def test_a_part_of_another_length_is_refused_after_all_parts_have_come() -> None:
    def shorten(parts: list[bytes]) -> None:
        parts[1] = parts[1][:-1]

    with pytest.raises(BadMessage, match=f"part 0 of a message has {SMALL - 1} bytes, not {SMALL}"):
        received(outgoing(None, [torch.ones(SMALL // 4), torch.ones(3)]), shorten)


def test_a_boolean_that_is_neither_is_refused() -> None:
    def change(parts: list[bytes]) -> None:
        parts[-1] = parts[-1][:-1] + b"\x02"

    for size in (2, SMALL + 1):
        with pytest.raises(BadMessage, match="neither 0 nor 1"):
            received(outgoing(None, [torch.ones(size, dtype=torch.bool)]), change)


def test_a_message_with_small_tensors_is_one_frame() -> None:
    for more, frames in ((0, 1), (1, 3)):
        message = outgoing({"verb": "x"}, [torch.ones(SMALL // 8), torch.ones(SMALL // 8 + more)])
        assert sum(isinstance(step, Send) for step in send(1, message)) == frames
    assert decode(encode(outgoing(5)), max_bytes=0).content == 5
