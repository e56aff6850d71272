"""The boundary: a caller sees a status, one sentence and a reason, and never a traceback."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from google.protobuf.empty_pb2 import Empty
from grpc import StatusCode, aio

from fedring.codec.errors import CodecError
from fedring.rpc.boundary import MOST_LETTERS, Boundary
from fedring.rpc.channel import make_server
from fedring.rpc.errors import BadRequest, Gone, IdInUse, Overloaded, reason_in, reason_of, retry_seconds_of
from fedring.rpc.streams import after_write, write, write_whole
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import federation_pb2_grpc as rpc


class Service(rpc.TrainCmdServiceServicer):
    """A service that raises the error that the client's name asks for."""

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        if request.client_id == "say":
            raise BadRequest(request.software)
        await self._fail(request.client_id, context)
        return pb.JoinReply(session_id="s")

    async def Watch(
        self, request_iterator: AsyncIterator[pb.WatchRequest], context: Any
    ) -> AsyncIterator[pb.ServerEvent]:
        yield pb.ServerEvent(heartbeat=pb.Heartbeat())
        async for request in request_iterator:
            await self._fail(request.failure.reason, context)

    async def ReportEvaluation(self, request: pb.EvaluationReport, context: Any) -> pb.EvaluationAck:
        return pb.EvaluationAck()

    async def _fail(self, how: str, context: Any) -> None:
        match how:
            case "refuse":
                raise Overloaded("try again", reason="busy")
            case "taken":
                raise IdInUse("try again", retry_seconds=2.5)
            case "gone":
                raise Gone("the session was closed")
            case "codec":
                raise CodecError("truncated", "3 of 4 bytes")
            case "fault":
                raise ZeroDivisionError("a secret of ours")
            case "abort":
                await context.abort(StatusCode.NOT_FOUND, "as meant")


EXPECTED = [
    ("refuse", StatusCode.RESOURCE_EXHAUSTED, "busy", "try again"),
    ("codec", StatusCode.INVALID_ARGUMENT, "truncated", "truncated: 3 of 4 bytes"),
    ("fault", StatusCode.INTERNAL, "internal", "internal error"),
    ("abort", StatusCode.NOT_FOUND, "not_found", "as meant"),
]


@pytest.fixture
async def address() -> AsyncIterator[str]:
    server = make_server([Boundary()], max_streams=10)
    rpc.add_TrainCmdServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)


@pytest.mark.parametrize(("how", "code", "reason", "text"), EXPECTED)
async def test_an_error_of_a_unary_call_becomes_a_status(
    address: str, how: str, code: StatusCode, reason: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with aio.insecure_channel(address) as channel:
        with pytest.raises(aio.AioRpcError) as refused:
            await rpc.TrainCmdServiceStub(channel).Join(pb.JoinRequest(client_id=how))
    assert (refused.value.code(), reason_of(refused.value), refused.value.details()) == (code, reason, text)
    assert ("ZeroDivisionError" in caplog.text) == (how == "fault")  # only the log names the fault, not the status


@pytest.mark.parametrize(("how", "code", "reason", "text"), EXPECTED)
async def test_an_error_of_a_stream_becomes_a_status(
    address: str, how: str, code: StatusCode, reason: str, text: str
) -> None:
    async with aio.insecure_channel(address) as channel:
        requests = iter([pb.WatchRequest(failure=pb.Failure(reason=how))])
        events = rpc.TrainCmdServiceStub(channel).Watch(requests)
        with pytest.raises(aio.AioRpcError) as refused:
            [event async for event in events]
    assert (refused.value.code(), reason_of(refused.value), refused.value.details()) == (code, reason, text)


async def test_a_call_that_a_stopping_server_cuts_off_has_no_reason() -> None:
    server = make_server([Boundary()], max_streams=10)
    rpc.add_TrainCmdServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        events: Any = rpc.TrainCmdServiceStub(channel).Watch()
        assert (await events.read()).HasField("heartbeat")
        await server.stop(None)
        assert await events.code() is StatusCode.UNAVAILABLE
        assert reason_in(await events.trailing_metadata()) == ""


async def test_a_refusal_can_say_for_how_long_to_retry(address: str) -> None:
    async with aio.insecure_channel(address) as channel:
        with pytest.raises(aio.AioRpcError) as refused:
            await rpc.TrainCmdServiceStub(channel).Join(pb.JoinRequest(client_id="taken"))
    assert (refused.value.code(), reason_of(refused.value)) == (StatusCode.ALREADY_EXISTS, "id_in_use")
    assert retry_seconds_of(refused.value) == 2.5


async def test_a_call_that_succeeds_returns_its_reply(address: str) -> None:
    async with aio.insecure_channel(address) as channel:
        reply = await rpc.TrainCmdServiceStub(channel).Join(pb.JoinRequest(client_id="fine"))
    assert reply.session_id == "s"


async def test_bytes_that_are_not_a_message_are_a_bad_request(address: str) -> None:
    async with aio.insecure_channel(address) as channel:
        join: Any = channel.unary_unary("/fedring.v1.TrainCmdService/Join")
        with pytest.raises(aio.AioRpcError) as refused:
            await join(b"\xff\xff")
    assert (refused.value.code(), reason_of(refused.value)) == (StatusCode.INVALID_ARGUMENT, "bad_request")


@pytest.mark.parametrize(
    "path",
    ["", "x", "/", "//", "/x", "/a/b/c", "/fedring.v1.TrainCmdService/Leave", "/no.Such/Method", "/" + "y" * 7000],
)
async def test_a_method_that_does_not_exist_is_refused_with_its_reason(
    address: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with aio.insecure_channel(address) as channel:
        call: Any = channel.unary_unary(path)
        with pytest.raises(aio.AioRpcError) as refused:
            await call(Empty().SerializeToString())
        with pytest.raises(aio.AioRpcError) as streamed:
            await channel.stream_stream(path)(iter([b""])).read()  # type: ignore[arg-type]  # any iterable works
    for error in (refused.value, streamed.value):
        assert (error.code(), reason_of(error)) == (StatusCode.UNIMPLEMENTED, "unknown_method")
        assert f"the method {path[:100]!r} is not served at this port" in (error.details() or "")
    assert max(len(record.getMessage()) for record in caplog.records) < 1000


@pytest.mark.parametrize("letter", ["x", "\N{GRINNING FACE}"])
async def test_a_long_error_text_is_shortened_so_that_the_reason_still_arrives(
    address: str, letter: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with aio.insecure_channel(address) as channel:
        with pytest.raises(aio.AioRpcError) as refused:
            await rpc.TrainCmdServiceStub(channel).Join(pb.JoinRequest(client_id="say", software=letter * 100_000))
    assert (refused.value.code(), reason_of(refused.value)) == (StatusCode.INVALID_ARGUMENT, "bad_request")
    assert refused.value.details() == letter * (MOST_LETTERS - 3) + "..."
    assert len(caplog.records[-1].getMessage()) < 1000


async def test_a_call_whose_session_was_closed_is_cancelled_without_a_line_in_the_log(
    address: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with aio.insecure_channel(address) as channel:
        with pytest.raises(aio.AioRpcError) as refused:
            await rpc.TrainCmdServiceStub(channel).Join(pb.JoinRequest(client_id="gone"))
    assert (refused.value.code(), reason_of(refused.value)) == (StatusCode.CANCELLED, "gone")
    assert "refused" not in caplog.text


class SlowContext:
    """The context of a call whose write ends when the test says so."""

    def __init__(self) -> None:
        self.started, self.may_end, self.ended = asyncio.Event(), asyncio.Event(), False

    async def write(self, _: Any) -> None:
        self.started.set()
        await self.may_end.wait()
        self.ended = True


async def test_a_write_that_has_started_ends_before_its_call_does() -> None:
    context = SlowContext()
    writing = asyncio.create_task(write(context, b"", seconds=60))
    await context.started.wait()
    writing.cancel()
    context.may_end.set()
    await asyncio.wait([writing])
    assert writing.cancelled()
    assert context.ended  # otherwise, grpc would lose the status that follows


async def test_a_status_waits_for_the_write_that_has_started() -> None:
    context, writing, ended = SlowContext(), asyncio.Lock(), list[bool]()

    async def speak() -> None:
        async with writing:
            await write_whole(context, b"")

    async def end() -> None:
        await after_write(writing)
        ended.append(context.ended)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(speak())
        await context.started.wait()
        tasks.create_task(end())
        context.may_end.set()
    assert ended == [True]
    assert writing.locked()  # so that no other write begins before the status


async def test_a_write_that_nobody_reads_holds_up_a_status_for_a_moment_only() -> None:
    writing = asyncio.Lock()
    await writing.acquire()
    async with asyncio.timeout(60):
        await after_write(writing)
