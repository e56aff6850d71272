"""What comes from the process of a job's code: only messages, and only the tensors that are expected."""

import socket
import struct
import threading
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from fedring.client.training.frames import (
    BadPipeMessage,
    CodePipe,
    PipeClosed,
    StandIn,
    describe,
    pack,
    put,
    size_of_values,
    values_of,
)
from fedring.train.errors import TrainError
from fedring.train.tensors.state import schema_of


@pytest.fixture
def pipes() -> Iterator[tuple[socket.socket, CodePipe]]:
    theirs, ours = socket.socketpair()
    with theirs, ours:
        yield theirs, CodePipe(ours)


class Tied(nn.Module):
    """A model with a tied tensor, a frozen one, a buffer, and one that its state dict leaves out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.first.bias.requires_grad_(False)
        self.register_buffer("scratch", torch.zeros(2), persistent=False)


def test_a_stand_in_has_the_tensors_of_its_model_in_their_order() -> None:
    model = Tied()
    stand_in = StandIn(describe(model), bytearray(pack(values_of(model))))
    assert schema_of(stand_in) == schema_of(model)
    assert list(stand_in.state_dict()) == list(model.state_dict())
    mine = stand_in.state_dict()
    assert mine["second.weight"] is mine["first.weight"]
    assert [tensor.requires_grad for tensor in mine.values()] == [
        tensor.requires_grad for tensor in model.state_dict(keep_vars=True).values()
    ]
    with torch.no_grad():
        model.first.weight.add_(1)
    assert put(bytearray(pack(values_of(model))), values_of(stand_in)) == {}
    assert all(torch.equal(mine[name], tensor) for name, tensor in model.state_dict().items())


def test_a_message_passes_with_its_values(pipes: tuple[socket.socket, CodePipe]) -> None:
    theirs, ours = pipes
    values = pack({"a": torch.arange(1 << 20)})
    sender = threading.Thread(target=lambda: CodePipe(theirs).send({"do": "it"}, values))
    sender.start()
    assert ours.receive(len(values)) == ({"do": "it"}, bytearray(values))
    sender.join()
    theirs.close()
    with pytest.raises(PipeClosed):
        ours.receive(0)


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack("<QQ", 1 << 60, 0),
        struct.pack("<QQ", 2, 1 << 60) + b"{}",
        struct.pack("<QQ", 2, 0) + b"[]",
        struct.pack("<QQ", 2, 0) + b"\xff\xfe",
        struct.pack("<QQ", 100_000, 0) + b"[" * 100_000,
    ],
)
def test_bytes_that_are_no_message_are_refused(pipes: tuple[socket.socket, CodePipe], sent: bytes) -> None:
    theirs, ours = pipes
    theirs.sendall(sent)
    with pytest.raises(BadPipeMessage):
        ours.receive(1000)


WRONG = [
    b"",
    b"\x00" * 100,
    pack({"a": torch.zeros(3)}),
    pack({"weight": torch.zeros(3, 4)}),
    pack({"weight": torch.zeros(2, 3, dtype=torch.float64), "bias": torch.zeros(2)}),
]


@pytest.mark.parametrize("values", WRONG)
def test_other_tensors_than_those_of_the_model_are_refused(values: bytes) -> None:
    model = nn.Linear(3, 2)
    assert len(pack(values_of(model))) <= size_of_values(values_of(model))
    with pytest.raises(TrainError):
        put(bytearray(values), values_of(model))
    with pytest.raises(TrainError):
        StandIn(describe(model), bytearray(values))


@pytest.mark.parametrize(
    "described", [None, {}, [1], [["weight"]], [["weight", 0, "nonsense", [2, 3], True, True]], [[1, 2, 3, 4, 5, 6]]]
)
def test_a_description_that_is_none_is_refused(described: object) -> None:
    with pytest.raises(TrainError):
        StandIn(described, bytearray(pack({"weight": torch.zeros(2, 3)})))
