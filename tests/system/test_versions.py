"""A server of this version with clients of other versions."""

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

FIELD_1000 = bytes([0xC2, 0x3E, 5]) + b"later"  # an unknown field
SECONDS = 60.0
OTHERS = [(PROTOCOL - 1, "update the client"), (PROTOCOL + 1, "update fl-server")]


@pytest.mark.parametrize(("protocol", "advice"), OTHERS)
def test_a_client_of_another_protocol_is_told_which_side_to_update(server: Fleet, protocol: int, advice: str) -> None:
    """The bytes of the request are those of a client of protocol 1, however later messages look."""
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
def test_a_client_daemon_of_another_protocol_ends_with_the_reason(tmp_path: Path, protocol: int, advice: str) -> None:
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
    """Assert that the sentence names the protocols of both sides, and says what to do."""
    assert {*re.findall(r"\d+", sentence)} == {str(PROTOCOL), str(protocol)}
    assert advice in sentence


class NewerClient(WireClient):
    """A client whose messages have a field that this version does not know."""

    def header(self, command: pb.TrainCmd, payload: bytes, **changes: Any) -> pb.UpdateHeader:
        known = super().header(command, payload, **changes)
        return pb.UpdateHeader.FromString(known.SerializeToString() + FIELD_1000)


def test_unknown_fields_of_a_newer_client_are_ignored(server: Fleet, control: Control) -> None:
    with grpc.insecure_channel(server.listen) as channel:
        known = pb.JoinRequest(client_id="b", protocol=PROTOCOL)
        request = pb.JoinRequest.FromString(known.SerializeToString() + FIELD_1000)
        assert TrainCmdServiceStub(channel).Join(request).session_id
    with NewerClient(server.listen, "newer") as client:
        client.say(pb.WatchRequest.FromString(FIELD_1000))
        job_id, events = run(control)
        deliver(client)
        assert outcome(control, job_id, events).state == "completed"
