"""The interceptor, in front of a real server: what tests of whole daemons cannot reach."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from tests.control_server import Script

from fedring.daemon.audit import AuditLog
from fedring.rpc.auth import REASONS, Auth, Door, Tally
from fedring.rpc.boundary import Boundary
from fedring.rpc.channel import make_server
from fedring.rpc.errors import reason_of
from fedring.rpc.identity import IDENTITY, Identity, Role, parse_uri, peer_name, uri_of
from fedring.v1 import control_pb2 as pb
from fedring.v1 import control_pb2_grpc as rpc

Served = tuple[Auth, rpc.ControlServiceStub, Path]


class Control(Script):
    """Says who asked."""

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.Status:
        return pb.Status(run_id=str(IDENTITY.get()))

    async def StopJob(self, request: pb.StopJobRequest, context: Any) -> pb.StopReply:
        raise RuntimeError("a fault")


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Any]:
    """Starts a server behind a door."""
    ends = []

    async def start(door: Door) -> Served:
        audit = AuditLog(tmp_path / "audit.jsonl")
        auth = Auth(door, audit)
        server = make_server([Boundary(), auth], max_streams=4)
        rpc.add_ControlServiceServicer_to_server(Control(), server)
        channel = aio.insecure_channel(f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}")
        await server.start()
        ends.append((channel, server, audit))
        return auth, rpc.ControlServiceStub(channel), tmp_path / "audit.jsonl"

    yield start
    for channel, server, audit in ends:
        await channel.close()
        await server.stop(None)
        audit.close()


async def bearer(token: str) -> Identity:
    return Identity(Role.OPERATOR, token)


def shown(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(aio.AioRpcError) as error:
        await call
    return error.value.code(), reason_of(error.value)


async def test_a_token_that_has_been_in_plaintext_is_refused_even_where_all_are_let_in(serve: Any) -> None:
    auth, control, _ = await serve(Door(open=True, exposed=True))
    assert (await control.GetStatus(pb.GetStatusRequest())).run_id == "local"
    call = control.GetStatus(pb.GetStatusRequest(), metadata=shown("t"))
    assert await refused(call) == (grpc.StatusCode.UNAUTHENTICATED, "token_in_plaintext")
    assert auth.tally.counts()["token_in_plaintext"] == 1


async def test_a_token_is_refused_where_none_are_taken(serve: Any) -> None:
    _, control, _ = await serve(Door())
    call = control.GetStatus(pb.GetStatusRequest(), metadata=shown("t"))
    assert await refused(call) == (grpc.StatusCode.UNAUTHENTICATED, "tokens_off")


async def test_the_handler_knows_who_asks(serve: Any) -> None:
    _, control, _ = await serve(Door(tokens=bearer))
    status = await control.GetStatus(pb.GetStatusRequest(), metadata=shown("ann"))
    assert status.run_id == "fedring://operator/ann"


async def test_a_deed_that_fails_is_written_down_and_looking_is_not(serve: Any) -> None:
    _, control, path = await serve(Door(tokens=bearer))
    await control.GetStatus(pb.GetStatusRequest(), metadata=shown("ann"))
    assert await refused(control.StopJob(pb.StopJobRequest(), metadata=shown("ann"))) == (
        grpc.StatusCode.INTERNAL,
        "internal",
    )
    (line,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (line["identity"], line["verb"], line["result"]) == (
        "fedring://operator/ann",
        "/fedring.v1.ControlService/StopJob",
        "failed",
    )


def test_every_reason_is_counted_from_the_start() -> None:
    assert Tally().counts() == dict.fromkeys(("handshake", *REASONS), 0)


def test_a_handshake_counts_until_a_call_comes_on_its_connection() -> None:
    tally = Tally()
    tally.begin_handshake()
    tally.begin_handshake()
    for _ in range(3):
        tally.heard("ipv4:127.0.0.1:5")
    assert tally.counts()["handshake"] == 1


def test_the_audit_log_stays_below_its_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedring.daemon.audit._FILE_BYTES", 1000)
    audit = AuditLog(tmp_path / "audit.jsonl")
    for _ in range(100):
        audit.write(identity="fedring://client/a", peer="ipv4:1", verb="/v", result="no_identity")
    audit.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 6
    assert all(path.stat().st_size <= 1000 for path in files)


@pytest.mark.parametrize(
    "text",
    ["", "fedring://client/", "fedring://root/a", "fedring://client/a/b", "http://client/a", "fedring://client/a "],
)
def test_other_uris_are_nobody(text: str) -> None:
    assert parse_uri(text) is None


def test_an_identity_is_read_as_it_is_written() -> None:
    for role in Role:
        assert parse_uri(uri_of(role, "A.b_c-1")) == Identity(role, "A.b_c-1")
    assert peer_name("fedring://client/a") != peer_name("fedring://client/A")
