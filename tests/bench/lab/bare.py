"""The least that a round of a large model can cost a server: python -m tests.bench.lab.bare serve|call ...

    python -m tests.bench.lab.bare serve FOLDER BYTES [mean]
    python -m tests.bench.lab.bare call PORT BYTES

In every round, each client downloads the same bytes, and uploads as many. The server is a plain one of grpc.aio, with
fl-server's options and sizes of messages. It writes each upload to a file, takes its BLAKE3 digest on the way, and
syncs it. It keeps the uploads of two rounds, as fl-server does by default: fresh pages for a file cost the kernel more
than some that were just freed. Each client is a process of its own. The server prints its port. A line on the input of
a client begins its next round, and one on the server's input ends the round; both answer with a line, and end when
their input does.

What a round of fl-server does beyond that, and this server leaves out: checks of the values that came, the mean of the
updates, the new model's file with its digests and its sync, a second check of each digest when the model and the
updates are read, and the database. With `mean`, the server does the least of it that makes a next model: it adds up the
uploads in float32 and in the order in which they came, and writes, digests and syncs the result, which is sent in the
next round. Nothing is checked then, either.
"""

import asyncio
import contextlib
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import numpy as np
from blake3 import blake3
from grpc import aio

from fedring.rpc.channel import CLIENT_OPTIONS, SERVER_OPTIONS
from fedring.rpc.chunks import CHUNK_BYTES
from tests.bench.lab.daemons import ROOT, cpu_seconds, peak_bytes

_DOWN, _UP = "/bare/Down", "/bare/Up"
_PROGRAM = [sys.executable, "-m", "tests.bench.lab.bare"]


@dataclass(frozen=True, slots=True)
class BareRounds:
    """The costs of some rounds of a bare server."""

    round_seconds: list[float]
    server_cpu_seconds_per_round: float
    server_peak_bytes: int


def bare_rounds(clients: int, size: int, rounds: int, folder: Path, *, mean: bool) -> BareRounds:
    """Let a bare server do some rounds, after one that is not counted.

    Args:
        clients: Clients of each round.
        size: Bytes that each of them downloads, and uploads.
        rounds: Rounds to count.
        folder: A folder for the server's files.
        mean: Whether each round makes the next model.
    """
    with contextlib.ExitStack() as stack:
        begin = partial(_begin, stack)
        server = begin("serve", str(folder), str(size), *(["mean"] if mean else []))
        port = _line(server)
        calling = [begin("call", port, str(size)) for _ in range(clients)]

        def round_() -> float:
            began = time.perf_counter()
            for group in (calling, [server]):
                for each in group:
                    _tell(each)
                for each in group:
                    _line(each)
            return time.perf_counter() - began

        round_()
        before = cpu_seconds([server.pid])
        seconds = [round_() for _ in range(rounds)]
        return BareRounds(seconds, (cpu_seconds([server.pid]) - before) / rounds, peak_bytes(server.pid))


class _Rounds:
    """A folder with one model, and the uploads of the round in progress."""

    def __init__(self, folder: Path, size: int) -> None:
        self._folder, self._size = folder, size
        self._model = os.open(folder / "model", os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        for offset in range(0, size, CHUNK_BYTES):
            os.pwrite(self._model, bytes(min(CHUNK_BYTES, size - offset)), offset)
        self._uploads: list[int] = []  # of the round in progress
        self._old: list[int] = []  # of the round before

    def handlers(self) -> grpc.GenericRpcHandler:
        """Return the handlers of both calls, whose messages are bytes."""
        stream = grpc.stream_stream_rpc_method_handler
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {"Down": stream(self._down), "Up": stream(self._up)}
        return grpc.method_handlers_generic_handler("bare", handlers)

    def end(self, *, mean: bool) -> None:
        """End the round, and make the next model if there is to be one."""
        if mean:
            self._write_mean()
        for file in self._old:
            os.close(file)
        self._old, self._uploads = self._uploads, []

    async def _down(self, _requests: Any, context: Any) -> None:
        for offset in range(0, self._size, CHUNK_BYTES):
            await context.write(os.pread(self._model, min(CHUNK_BYTES, self._size - offset), offset))

    async def _up(self, _requests: Any, context: Any) -> None:
        path = self._folder / f"upload-{len(self._uploads)}"
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._uploads.append(file)
        digest = blake3()
        while (data := await context.read()) is not aio.EOF:
            os.write(file, data)
            digest.update(data)
        await asyncio.to_thread(os.fsync, file)
        path.unlink()  # its bytes stay until the file is closed
        await context.write(digest.digest())

    def _write_mean(self) -> None:
        digest, count = blake3(), len(self._uploads)
        sums, parts = np.empty(CHUNK_BYTES // 4, np.float32), np.empty(CHUNK_BYTES // 4, np.float32)
        for offset in range(0, self._size, CHUNK_BYTES):
            values, part = (each[: (self._size - offset) // 4] for each in (sums, parts))
            values.fill(0)
            for file in self._uploads:
                os.preadv(file, [part.data], offset)
                values += part
            values /= count
            os.preadv(self._model, [part.data], offset)
            values += part
            os.pwrite(self._model, values.data, offset)
            digest.update(values.data.cast("B"))
        os.fsync(self._model)


async def _serve(folder: Path, size: int, *, mean: bool) -> None:
    rounds, server = _Rounds(folder, size), aio.server(options=SERVER_OPTIONS)
    server.add_generic_rpc_handlers((rounds.handlers(),))
    print(server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    while await asyncio.to_thread(sys.stdin.readline):
        await asyncio.to_thread(rounds.end, mean=mean)
        print(flush=True)
    await server.stop(0)


async def _call(port: str, size: int) -> None:
    message = np.ones(CHUNK_BYTES // 4, np.float32).tobytes()
    async with aio.insecure_channel(f"127.0.0.1:{port}", options=CLIENT_OPTIONS) as channel:
        while await asyncio.to_thread(sys.stdin.readline):
            down: Any = channel.stream_stream(_DOWN)()
            await down.done_writing()
            while await down.read() is not aio.EOF:
                pass
            up: Any = channel.stream_stream(_UP)()
            for offset in range(0, size, CHUNK_BYTES):
                await up.write(message[: size - offset])
            await up.done_writing()
            await up.read()
            print(flush=True)


def _begin(stack: contextlib.ExitStack, *args: str) -> "subprocess.Popen[str]":
    """Start this module as a program, which ends with the stack."""
    process = subprocess.Popen([*_PROGRAM, *args], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    stack.enter_context(process)
    if process.stdin is None:
        raise RuntimeError("a process has no pipes")
    stack.callback(process.stdin.close)
    return process


def _tell(process: "subprocess.Popen[str]") -> None:
    if process.stdin is None:
        raise RuntimeError("a process has no pipes")
    process.stdin.write("\n")
    process.stdin.flush()


def _line(process: "subprocess.Popen[str]") -> str:
    line = process.stdout.readline() if process.stdout is not None else ""
    if not line:
        raise RuntimeError("a process of the bare rounds has ended")
    return line.strip()


def main() -> None:
    """Serve, or call, as the command line says."""
    match sys.argv[1:]:
        case ["serve", folder, size, *mean]:
            asyncio.run(_serve(Path(folder), int(size), mean=mean == ["mean"]))
        case ["call", port, size]:
            asyncio.run(_call(port, int(size)))


if __name__ == "__main__":
    main()
