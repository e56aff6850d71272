"""The entrance of a port: strangers with raw sockets lose their connections, and everybody else is answered."""

import asyncio
import fcntl
import os
import resource
import select
import socket
import struct
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from grpc import StatusCode, aio
from tests.floods import JOIN, PING, PREFACE, SETTINGS, Line, frame, headers, pings, resets
from tests.waiting import until

from fedring.rpc.boundary import Boundary
from fedring.rpc.channel import make_server
from fedring.rpc.errors import reason_in, reason_of
from fedring.server.guard.callers import MOST_RESETS, Callers
from fedring.server.guard.entrance import Entrance
from fedring.server.guard.sockets import Port, address_of, dropping, peer_of
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import federation_pb2_grpc as rpc

SECONDS = 60.0
HONEST, STRANGER = "127.0.0.1", "127.0.0.2"


class Service(rpc.TrainCmdServiceServicer):
    """A service whose Join answers at once, and whose Watch lasts until its caller has said all."""

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        return pb.JoinReply(session_id=request.client_id)

    async def Watch(
        self, request_iterator: AsyncIterator[pb.WatchRequest], context: Any
    ) -> AsyncIterator[pb.ServerEvent]:
        async for _ in request_iterator:
            yield pb.ServerEvent(heartbeat=pb.Heartbeat())

    async def ReportEvaluation(self, request: pb.EvaluationReport, context: Any) -> pb.EvaluationAck:
        return pb.EvaluationAck()


@asynccontextmanager
async def serving(callers: Callers, *, message_seconds: float = SECONDS) -> AsyncIterator[tuple[int, Entrance]]:
    """Serve on any port, with the limits of `callers`."""
    entrance = Entrance(callers, message_seconds)
    server = make_server([Boundary(), entrance], max_streams=100)
    rpc.add_TrainCmdServiceServicer_to_server(Service(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    entrance.listen_at(f"127.0.0.1:{port}")
    await server.start()
    looking = asyncio.create_task(entrance.look_after_connections())
    try:
        yield port, entrance
    finally:
        looking.cancel()
        await server.stop(None)


async def joins(port: int) -> bool:
    """Return whether an honest caller is answered."""
    async with aio.insecure_channel(f"{HONEST}:{port}") as channel:
        reply = await rpc.TrainCmdServiceStub(channel).Join(pb.JoinRequest(client_id="a"), timeout=SECONDS)
    return bool(reply.session_id == "a")


def dial(port: int, source: str = STRANGER) -> socket.socket:
    return socket.create_connection((HONEST, port), timeout=SECONDS, source_address=(source, 0))


def until_answered(line: socket.socket) -> None:
    """Send one ping and return when its answer has come: the other side has then read all before it."""
    line.sendall(PING)
    read = b""
    while PING[9:] not in read:
        more = line.recv(1 << 16)
        assert more
        read += more


async def until_closed(line: socket.socket) -> None:
    """Read until the other side has closed the connection."""

    def read() -> None:
        with suppress(ConnectionError):
            while line.recv(1 << 16):
                pass

    with line:
        await asyncio.to_thread(read)


async def until_ended(port: int, script: Iterator[bytes]) -> None:
    """Flood over one connection, as a stranger, until the other side has closed it.

    It reads what is answered: gRPC takes nothing more from a connection that leaves too many answers unread.
    """

    def talk() -> None:
        line = Line((HONEST, port), STRANGER, script)
        with line.socket, suppress(ConnectionError):
            while True:
                readable, writable, _ = select.select([line.socket], [line.socket], [])
                if readable and not line.socket.recv(1 << 16):
                    return
                if writable:
                    with suppress(BlockingIOError):
                        line.send()

    await asyncio.wait_for(asyncio.to_thread(talk), SECONDS)


@pytest.mark.parametrize("flood_of", [resets, pings])
async def test_a_flood_on_one_connection_is_ended_and_others_are_answered(flood_of: Any) -> None:
    async with serving(Callers(100, 100)) as (port, _):
        ended = asyncio.create_task(until_ended(port, flood_of()))
        assert await joins(port)
        await ended
        assert await joins(port)


async def test_resets_are_ended_before_the_next_look_is_due(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedring.server.guard.entrance._LOOK_SECONDS", 2 * SECONDS)
    async with serving(Callers(100, 100)) as (port, _):
        await until_ended(port, resets())


async def test_a_blocked_address_cannot_connect_again_and_others_can() -> None:
    callers = Callers(100, 100)
    async with serving(callers) as (port, _):
        await until_ended(port, resets())
        assert callers.blocked(asyncio.get_running_loop().time()) == [address_of(STRANGER)]
        with pytest.raises(TimeoutError):
            await asyncio.to_thread(socket.create_connection, (HONEST, port), 0.5, (STRANGER, 0))
        assert await joins(port)


async def test_an_exempt_address_may_cancel_as_much_as_it_likes() -> None:
    callers = Callers(100, 100, [STRANGER])
    async with serving(callers) as (port, _):
        with dial(port) as line:
            stream = resets()
            line.sendall(b"".join(next(stream) for _ in range(9 * MOST_RESETS)))
            await asyncio.to_thread(until_answered, line)
            assert callers.blocked(asyncio.get_running_loop().time()) == []
            assert [each.address for each in Port(port).connections()] == [address_of(STRANGER)]


async def test_connections_beyond_those_of_one_address_are_closed() -> None:
    async with serving(Callers(100, 3)) as (port, _), AsyncExitStack() as stack:
        lines = [stack.enter_context(dial(port)) for _ in range(5)]
        for line in lines:
            line.sendall(PREFACE + SETTINGS)
        ended = [asyncio.create_task(until_closed(line)) for line in lines]
        done: set[Any] = set()
        while len(done) < 2:
            done, _ = await asyncio.wait(ended, timeout=SECONDS, return_when=asyncio.FIRST_COMPLETED)
            assert done
        assert len(Port(port).connections()) == 3
        assert await joins(port)


async def test_connections_beyond_those_of_the_port_are_closed_from_whatever_address_they_come() -> None:
    server = make_server([Boundary()], max_streams=10, max_connections=3)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    with ExitStack() as stack:
        lines = [stack.enter_context(dial(port, f"127.0.0.{number}")) for number in range(2, 5)]
        for line in lines:
            line.sendall(PREFACE + SETTINGS)
            await asyncio.to_thread(until_answered, line)
        await asyncio.wait_for(until_closed(dial(port, "127.0.0.5")), 10.0)  # before a handshake would end
        for line in lines:
            await asyncio.to_thread(until_answered, line)
    await server.stop(None)


async def test_a_connection_is_told_how_many_calls_it_may_make_at_once() -> None:
    async with serving(Callers(100, 100)) as (port, _):
        with dial(port) as line:
            line.sendall(PREFACE + SETTINGS)
            read = b""
            while struct.pack(">HI", 3, 512) not in read:  # SETTINGS_MAX_CONCURRENT_STREAMS
                more = await asyncio.to_thread(line.recv, 1 << 16)
                assert more
                read += more


async def test_to_look_at_the_connections_leaves_the_locks_of_files(tmp_path: Path) -> None:
    attempt = "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+b'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    path = tmp_path / "database"
    with path.open("w+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX)
        async with serving(Callers(100, 100)) as (port, _):
            with dial(port):
                assert await joins(port)
                found = Port(port)
                assert found.connections()
                found.block([address_of(STRANGER)])
        other = await asyncio.create_subprocess_exec(sys.executable, "-c", attempt, path, stderr=subprocess.PIPE)
        assert b"BlockingIOError" in (await other.communicate())[1]


async def test_each_socket_is_asked_only_once_whose_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(Callers(100, 100)) as (port, _):
        found = Port(port)
        with dial(port) as line, dial(port) as other:
            await asyncio.to_thread(until, lambda: len(found.connections()) == 2)
            before = found.connections()
            with monkeypatch.context() as patch:
                patch.delattr(Port, "_identify")
                assert found.connections() == before
            other.close()
            await asyncio.to_thread(until, lambda: len(found.connections()) == 1)
            (left,) = found.connections()
            assert left in before
            assert left.peer == peer_of(STRANGER, line.getsockname()[1])
            former = replace(left, number=left.number + 1)  # the descriptor has become another connection's
            former.end()
            assert former.traffic() == (0, 0)
            assert found.connections() == [left]
            line.sendall(PREFACE + SETTINGS)
            await asyncio.to_thread(until_answered, line)


async def test_a_server_without_descriptors_goes_on_and_looks_again_later(caplog: pytest.LogCaptureFixture) -> None:
    callers = Callers(100, 100)
    async with serving(callers) as (port, _), aio.insecure_channel(f"{HONEST}:{port}") as channel:
        stub = rpc.TrainCmdServiceStub(channel)
        assert await stub.Join(pb.JoinRequest(client_id="a"))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.dup(0)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))  # all below are taken
        try:
            await asyncio.to_thread(until, lambda: "cannot look at the connections" in caplog.text)
            assert await stub.Join(pb.JoinRequest(client_id="a"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
            os.close(lowest)
        await until_ended(port, resets())
        assert callers.blocked(asyncio.get_running_loop().time())


async def test_an_upload_that_is_refused_is_no_flood() -> None:
    callers = Callers(100, 100)
    async with serving(callers) as (port, _):
        found = Port(port)
        with dial(port) as line:
            line.sendall(PREFACE + SETTINGS + headers(1, "/fedring.v1.Nothing/Upload"))  # which nobody serves
            chunk = frame(0, 0, 1, bytes(1 << 14))
            line.sendall(3 * chunk)  # as much as may be on its way
            await asyncio.to_thread(until_answered, line)
            (connection,) = found.connections()
            assert callers.look([connection], 0.0) == []
            line.sendall(8 * chunk)
            await asyncio.to_thread(until, lambda: connection.traffic()[0] >= 11 << 14)
            assert callers.look([connection], 1.0) == []
            assert callers.blocked(1.0) == []


async def test_calls_beyond_those_of_one_address_are_refused_with_a_reason() -> None:
    async with serving(Callers(1, 100)) as (port, _), aio.insecure_channel(f"{HONEST}:{port}") as channel:
        stub = rpc.TrainCmdServiceStub(channel)
        watch: Any = stub.Watch()
        await watch.write(pb.WatchRequest())
        assert (await watch.read()).HasField("heartbeat")
        with pytest.raises(aio.AioRpcError) as refused:
            await stub.Join(pb.JoinRequest(client_id="a"))
        assert (refused.value.code(), reason_of(refused.value)) == (StatusCode.RESOURCE_EXHAUSTED, "too_many_calls")
        await watch.done_writing()
        assert await watch.read() is aio.EOF
        assert (await stub.Join(pb.JoinRequest(client_id="b"))).session_id == "b"


async def test_a_call_whose_message_never_comes_ends() -> None:
    limits = Callers(100, 100)
    async with serving(limits, message_seconds=0.05) as (port, _), aio.insecure_channel(f"{HONEST}:{port}") as channel:
        join: Any = channel.stream_stream(JOIN)()
        assert await join.code() is StatusCode.DEADLINE_EXCEEDED
        assert reason_in(await join.trailing_metadata()) == "stalled"


async def test_a_call_without_a_message_is_a_bad_request() -> None:
    async with serving(Callers(100, 100)) as (port, _), aio.insecure_channel(f"{HONEST}:{port}") as channel:
        join: Any = channel.stream_stream(JOIN)()
        await join.done_writing()
        assert await join.code() is StatusCode.INVALID_ARGUMENT


def run(program: list[tuple[int, int, int, int]], packet: bytes) -> int:
    """Run a program of classic BPF on a packet that begins with the header of IP, as the kernel does."""
    register, place = 0, 0
    while True:
        code, if_true, if_false, operand = program[place]
        place += 1
        at = operand - 0xFFF00000
        match code:
            case 0x30:
                register = packet[at]
            case 0x20:
                (register,) = struct.unpack_from(">I", packet, at)
            case 0x74:
                register >>= operand
            case 0x05:
                place += operand
            case 0x15:
                place += if_true if register == operand else if_false
            case 0x06:
                return operand


def packet_from(host: str) -> bytes:
    """Return the header of IP of a packet from this host."""
    if ":" in host:
        return b"\x60" + bytes(7) + socket.inet_pton(socket.AF_INET6, host) + bytes(16)
    return b"\x45" + bytes(11) + socket.inet_aton(host) + bytes(4)


@pytest.mark.parametrize("others", [0, 1, 200])
def test_the_filter_drops_packets_of_its_addresses_and_no_others(others: int) -> None:
    dropped = ["10.0.0.7", "fd00::7", "10.1.2.3", "fd00:0:0:1::1"]
    more = [f"10.9.{number // 250}.{number % 250}" for number in range(others)]
    more += [f"fd01:0:0:{number:x}::1" for number in range(others)]
    program = dropping([address_of(host) for host in [*more, *dropped]])
    assert [run(program, packet_from(host)) for host in dropped] == [0] * len(dropped)
    kept = ["10.0.0.8", "127.0.0.1", "fd00:0:0:2::7", "::1", "0.0.0.0"]
    assert all(run(program, packet_from(host)) == 0xFFFFFFFF for host in kept)
    assert run(program, packet_from("fd00::9")) == 0  # of the same half as one that is dropped
