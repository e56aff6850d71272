"""Several endpoints in one process, over real sockets, and a peer that says what a test tells it."""

import queue
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import torch
from torch import Tensor

from fedring.ring.engine import collectives
from fedring.ring.engine.endpoint import Endpoint, handler
from fedring.ring.engine.group import Group, group_id
from fedring.ring.engine.operation import Operation
from fedring.ring.engine.program import Program
from fedring.ring.engine.reduction import Reduction
from fedring.ring.options import RingOptions
from fedring.ring.transport.connections import advertised, dial, open_server
from fedring.ring.transport.frames import write
from fedring.ring.transport.stream import GENERATION_KEY, METHOD, PEER_KEY
from fedring.v1 import peer_pb2 as pb

SECONDS = 60.0  # in which what happens soon has happened also on a machine that stands still for a while
NAME = "world"


class World:
    """Endpoints and their sides of one group."""

    def __init__(self, endpoints: Sequence[Endpoint], strangers: Sequence[str] = ()) -> None:
        self.endpoints = list(endpoints)
        self.members = [*(endpoint.address for endpoint in endpoints), *strangers]
        self.groups = [
            endpoint.group(NAME, rank=rank, members=self.members) for rank, endpoint in enumerate(self.endpoints)
        ]

    def match(self) -> None:
        for endpoint, group in zip(self.endpoints, self.groups, strict=True):
            endpoint.wait_until_matched(group, timeout=SECONDS)

    def close(self) -> None:
        close(self.endpoints)


def close(endpoints: Iterable[Endpoint]) -> None:
    """All at once, as processes do."""
    threads = [threading.Thread(target=endpoint.close) for endpoint in endpoints]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "an endpoint does not close"


@contextmanager
def world(size: int, options: RingOptions | None = None, *, generation: int = 0) -> Iterator[World]:
    """`size` endpoints that are matched."""
    made = World([Endpoint(options, generation=generation) for _ in range(size)])
    try:
        made.match()
        yield made
    finally:
        made.close()


@contextmanager
def deserted() -> Iterator[str]:
    """A worker's address at which nobody listens, nor will in the meantime."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        yield advertised(RingOptions(), place.getsockname()[1], "")


def memory(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


def allreduce(group: Group, tensor: Tensor, *, timeout: float = SECONDS) -> Operation:
    """A sum over all ranks."""
    program = collectives.allreduce(group.rank, group.size, memory(tensor), Reduction("sum", tensor.dtype))
    return group.start(f"allreduce {tensor.dtype} {len(tensor)}", program, timeout=timeout)


def start(group: Group, program: Program, *, what: str = "test", timeout: float = SECONDS) -> Operation:
    return group.start(what, program, timeout=timeout)


class Impostor:
    """A peer that speaks the wire protocol by hand: it listens, hears every frame, and sends what it is told.

    One that is `near` says that it is on this host.
    """

    def __init__(self, *, generation: int = 0, near: bool = False) -> None:
        self.generation = generation
        self.heard: queue.Queue[bytes] = queue.Queue()
        self.reached, self.listening = threading.Event(), threading.Event()
        self.listening.set()
        self._said: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sequence = 0
        self._listener = open_server(RingOptions(), handler(self._hear))
        self._listener.grpc.start()
        self.address = advertised(RingOptions(shared_memory=near), self._listener.port, "")
        self._channel: grpc.Channel | None = None

    def dial(self, address: str, *, generation: int | None = None, **hello: Any) -> Any:
        """The call, which goes on while frames are said; `hello` is what the first of them says."""
        given = self.generation if generation is None else generation
        metadata = ((PEER_KEY, self.address), (GENERATION_KEY, str(given)))
        self._channel = dial(address, RingOptions())
        call: Any = self._channel.stream_unary(METHOD)
        self.call = call.future(iter(self._said.get, None), metadata=metadata, timeout=SECONDS)
        self.say(kind=pb.FRAME_KIND_HELLO, **hello)
        return self.call

    def say(self, payload: bytes = b"", **head: Any) -> None:
        """A frame with the next number, unless the head names another."""
        self.say_bytes(write(self.head(**head), payload))

    def checked(self, payload: bytes, **head: Any) -> bytes:
        """The frame's bytes, with a checksum."""
        return write(self.head(**head), payload, checksum=True)

    def say_bytes(self, message: bytes) -> None:
        self._said.put(message)

    def head(self, **given: Any) -> pb.Head:
        fixed = {"kind": pb.FRAME_KIND_DATA, "group": group_id(NAME), "generation": self.generation}
        if "sequence" not in given:
            given["sequence"] = self._sequence
            self._sequence += 1
        return pb.Head(**{**fixed, **given})

    def close(self) -> None:
        self.listening.set()
        self._said.put(None)
        if self._channel is not None:
            self._channel.close()
        self._listener.close()

    def _hear(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        self.reached.set()
        self.listening.wait()
        try:
            for message in messages:
                self.heard.put(message)
        except grpc.RpcError:  # the endpoint has closed
            pass
        return b""
