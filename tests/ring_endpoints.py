"""Several endpoints in one process, over real sockets, and a peer that sends what a test tells it to."""

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
from fedring.ring.engine.endpoint import Endpoint
from fedring.ring.engine.group import Group, group_id
from fedring.ring.engine.operation import Kind, Operation
from fedring.ring.engine.program import Program
from fedring.ring.engine.reduction import Reduction
from fedring.ring.options import RingOptions
from fedring.ring.transport.channels import EXCHANGE, GENERATION_KEY, PEER_KEY, advertised, dial
from fedring.ring.transport.frames import write
from fedring.ring.transport.listener import Listener
from fedring.v1 import peer_pb2 as pb

SECONDS = 60.0  # enough for what usually takes a moment, also on a machine that stands still for a while
NAME = "world"


class World:
    """Endpoints, and their sides of one group."""

    def __init__(self, endpoints: Sequence[Endpoint], others: Sequence[str] = ()) -> None:
        self.endpoints = list(endpoints)
        self.members = [*(endpoint.address for endpoint in endpoints), *others]
        self.groups = [
            endpoint.group(NAME, rank=rank, members=self.members) for rank, endpoint in enumerate(self.endpoints)
        ]

    def match(self) -> None:
        for endpoint, group in zip(self.endpoints, self.groups, strict=True):
            endpoint.wait_until_matched(group, timeout=SECONDS)

    def close(self) -> None:
        close(self.endpoints)


def close(endpoints: Iterable[Endpoint]) -> None:
    """Close all endpoints at once, as processes do."""
    threads = [threading.Thread(target=endpoint.close) for endpoint in endpoints]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive(), "an endpoint does not close"


@contextmanager
def world(size: int, options: RingOptions | None = None, *, generation: int = 0) -> Iterator[World]:
    """Make `size` endpoints that are matched, and close them at the end."""
    made = World([Endpoint(options, generation=generation) for _ in range(size)])
    try:
        made.match()
        yield made
    finally:
        made.close()


@contextmanager
def nobody_listens() -> Iterator[str]:
    """Reserve a worker's address at which nobody listens."""
    with socket.socket() as place:
        place.bind(("127.0.0.1", 0))
        yield advertised(RingOptions(), place.getsockname()[1])


def memory(tensor: Tensor) -> memoryview:
    return tensor.view(torch.uint8).numpy().data


def allreduce(group: Group, tensor: Tensor, *, timeout: float = SECONDS) -> Operation:
    """Start a sum over all ranks."""
    program = collectives.allreduce(group.rank, group.size, memory(tensor), Reduction("sum", tensor.dtype))
    what = f"allreduce {tensor.dtype} {len(tensor)}"
    return group.start(what, program, kind=Kind.GRADIENTS, timeout=timeout)


def start(group: Group, program: Program, *, what: str = "test", timeout: float = SECONDS) -> Operation:
    return group.start(what, program, timeout=timeout)


class Impostor:
    """A peer that speaks the wire protocol by hand: it listens, keeps every frame, and sends what it is told to.

    Args:
        generation: The generation of its frames.
        local: Whether its address says that it is on this host.
        checksum: Whether its frames carry checksums.
    """

    def __init__(self, *, generation: int = 0, local: bool = False, checksum: bool = False) -> None:
        self.generation = generation
        self.received: queue.Queue[bytes] = queue.Queue()
        self.reached, self.listening = threading.Event(), threading.Event()
        self.listening.set()
        self._checksum = checksum
        self._to_send: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._sequence = 0
        self._listener = Listener(RingOptions(), self._exchange)
        self._listener.start()
        self.address = advertised(RingOptions(local_transport=local), self._listener.port)
        self._channel: grpc.Channel | None = None

    def dial(self, address: str, *, generation: int | None = None, **hello: Any) -> Any:
        """Open a stream, and send HELLO with these fields. Return the call, which goes on while frames are sent."""
        given = self.generation if generation is None else generation
        metadata = ((PEER_KEY, self.address), (GENERATION_KEY, str(given)))
        self._channel = dial(address, RingOptions())
        call: Any = self._channel.stream_unary(EXCHANGE)
        self.call = call.future(iter(self._to_send.get, None), metadata=metadata, timeout=SECONDS)
        self.send(kind=pb.FRAME_KIND_HELLO, **hello)
        return self.call

    def send(self, payload: bytes = b"", **head: Any) -> None:
        """Send a frame with the next number, unless the head has another."""
        self.send_bytes(self.frame(payload, **head))

    def frame(self, payload: bytes = b"", **head: Any) -> bytes:
        """Return the bytes of a frame with the next number, unless the head has another."""
        return write(self.head(**head), payload, checksum=self._checksum)

    def send_bytes(self, message: bytes) -> None:
        self._to_send.put(message)

    def head(self, **given: Any) -> pb.Head:
        fixed = {"kind": pb.FRAME_KIND_DATA, "group": group_id(NAME), "generation": self.generation}
        if "sequence" not in given:
            given["sequence"] = self._sequence
            self._sequence += 1
        return pb.Head(**{**fixed, **given})

    def close(self) -> None:
        self.listening.set()
        self._to_send.put(None)
        if self._channel is not None:
            self._channel.close()
        self._listener.close()

    def _exchange(self, messages: Iterator[bytes], context: grpc.ServicerContext) -> bytes:
        self.reached.set()
        self.listening.wait()
        try:
            for message in messages:
                self.received.put(message)
        except grpc.RpcError:  # the endpoint has closed
            pass
        return b""
