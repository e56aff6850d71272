"""A client of this version together with a newer server."""

from typing import TYPE_CHECKING, Any

from torch import nn

from fedring.client import connect
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

FIELD_1000 = bytes([0xC2, 0x3E, 5]) + b"later"  # a text field that this version does not know
SECONDS = 60.0


def test_a_client_ignores_what_a_newer_server_adds(server: "ScriptedServer", settings: dict[str, Any]) -> None:
    model = nn.Linear(3, 2)
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.send(pb.ServerEvent.FromString(FIELD_1000))  # an unknown kind of event
        command = server.command(model)
        server.train(pb.TrainCmd.FromString(command.SerializeToString() + FIELD_1000))
        task = next(federation)
        task.load_into(model)
        task.submit(model, 1)
        assert server.accepted.get(timeout=SECONDS)[0].round == command.round
