"""Several endpoints in one process, over real sockets, and a peer that sends the frames that a test makes."""

import queue
import socket
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import grpc
import torch
from torch import Tensor

from fedring.ring import collectives
from fedring.ring.address import advertised, dial, open_server
from fedring.ring.endpoint import Endpoint, handler
from fedring.ring.frames import write
from fedring.ring.group import Group, group_id
from fedring.ring.link import GENERATION_KEY, METHOD, PEER_KEY
from fedring.ring.operation import Operation
from fedring.ring.options import RingOptions
from fedring.ring.program import Program
from fedring.ring.reduction import Reduction
from fedring.v1 import peer_pb2 as pb

SECONDS = 60.0  # enough for short operations even on a machine that stalls for a while
NAME = "world"


class World:
    """Endpoints, and one group of which each of them is a member."""

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
    """Close all endpoints at once, as processes that end do."""
    threads = [threading.Thread(target=endpoint.close) for endpoint in endpoints]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "an endpoint does not close"


@contextmanager
def world(size: int, options: RingOptions | None = None, *, generation: int = 0) -> Iterator[World]:
    """Open `size` endpoints, and yield their world when they are matched."""
    made = World([Endpoint(options, generation=generation) for _ in range(size)])
    try:
        made.match()
        yield made
    finally:
        made.close()


@contextmanager
def deserted() -> Iterator[str]:
    """Yield a worker's address at which nobody listens, and reserve its port meanwhile."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        yield advertised(RingOptions(), place.getsockname()[1], "")


def memory(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


def allreduce(group: Group, tensor: Tensor, *, timeout: float = SECONDS) -> Operation:
    """Start to sum a tensor over all ranks, in place."""
    program = collectives.allreduce(group.rank, group.size, memory(tensor), Reduction("sum", tensor.dtype))
    return group.start(f"allreduce {tensor.dtype} {len(tensor)}", program, timeout=timeout)


def start(group: Group, program: Program, *, what: str = "test", timeout: float = SECONDS) -> Operation:
    return group.start(what, program, timeout=timeout)


class Impostor:
    """A peer that speaks the wire protocol by hand: it receives every frame, and sends those that a test makes.

    Args:
        generation: of the group.
        near: tell other endpoints that it is on their host.
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
        """Open a stream to the endpoint, with `hello` in its first frame; return the call."""
        given = self.generation if generation is None else generation
        metadata = ((PEER_KEY, self.address), (GENERATION_KEY, str(given)))
        self._channel = dial(address, RingOptions())
        call: Any = self._channel.stream_unary(METHOD)
        self.call = call.future(iter(self._said.get, None), metadata=metadata, timeout=SECONDS)
        self.say(kind=pb.FRAME_KIND_HELLO, **hello)
        return self.call

    def say(self, payload: bytes = b"", **head: Any) -> None:
        """Send a frame with the next sequence number, or with the one in `head`."""
        self.say_bytes(write(self.head(**head), payload))

    def checked(self, payload: bytes, **head: Any) -> bytes:
        """Return the bytes of a frame with a checksum."""
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
