"""The bound on grpcio may go as soon as its newest version answers a path that is no UTF-8."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.system.test_wire_refusals import frame

from fedring.requirements import GRPCIO_BELOW

SCRIPT = """
import asyncio, socket
import grpc
from grpc import aio

async def main():
    server = aio.server()
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    def call():
        with socket.create_connection(("127.0.0.1", port), 20) as peer:
            peer.sendall(bytes.fromhex("{sent}"))
            peer.settimeout(3)
            try:
                while peer.recv(4096):
                    pass
            except TimeoutError:
                pass
    await asyncio.to_thread(call)
    async with aio.insecure_channel(f"127.0.0.1:{{port}}") as channel:
        try:
            await channel.unary_unary("/a.B/c")(b"", timeout=10)
        except aio.AioRpcError as error:
            print(grpc.__version__, error.code().name)

asyncio.run(main())
"""


@pytest.mark.soak
def test_the_newest_grpcio_still_lets_a_strange_path_end_a_port(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--target", str(tmp_path), "grpcio"]
    if subprocess.run(pip, check=False, capture_output=True).returncode:
        pytest.skip("there is no package index")
    headers = {":method": "POST", ":scheme": "http", ":path": "/\xe6", ":authority": "x"}
    headers |= {"te": "trailers", "content-type": "application/grpc"}
    fields = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
    block = b"".join(bytes([0, len(name)]) + name + bytes([len(value)]) + value for name, value in fields)
    sent = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0) + frame(1, 5, 1, block)
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-c", SCRIPT.format(sent=sent.hex())]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    found, code = done.stdout.split()
    major, minor = found.split(".")[:2]
    assert (int(major), int(minor)) >= GRPCIO_BELOW
    assert code != "UNIMPLEMENTED", f"grpcio {found} goes on: take away GRPCIO_BELOW and the bound in pyproject.toml"
