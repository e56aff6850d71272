"""What a client of this version does with a newer server."""

from typing import TYPE_CHECKING, Any

from torch import nn

from fedring.client import connect
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.unit.conftest import Peer

FIELD_1000 = bytes([0xC2, 0x3E, 5]) + b"later"  # a text that this version knows nothing of
SECONDS = 60.0


def test_what_a_newer_server_adds_is_no_obstacle(peer: "Peer", settings: dict[str, Any]) -> None:
    model = nn.Linear(3, 2)
    with connect(**settings) as federation:
        peer.joins.get(timeout=SECONDS)
        peer.send(pb.ServerEvent.FromString(FIELD_1000))  # an event of a kind that is not known
        command = peer.command(model)
        peer.train(pb.TrainCmd.FromString(command.SerializeToString() + FIELD_1000))
        task = next(federation)
        task.load_into(model)
        task.submit(model, 1)
        assert peer.accepted.get(timeout=SECONDS)[0].round == command.round
