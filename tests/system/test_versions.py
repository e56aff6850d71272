"""What a server of this version does with clients of others."""

import json
import re
from pathlib import Path
from typing import Any

import grpc
import pytest

from fedring.daemon.exits import Exit
from fedring.rpc.contract import PROTOCOL
from fedring.rpc.errors import reason_of, status_of
from fedring.v1 import federation_pb2 as pb
from fedring.v1.federation_pb2_grpc import TrainCmdServiceStub
from tests.fleets import Control, Fleet
from tests.system.wire import WireClient, deliver, outcome, run

FIELD_1000 = bytes([0xC2, 0x3E, 5]) + b"later"  # a text that this version knows nothing of
SECONDS = 60.0
OTHERS = [(PROTOCOL - 1, "update the client"), (PROTOCOL + 1, "update fl-server")]


@pytest.mark.parametrize(("protocol", "advice"), OTHERS)
def test_a_client_of_another_protocol_is_told_who_is_to_be_updated(server: Fleet, protocol: int, advice: str) -> None:
    """The request is what a client of protocol 1 sends, byte by byte, whatever later messages look like."""
    request = bytes([0x0A, 5]) + b"other" + bytes([0x10, protocol, 0x1A, 7]) + b"other/9" + bytes([0x21]) + bytes(8)
    with grpc.insecure_channel(server.listen) as channel:
        join: Any = channel.unary_unary("/fedring.v1.TrainCmdService/Join", request_serializer=bytes)
        with pytest.raises(grpc.RpcError) as caught:
            join(request, timeout=SECONDS)
    assert status_of(caught.value) is grpc.StatusCode.INVALID_ARGUMENT
    assert reason_of(caught.value) == "wrong_protocol"
    assert isinstance(caught.value, grpc.Call)
    check_sentence(caught.value.details() or "", protocol, advice)


@pytest.mark.parametrize(("protocol", "advice"), OTHERS)
def test_a_daemon_of_another_protocol_ends_and_says_why(tmp_path: Path, protocol: int, advice: str) -> None:
    fleet = Fleet(tmp_path, {}, [{}])
    (client,) = fleet.clients
    client.module, client.env["FL_TEST_PROTOCOL"] = "tests.system.other_protocol", str(protocol)
    with fleet, Control(fleet.control) as control:
        assert client.wait(SECONDS) == Exit.CONFIG
        assert not control.clients()
    before, reason, sentence = json.loads(client.log.read_text().splitlines()[-1])["text"].partition("(wrong_protocol)")
    assert reason, before
    check_sentence(sentence, protocol, advice)


def check_sentence(sentence: str, protocol: int, advice: str) -> None:
    """It says which protocols the two sides speak, and what to do."""
    assert {*re.findall(r"\d+", sentence)} == {str(PROTOCOL), str(protocol)}
    assert advice in sentence


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
