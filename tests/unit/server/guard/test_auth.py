"""The interceptor `Auth` in front of a real server: the cases that tests of whole daemons cannot reach."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from tests.control_server import Script

from fedring.rpc.boundary import Boundary
from fedring.rpc.channel import make_server
from fedring.rpc.errors import NotAllowed, Unauthenticated, reason_of
from fedring.rpc.identity import IDENTITY, Identity, Role, parse_uri, peer_name, uri_of
from fedring.server.guard.auth import (
    _READS,
    _VERBS,
    REASONS,
    Auth,
    AuthCounts,
    CallInProgress,
    PortPolicy,
    WholeSends,
    allow,
)
from fedring.server.guard.ports import AuditLog
from fedring.server.services import CLIENT_SERVICES
from fedring.v1 import control_pb2 as pb
from fedring.v1 import control_pb2_grpc as rpc
from fedring.v1.federation_pb2 import Chunk, FetchModelRequest, ModelBlob

Served = tuple[Auth, rpc.ControlServiceStub, Path]


class Control(Script):
    """Answers with the identity of its caller."""

    async def GetStatus(self, request: pb.GetStatusRequest, context: Any) -> pb.Status:
        return pb.Status(run_id=str(IDENTITY.get()))

    async def WatchEvents(self, request: pb.WatchEventsRequest, context: Any) -> AsyncIterator[pb.Event]:
        await context.send_initial_metadata(())
        await asyncio.Event().wait()
        yield pb.Event()

    async def ExportModel(self, request: FetchModelRequest, context: Any) -> AsyncIterator[ModelBlob]:
        while True:
            yield ModelBlob(chunk=Chunk(data=bytes(100_000)))

    async def MoveJob(self, request: pb.MoveJobRequest, context: Any) -> pb.JobList:
        raise NotImplementedError

    async def StopJob(self, request: pb.StopJobRequest, context: Any) -> pb.StopReply:
        raise RuntimeError("a fault")


@pytest.fixture
async def serve(tmp_path: Path) -> AsyncIterator[Any]:
    """Starts servers whose ports have a given policy."""
    ends = []

    async def start(policy: PortPolicy) -> Served:
        audit = AuditLog(tmp_path / "audit.jsonl")
        auth = Auth(policy, audit, CLIENT_SERVICES)
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


def metadata_of(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


async def refused(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(aio.AioRpcError) as error:
        await call
    return error.value.code(), reason_of(error.value)


async def test_a_token_that_came_in_plaintext_is_refused_even_at_a_port_that_is_open_to_all(serve: Any) -> None:
    auth, control, _ = await serve(PortPolicy(open=True, exposed=True))
    assert (await control.GetStatus(pb.GetStatusRequest())).run_id == "local"
    call = control.GetStatus(pb.GetStatusRequest(), metadata=metadata_of("t"))
    assert await refused(call) == (grpc.StatusCode.UNAUTHENTICATED, "token_in_plaintext")
    assert auth.tally.counts()["token_in_plaintext"] == 1


async def test_a_token_is_refused_by_a_port_that_takes_none(serve: Any) -> None:
    _, control, _ = await serve(PortPolicy())
    call = control.GetStatus(pb.GetStatusRequest(), metadata=metadata_of("t"))
    assert await refused(call) == (grpc.StatusCode.UNAUTHENTICATED, "tokens_off")


async def test_the_handler_learns_who_calls(serve: Any) -> None:
    _, control, _ = await serve(PortPolicy(tokens=bearer))
    status = await control.GetStatus(pb.GetStatusRequest(), metadata=metadata_of("ann"))
    assert status.run_id == "fedring://operator/ann"


async def test_calls_end_once_the_token_of_their_caller_is_no_longer_good(serve: Any) -> None:
    bad: list[str] = []

    async def identify(token: str) -> Identity:
        return Identity(Role.OPERATOR, token, token=f"id of {token}")

    def lapsed(who: Identity) -> Unauthenticated | None:
        return Unauthenticated("it was revoked", reason="revoked_token") if who.name in bad else None

    auth, control, _ = await serve(PortPolicy(tokens=identify, lapsed=lapsed))
    ann, bob = (control.WatchEvents(pb.WatchEventsRequest(), metadata=metadata_of(name)) for name in ("ann", "bob"))
    for call in (ann, bob):
        await call.initial_metadata()
    auth.end_revoked()
    bad.append("ann")
    auth.end_revoked()
    assert await refused(ann.read()) == (grpc.StatusCode.UNAUTHENTICATED, "revoked_token")
    assert auth.tally.counts()["revoked_token"] == 1
    assert not bob.done()


class SlowToSay:
    """A call's context whose sends are over long after they have begun, as gRPC sees it."""

    def __init__(self) -> None:
        self.begun, self.may_end, self.sent = asyncio.Event(), asyncio.Event(), list[object]()

    async def send_initial_metadata(self, metadata: object) -> None:
        self.begun.set()
        await self.may_end.wait()
        self.sent.append(metadata)

    async def write(self, message: object) -> None:
        self.sent.append(message)


@pytest.mark.parametrize("first", ["metadata", "message"])
async def test_a_call_is_not_ended_before_grpc_knows_that_its_metadata_are_sent(
    first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedring.server.guard.auth.WRITE_GRACE", 60.0)  # however slow this machine is
    context = SlowToSay()
    call = CallInProgress(asyncio.timeout(None), Identity(Role.CLIENT, "ann"), None)
    whole = WholeSends(context, call)

    async def body() -> None:
        async with call.scope:
            await (whole.send_initial_metadata(()) if first == "metadata" else whole.write("it"))
            await whole.write("more")

    running = asyncio.create_task(body())
    await context.begun.wait()
    call.end(Unauthenticated("it was revoked", reason="revoked_token"))
    await asyncio.wait([running], timeout=0.1)
    assert not running.done()
    context.may_end.set()
    async with asyncio.timeout(20):
        with pytest.raises(TimeoutError):
            await running
    assert context.sent == [()]
    assert call.scope.expired()


async def test_a_call_that_is_over_is_not_ended() -> None:
    call = CallInProgress(asyncio.timeout(None), Identity(Role.CLIENT, "ann"), None, sending=True)
    async with call.scope:
        call.end(Unauthenticated("it was revoked", reason="revoked_token"))
    call.over = True
    call.cancel()


async def test_a_slow_reader_learns_that_its_token_is_no_longer_good(serve: Any) -> None:
    bad: list[str] = []

    async def identify(token: str) -> Identity:
        return Identity(Role.OPERATOR, token, token=f"id of {token}")

    def lapsed(who: Identity) -> Unauthenticated | None:
        return Unauthenticated("it was revoked", reason="revoked_token") if who.name in bad else None

    auth, control, _ = await serve(PortPolicy(tokens=identify, lapsed=lapsed))
    call = control.ExportModel(FetchModelRequest(), metadata=metadata_of("ann"))
    assert (await call.read()).chunk.data
    await asyncio.sleep(0.3)  # the server fills what the channel takes, and waits
    bad.append("ann")
    auth.end_revoked()

    async def read_on() -> None:
        while await call.read():
            pass

    async with asyncio.timeout(20):
        assert await refused(read_on()) == (grpc.StatusCode.UNAUTHENTICATED, "revoked_token")
    assert auth.tally.counts()["revoked_token"] == 1


async def test_a_verb_that_fails_is_audited_and_a_verb_that_only_reads_is_not(serve: Any) -> None:
    _, control, path = await serve(PortPolicy(tokens=bearer))
    await control.GetStatus(pb.GetStatusRequest(), metadata=metadata_of("ann"))
    assert await refused(control.StopJob(pb.StopJobRequest(), metadata=metadata_of("ann"))) == (
        grpc.StatusCode.INTERNAL,
        "internal",
    )
    (line,) = [json.loads(line) for line in path.read_text().splitlines()]
    assert (line["identity"], line["verb"], line["result"]) == ("fedring://operator/ann", "stop", "failed")


def test_every_call_of_operators_that_is_audited_has_the_name_of_a_verb() -> None:
    services = [pb.DESCRIPTOR.services_by_name[name] for name in ("ControlService", "TokenService")]
    calls = {method.name for service in services for method in service.methods}
    assert {call for call in calls if not call.startswith(_READS)} == set(_VERBS)


def test_the_services_of_kinds_of_rounds_are_for_clients_too() -> None:
    names = ("TrainCmd", "ModelBlob", "ClientUpdate", "Rendezvous", "SecureAggregation")
    assert sorted(CLIENT_SERVICES) == sorted(f"fedring.v1.{name}Service" for name in names)


@pytest.mark.parametrize("service", CLIENT_SERVICES)
@pytest.mark.parametrize("role", [Role.OPERATOR, Role.SERVER])
def test_only_clients_may_call_what_is_for_clients(service: str, role: Role) -> None:
    allow(Identity(Role.CLIENT, "a"), f"/{service}/Any", None, CLIENT_SERVICES)
    with pytest.raises(NotAllowed) as error:
        allow(Identity(role, "a"), f"/{service}/Any", None, CLIENT_SERVICES)
    assert error.value.reason == "not_client"


def test_every_reason_has_a_count_from_the_start() -> None:
    assert AuthCounts().counts() == dict.fromkeys(("handshake", *REASONS), 0)


def test_a_handshake_counts_as_refused_until_a_call_comes_on_its_connection() -> None:
    tally = AuthCounts()
    tally.begin_handshake()
    tally.begin_handshake()
    for _ in range(3):
        tally.note_call("ipv4:127.0.0.1:5")
    assert tally.counts()["handshake"] == 1


def test_the_audit_log_stays_below_its_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedring.server.guard.ports._FILE_BYTES", 1000)
    audit = AuditLog(tmp_path / "audit.jsonl")
    for _ in range(100):
        audit.write(identity="fedring://client/a", peer="ipv4:1", verb="/v", result="no_identity")
        audit.write(identity="fedring://operator/a", peer="ipv4:1", verb="stop", result="ok")
    audit.close()
    files = sorted(tmp_path.iterdir())
    assert len(files) == 12
    assert all(path.stat().st_size <= 1000 for path in files)


def test_refusals_never_push_a_verb_out_of_the_audit_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedring.server.guard.ports._FILE_BYTES", 1000)
    audit = AuditLog(tmp_path / "audit.jsonl")
    audit.write(identity="fedring://operator/a", peer="ipv4:1", verb="stop", result="ok")
    for _ in range(100):
        audit.write(identity="nobody", peer="ipv4:2", verb="an unknown method", result="no_identity")
    audit.close()
    (line,) = (tmp_path / "audit.jsonl").read_text().splitlines()
    assert json.loads(line)["verb"] == "stop"
    assert "no_identity" in (tmp_path / "refused.jsonl").read_text()


def test_nobody_else_can_read_the_audit_log_whatever_the_umask_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedring.server.guard.ports._FILE_BYTES", 1000)
    monkeypatch.setattr("fedring.server.guard.ports._FILES", 2)
    (tmp_path / "audit.jsonl").touch(0o644)  # of an earlier version
    before = os.umask(0o022)
    try:
        audit = AuditLog(tmp_path / "audit.jsonl")
        for _ in range(100):
            audit.write(identity="fedring://client/a", peer="ipv4:1", verb="/v", result="no_identity")
        audit.close()
    finally:
        os.umask(before)
    assert [path.stat().st_mode & 0o777 for path in tmp_path.iterdir()] == [0o600] * 4


@pytest.mark.parametrize(
    "text",
    ["", "fedring://client/", "fedring://root/a", "fedring://client/a/b", "http://client/a", "fedring://client/a "],
)
def test_other_uris_name_no_identity(text: str) -> None:
    assert parse_uri(text) is None


def test_an_identity_survives_being_written_as_a_uri() -> None:
    for role in Role:
        assert parse_uri(uri_of(role, "A.b_c-1")) == Identity(role, "A.b_c-1")
    assert peer_name("fedring://client/a") != peer_name("fedring://client/A")
