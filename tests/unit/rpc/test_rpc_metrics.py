"""Metrics of calls: each call is counted on both sides, with the status code that its caller sees."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import nullcontext
from typing import Any

import pytest
from grpc import StatusCode, aio

from fedring.codec.errors import CodecError
from fedring.daemon.metrics import Registry
from fedring.rpc.boundary import Boundary
from fedring.rpc.channel import make_server, open_channel
from fedring.rpc.errors import Overloaded
from fedring.rpc.metrics import CallMetrics, CountCalls, counted
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import federation_pb2_grpc as rpc

JOIN, WATCH = "TrainCmdService/Join", "TrainCmdService/Watch"


class Service(rpc.TrainCmdServiceServicer):
    """Ends calls in the way that the request names."""

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        await self._end(request.client_id, context)
        return pb.JoinReply(session_id="s")

    async def Watch(
        self, request_iterator: AsyncIterator[pb.WatchRequest], context: Any
    ) -> AsyncIterator[pb.ServerEvent]:
        async for request in request_iterator:
            yield pb.ServerEvent(heartbeat=pb.Heartbeat())
            await self._end(request.failure.reason, context)

    async def ReportEvaluation(self, request: pb.EvaluationReport, context: Any) -> pb.EvaluationAck:
        return pb.EvaluationAck()

    async def _end(self, how: str, context: Any) -> None:
        match how:
            case "refuse":
                raise Overloaded("try again")
            case "codec":
                raise CodecError("truncated")
            case "fault":
                raise ZeroDivisionError
            case "abort":
                await context.abort(StatusCode.NOT_FOUND, "as requested")
            case "hang":
                await asyncio.Event().wait()


ENDS = {
    "well": StatusCode.OK,
    "refuse": StatusCode.RESOURCE_EXHAUSTED,
    "codec": StatusCode.INVALID_ARGUMENT,
    "fault": StatusCode.INTERNAL,
    "abort": StatusCode.NOT_FOUND,
}


class Both:
    """A server and a client's channel to it, each with its own metrics."""

    def __init__(self, server: aio.Server, channel: Any, registries: dict[str, Registry]) -> None:
        self.server, self.channel = server, channel
        self._registries = registries
        self.stub: Any = rpc.TrainCmdServiceStub(channel)  # its type is that of a sync channel

    def value(self, side: str, what: str, method: str, **labels: str) -> float:
        value = self._registries[side].get_sample_value(f"grpc_{side}_{what}", {"grpc_method": method, **labels})
        assert value is not None
        return value

    def codes(self, side: str, method: str) -> dict[str, float]:
        """Return how often calls of the method have ended with each code, without the codes that never came."""
        counts = {code.name: self.value(side, "handled_total", method, grpc_code=code.name) for code in StatusCode}
        return {code: count for code, count in counts.items() if count}


@pytest.fixture
async def both() -> AsyncIterator[Both]:
    registries = {"server": Registry(), "client": Registry()}
    sides = {name: CallMetrics(name, registry, [pb.DESCRIPTOR]) for name, registry in registries.items()}
    server = make_server([CountCalls(sides["server"]), Boundary()], max_streams=10)
    rpc.add_TrainCmdServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = counted(open_channel(f"127.0.0.1:{port}"), sides["client"])
    yield Both(server, channel, registries)
    await channel.close()
    await server.stop(None)


async def join(both: Both, client_id: str, **options: Any) -> StatusCode:
    try:
        await both.stub.Join(pb.JoinRequest(client_id=client_id), **options)
    except aio.AioRpcError as error:
        return error.code()
    return StatusCode.OK


@pytest.mark.parametrize(("how", "code"), ENDS.items())
async def test_a_call_is_counted_with_the_code_that_the_caller_sees(both: Both, how: str, code: StatusCode) -> None:
    assert await join(both, how) is code
    await both.server.stop(60)  # The server counts a call after it has answered.
    for side in ("server", "client"):
        assert both.codes(side, JOIN) == {code.name: 1}
        assert both.value(side, "started_total", JOIN) == 1
        assert both.value(side, "handling_seconds_count", JOIN) == 1
        assert both.value(side, "in_flight_calls", JOIN) == 0


@pytest.mark.parametrize(("how", "code"), ENDS.items())
async def test_a_stream_is_counted_with_the_code_that_the_caller_sees(both: Both, how: str, code: StatusCode) -> None:
    call = both.stub.Watch(iter([pb.WatchRequest(failure=pb.Failure(reason=how))]))
    with nullcontext() if code is StatusCode.OK else pytest.raises(aio.AioRpcError):
        assert len([event async for event in call]) == 1
    assert await call.code() is code
    await both.server.stop(60)
    assert both.codes("server", WATCH) == both.codes("client", WATCH) == {code.name: 1}


@pytest.mark.parametrize("early", [False, True], ids=["before-the-status", "after-it"])
async def test_a_write_that_fails_as_the_call_ends_does_not_hide_the_servers_status(both: Both, early: bool) -> None:
    call = both.stub.Watch()
    await call.write(pb.WatchRequest(failure=pb.Failure(reason="refuse")))
    assert await call.read() == pb.ServerEvent(heartbeat=pb.Heartbeat())
    if not early:
        assert await call.code() is StatusCode.RESOURCE_EXHAUSTED
    call._cython_call.set_internal_error("what grpc.aio does when a write fails")
    with pytest.raises(asyncio.InvalidStateError):
        await call.write(pb.WatchRequest())
    for _ in range(2):
        with pytest.raises(aio.AioRpcError, match="try again") as caught:
            await call.read()
        assert caught.value.code() is StatusCode.RESOURCE_EXHAUSTED
    assert sum(both.codes("client", WATCH).values()) == 1
    assert both.value("client", "in_flight_calls", WATCH) == 0


@pytest.mark.slow
async def test_a_call_that_exceeds_its_deadline_is_counted_as_such_on_both_sides(
    both: Both, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedring.rpc.metrics._DEADLINE_SLACK", 3.0)  # A busy server learns late of a call.
    assert await join(both, "well") is StatusCode.OK
    assert await join(both, "hang", timeout=3) is StatusCode.DEADLINE_EXCEEDED
    await both.server.stop(60)  # The server counts a call after it has answered.
    assert both.codes("server", JOIN) == both.codes("client", JOIN) == {"OK": 1, "DEADLINE_EXCEEDED": 1}


async def test_a_stream_is_in_flight_until_its_caller_leaves(both: Both) -> None:
    call = both.stub.Watch(iter([pb.WatchRequest(failure=pb.Failure(reason="hang"))]))
    await anext(aiter(call))
    assert [both.value(side, "in_flight_calls", WATCH) for side in ("server", "client")] == [1, 1]
    assert both.codes("server", WATCH) == {}
    call.cancel()
    await both.server.stop(60)
    assert both.codes("server", WATCH) == both.codes("client", WATCH) == {"CANCELLED": 1}


async def test_bytes_that_are_no_message_are_counted_as_a_bad_request(both: Both) -> None:
    garbage = both.channel.unary_unary("/fedring.v1.TrainCmdService/Join")
    with pytest.raises(aio.AioRpcError):
        await garbage(b"\xff\xff")
    await both.server.stop(60)  # The server counts a call after it has answered.
    assert both.codes("server", JOIN) == {"INVALID_ARGUMENT": 1}


async def test_all_methods_that_do_not_exist_share_one_series(both: Both) -> None:
    nothing = both.channel.unary_unary("/fedring.v1.TrainCmdService/Leave")
    with pytest.raises(aio.AioRpcError):
        await nothing(b"")
    await both.server.stop(60)
    with pytest.raises(AssertionError):
        both.codes("server", "TrainCmdService/Leave")
    assert both.codes("server", "unknown") == {"UNIMPLEMENTED": 1}


async def test_bytes_are_counted_as_they_are_on_the_wire(both: Both) -> None:
    request, reply = pb.JoinRequest(client_id="fine"), pb.JoinReply(session_id="s")
    assert await join(both, "fine") is StatusCode.OK
    sizes = request.ByteSize() + 5, reply.ByteSize() + 5
    assert (both.value("client", "sent_bytes_total", JOIN), both.value("client", "received_bytes_total", JOIN)) == sizes
    assert (both.value("server", "received_bytes_total", JOIN), both.value("server", "sent_bytes_total", JOIN)) == sizes


async def test_every_method_and_code_has_a_series_before_the_first_call(both: Both) -> None:
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            assert both.codes("server", f"{service.name}/{method.name}") == {}
