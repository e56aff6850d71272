"""A long line on one host: a proxy that delays bytes, and keeps at most a window of each connection's under way.

    python -m tests.bench.long_line --port 7001 --target 127.0.0.1:7000 --delay 0.05 --window 4194304

A TCP connection over a long line has at most its window of bytes under way, each of which counts until its receipt has
come back. Linux lets a window grow to 4 MiB (net.ipv4.tcp_wmem), unless it is told otherwise. Prints "ready" when it
listens.
"""

import argparse
import asyncio
from asyncio import StreamReader, StreamWriter
from contextlib import suppress

_PIECE = 1 << 18  # bytes


async def main() -> None:
    """Serve until the process is ended."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True, help="port to listen on")
    parser.add_argument("--target", required=True, help="host:port that connections lead to")
    parser.add_argument("--delay", type=float, default=0.05, help="seconds for each way")
    parser.add_argument("--window", type=int, default=4 << 20, help="bytes of a connection that are under way at most")
    args = parser.parse_args()
    host, _, port = args.target.rpartition(":")

    async def serve(reader: StreamReader, writer: StreamWriter) -> None:
        with suppress(OSError):
            onward, back = await asyncio.open_connection(host, int(port))
            await asyncio.gather(
                _carry(reader, back, args.delay, args.window), _carry(onward, writer, args.delay, args.window)
            )

    server = await asyncio.start_server(serve, "127.0.0.1", args.port)
    print("ready", flush=True)
    await server.serve_forever()


async def _carry(reader: StreamReader, writer: StreamWriter, delay: float, window: int) -> None:
    """Carry one direction of a connection to its end."""
    loop = asyncio.get_running_loop()
    line: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
    room = asyncio.Condition()
    under_way = 0

    def has_room() -> bool:
        return under_way < window

    async def receipt(size: int) -> None:
        nonlocal under_way
        await asyncio.sleep(delay)
        async with room:
            under_way -= size
            room.notify_all()

    async def arrive() -> None:
        receipts = set()
        while True:
            due, piece = await line.get()
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not piece:
                writer.close()
                return
            writer.write(piece)
            await writer.drain()
            receipts.add(task := asyncio.create_task(receipt(len(piece))))
            task.add_done_callback(receipts.discard)

    arrivals = asyncio.create_task(arrive())
    with suppress(OSError):
        while piece := await reader.read(_PIECE):
            async with room:
                await room.wait_for(has_room)
                under_way += len(piece)
            line.put_nowait((loop.time() + delay, piece))
    line.put_nowait((loop.time() + delay, b""))
    with suppress(OSError):
        await arrivals


if __name__ == "__main__":
    with suppress(KeyboardInterrupt):
        asyncio.run(main())
