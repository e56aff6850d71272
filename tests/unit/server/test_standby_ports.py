"""A standby that must lead at once: its ports are free again."""

import asyncio
from contextlib import suppress
from types import SimpleNamespace
from typing import Any

from tests.ports import free_port

from fedring.rpc.channel import make_server
from fedring.server.standby import _serve


async def test_a_standby_that_is_cancelled_while_it_starts_leaves_its_ports() -> None:
    addresses = [f"127.0.0.1:{free_port()}" for _ in range(2)]
    servers = [make_server([], max_streams=4) for _ in addresses]
    for server, address in zip(servers, addresses, strict=True):
        server.add_insecure_port(address)
    ports: Any = SimpleNamespace(servers=servers, pages=[])
    parts: Any = SimpleNamespace(journal=SimpleNamespace(close=lambda: None))
    lead: Any = None  # which nobody is told of before the servers have started
    serving = asyncio.create_task(_serve(parts, ports, lead))
    await asyncio.sleep(0)  # it has begun to start them
    serving.cancel()
    with suppress(asyncio.CancelledError):
        await serving
    leader = make_server([], max_streams=4)
    for address in addresses:
        leader.add_insecure_port(address)  # RuntimeError, if it is in use
