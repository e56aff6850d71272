"""What a server of this version does with clients of others."""

from typing import Any

import grpc
import pytest

from fedring.rpc.contract import PROTOCOL
from fedring.rpc.errors import reason_of, status_of
from fedring.v1 import federation_pb2 as pb
from fedring.v1.federation_pb2_grpc import TrainCmdServiceStub
from tests.fleets import Control, Fleet
from tests.system.wire import WireClient, deliver, outcome, run

FIELD_1000 = bytes([0xC2, 0x3E, 5]) + b"later"  # a text that this version knows nothing of


@pytest.mark.parametrize(
    ("protocol", "advice"), [(PROTOCOL - 1, "update the client"), (PROTOCOL + 1, "update fl-server")]
)
def test_a_client_of_another_protocol_is_told_who_is_to_be_updated(server: Fleet, protocol: int, advice: str) -> None:
    with grpc.insecure_channel(server.listen) as channel, pytest.raises(grpc.RpcError) as caught:
        TrainCmdServiceStub(channel).Join(pb.JoinRequest(client_id="other", protocol=protocol, software="other/9"))
    assert status_of(caught.value) is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(caught.value) == "wrong_protocol"
    assert isinstance(caught.value, grpc.Call)
    assert advice in (caught.value.details() or "")


class Newer(WireClient):
    """Says more in its messages than this version can read."""

    def header(self, command: pb.TrainCmd, payload: bytes, **changes: Any) -> pb.UpdateHeader:
        known = super().header(command, payload, **changes)
        return pb.UpdateHeader.FromString(known.SerializeToString() + FIELD_1000)


def test_fields_that_a_newer_client_adds_are_no_obstacle(server: Fleet, control: Control) -> None:
    with grpc.insecure_channel(server.listen) as channel:
        known = pb.JoinRequest(client_id="b", protocol=PROTOCOL)
        request = pb.JoinRequest.FromString(known.SerializeToString() + FIELD_1000)
        assert TrainCmdServiceStub(channel).Join(request).session_id
    with Newer(server.listen, "newer") as client:
        client.say(pb.WatchRequest.FromString(FIELD_1000))
        job_id, events = run(control)
        deliver(client)
        assert outcome(control, job_id, events).state == "completed"
