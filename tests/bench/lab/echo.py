"""A bare echo of grpc.aio, to compare with: python -m tests.bench.lab.echo serve|ask ...

    python -m tests.bench.lab.echo serve
    python -m tests.bench.lab.echo ask ADDRESS CHANNELS BYTES SECONDS

The server prints its address, and ends when its input does. Each channel keeps one stream open, over which a message
goes there and back again and again. Nothing is parsed or kept.
"""

import asyncio
import subprocess
import sys
from typing import Any

import grpc
from grpc import aio

from tests.bench.lab.daemons import cpu_seconds

_METHOD = "/echo/Echo"


async def serve() -> None:
    """Echo until the standard input ends."""

    async def echo(_request: Any, context: Any) -> None:
        while (message := await context.read()) is not aio.EOF:
            await context.write(message)

    server = aio.server()
    handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"Echo": grpc.stream_stream_rpc_method_handler(echo)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("echo", handlers),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    await asyncio.to_thread(sys.stdin.read)
    await server.stop(0)


async def ask(address: str, channels: int, size: int, seconds: float) -> int:
    """Send messages for some seconds over all channels, and return how many came back."""
    message, came = bytes(size), 0

    async def one(number: int) -> None:
        nonlocal came
        options = [("grpc.use_local_subchannel_pool", 1)]  # a connection of its own
        async with aio.insecure_channel(address, options) as channel:
            stream: Any = channel.stream_stream(_METHOD)()
            while asyncio.get_running_loop().time() < end:
                await stream.write(message)
                await stream.read()
                came += 1
            await stream.done_writing()

    end = asyncio.get_running_loop().time() + seconds
    async with asyncio.TaskGroup() as tasks:
        for number in range(channels):
            tasks.create_task(one(number))
    return came


def server_seconds(processes: int, channels: int, size: int, seconds: float) -> float:
    """Return the processor seconds that an echo costs the process that echoes.

    Args:
        processes: Processes that ask.
        channels: Channels of each of them.
        size: Bytes of a message.
        seconds: How long they ask.
    """
    command = [sys.executable, "-m", "tests.bench.lab.echo"]
    with subprocess.Popen([*command, "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as server:
        if server.stdin is None or server.stdout is None:
            raise RuntimeError("the server has no pipes")
        address = f"127.0.0.1:{server.stdout.readline().strip()}"
        before = cpu_seconds([server.pid])
        asks = [*command, "ask", address, str(channels), str(size), str(seconds)]
        asking = [subprocess.Popen(asks, stdout=subprocess.PIPE, text=True) for _ in range(processes)]
        came = sum(int(each.communicate()[0]) for each in asking)
        used = cpu_seconds([server.pid]) - before
        server.stdin.close()
    return used / came


def main() -> None:
    """Serve, or ask, as the command line says."""
    match sys.argv[1:]:
        case ["serve"]:
            asyncio.run(serve())
        case ["ask", address, channels, size, seconds]:
            print(asyncio.run(ask(address, int(channels), int(size), float(seconds))))


if __name__ == "__main__":
    main()
