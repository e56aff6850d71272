"""Every call of a whole fl-server in this process: no request may end with INTERNAL or UNKNOWN, or end the server."""

import asyncio
import contextlib
import io
import itertools
import json
import logging
import queue
import struct
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

import grpc
import numpy as np
from google.protobuf.message import DecodeError, Message
from google.protobuf.message_factory import GetMessageClass

from fedring.codec import Encoding, encode
from fedring.rpc.contract import PROTOCOL, SESSION_KEY
from fedring.server import main, serving
from fedring.v1 import control_pb2, federation_pb2, rendezvous_pb2, secure_pb2
from fedring.v1 import federation_pb2 as pb
from tests.fuzz.mutation import mutate_bytes, mutate_message
from tests.fuzz.target import Target
from tests.made_updates import header_of, named_offer
from tests.ports import free_port

_SECONDS = 0.5
"""The time that a stream may take: many of them have no end of their own."""
_LONGEST = 60.0
"""The time that any other call may take."""
_WRONG = (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN)


class Method(NamedTuple):
    """A method of one of the two ports."""

    path: str
    request: type[Message]
    takes_stream: bool
    gives_stream: bool
    port: str  # "listen" or "control_listen"


def _methods() -> Iterator[Method]:
    for file in (federation_pb2, rendezvous_pb2, secure_pb2, control_pb2):
        port = "control_listen" if file is control_pb2 else "listen"
        for service in file.DESCRIPTOR.services_by_name.values():
            for method in service.methods:
                path = f"/{service.full_name}/{method.name}"
                request = GetMessageClass(method.input_type)
                yield Method(path, request, method.client_streaming, method.server_streaming, port)


METHODS = list(_methods())


def joined(messages: Sequence[bytes]) -> bytes:
    """Return the input that stands for these messages of one call."""
    return b"".join(struct.pack("<H", len(each)) + each for each in messages)


def parted(data: bytes) -> list[bytes]:
    """Return the messages of an input, at least one."""
    messages, at = [], 0
    while at + 2 <= len(data):
        (size,) = struct.unpack_from("<H", data, at)
        messages.append(data[at + 2 : at + 2 + size])
        at += 2 + size
    return messages or [b""]


class FuzzedServer:
    """An fl-server in a thread of this process, with one open round and one client in session."""

    def __init__(self, folder: Path) -> None:
        self.faults: list[str] = []
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._addresses = {"listen": f"127.0.0.1:{free_port()}", "control_listen": f"127.0.0.1:{free_port()}"}
        self._thread = threading.Thread(target=self._serve, args=(folder,), daemon=True)
        self._thread.start()
        self._channels = {port: grpc.insecure_channel(address) for port, address in self._addresses.items()}
        for channel in self._channels.values():
            grpc.channel_ready_future(channel).result(60)
        logging.getLogger("fedring").addHandler(_Faults(self.faults))
        self.session = ""
        self.commands: queue.Queue[pb.TrainCmd] = queue.Queue()
        self.join()

    def join(self) -> None:
        """Begin a session whose client is ready to train."""
        request = pb.JoinRequest(client_id="fuzzed", protocol=PROTOCOL)
        listen: Any = self._channels["listen"]
        with contextlib.suppress(grpc.RpcError):
            reply = listen.unary_unary("/fedring.v1.TrainCmdService/Join")(request.SerializeToString())
            self.session = pb.JoinReply.FromString(reply).session_id
            ready = itertools.chain(
                [pb.WatchRequest(matched=True).SerializeToString()], iter(threading.Event().wait, 0)
            )
            metadata = [(SESSION_KEY, self.session)]
            events = listen.stream_stream("/fedring.v1.TrainCmdService/Watch")(ready, metadata=metadata)
            threading.Thread(target=self._listen, args=(events,), daemon=True).start()

    def _listen(self, events: Any) -> None:
        with contextlib.suppress(grpc.RpcError):
            for event in map(pb.ServerEvent.FromString, events):
                if event.HasField("train"):
                    self.commands.put(event.train)

    def call(self, method: Method, messages: Sequence[bytes]) -> None:
        """Make a call, and check how it ends.

        Raises:
            AssertionError: If the server, and not the request, is at fault.
        """
        kind = f"{'stream' if method.takes_stream else 'unary'}_{'stream' if method.gives_stream else 'unary'}"
        calling: Any = getattr(self._channels[method.port], kind)(method.path)
        seconds = _SECONDS if method.takes_stream or method.gives_stream else _LONGEST
        options = {"metadata": [(SESSION_KEY, self.session)], "timeout": seconds}
        code, details = grpc.StatusCode.OK, ""
        try:
            reply = calling(iter(messages) if method.takes_stream else messages[0], **options)
            for _ in zip(reply, range(50), strict=False) if method.gives_stream else ():
                pass
        except grpc.RpcError as error:
            code, details = error.code(), error.details() or ""
        if code is grpc.StatusCode.FAILED_PRECONDITION:
            self.join()
        assert code is not grpc.StatusCode.DEADLINE_EXCEEDED or seconds == _SECONDS, f"{method.path} hangs"
        assert code not in _WRONG, f"{method.path} ended with {code}: {details}"
        assert not self.faults, self.faults[0]
        assert self._thread.is_alive(), "the server has ended"

    def _serve(self, folder: Path) -> None:
        asyncio.set_event_loop(self._loop)
        # This client sends no beats, and the first job waits until torch is imported.
        keys = [f"state_dir={folder}", "metrics_listen=", "lost_after_seconds=3600"]
        loaded = main.load(keys, self._addresses)
        with ExitStack() as stack, contextlib.redirect_stdout(io.StringIO()):
            # Only a main thread may listen to signals.
            served = serving.serve(loaded, stack, check_only=False, stop_event=lambda: self._stop)
            self._loop.run_until_complete(served)


class _Faults(logging.Handler):
    """Collects what the server logs as its own fault."""

    def __init__(self, faults: list[str]) -> None:
        super().__init__(logging.ERROR)
        self._faults = faults

    def emit(self, record: logging.LogRecord) -> None:
        self._faults.append(logging.Formatter().format(record))


@cache
def the_server() -> FuzzedServer:
    """Return this process's server."""
    return FuzzedServer(Path(tempfile.mkdtemp(prefix="fuzz-")))


def run(data: bytes) -> None:
    """Make the call that the input stands for."""
    if data:
        the_server().call(METHODS[data[0] % len(METHODS)], parted(data[1:]))


def _update(command: pb.TrainCmd) -> list[Message]:
    """Return the messages that deliver an update of a round."""
    payload = encode(np.ones(8, np.float32), Encoding("fp32"))
    offer = named_offer(header_of(command, "fuzzed", payload), payload)
    return [pb.ClientUpdate(offer=offer), pb.ClientUpdate(chunk=pb.Chunk(data=payload))]


@cache
def examples() -> list[bytes]:
    """Return an empty call of each method, and some calls that get further."""
    numbers = {method.path.rpartition("/")[2]: number for number, method in enumerate(METHODS)}
    keys = {"model": "fedring.train.models:vector", "model_args": {"size": 8}, "evaluate": False, "min_clients": 1}
    start = control_pb2.StartJobRequest(job=json.dumps(keys | {"rounds": 1000, "deadline_seconds": 3600}))
    start_job = _call(numbers["StartJob"], [start])
    run(start_job)
    command = the_server().commands.get(timeout=60)
    further: dict[str, Sequence[Message]] = {
        "Join": [pb.JoinRequest(client_id="c", protocol=PROTOCOL, labels={"a": "b"})],
        "Watch": [pb.WatchRequest(matched=True, activity=pb.ACTIVITY_TRAINING, progress=0.5)],
        "FetchModel": [pb.FetchModelRequest(digest=command.model_digest)],
        "ExportModel": [pb.FetchModelRequest(digest=command.model_digest)],
        "PushUpdate": _update(command),
    }
    found = [_call(number, [method.request()]) for number, method in enumerate(METHODS)]
    return [*found, start_job, *(_call(numbers[name], messages) for name, messages in further.items())]


def _call(number: int, messages: Sequence[Message]) -> bytes:
    return bytes([number]) + joined([message.SerializeToString() for message in messages])


class _Calls(Sequence[bytes]):
    """The examples, which need a server: it starts when the first is asked for."""

    def __getitem__(self, at: Any) -> Any:
        return examples()[at]

    def __len__(self) -> int:
        return len(examples())


def call_target() -> Target:
    """Return the target whose inputs are calls of a server."""
    return Target(run, _Calls(), mutator=mutated)


def mutated(data: bytes, random: Random) -> bytes:
    """Return an input that differs in one message."""
    if not data or random.random() < 0.05:
        return mutate_bytes(data, random) or b"\0"
    method, messages = METHODS[data[0] % len(METHODS)], parted(data[1:])
    at = random.randrange(len(messages))
    if random.random() < 0.1 and method.takes_stream:
        messages.insert(at, messages[at])
    message = method.request()
    try:
        message.ParseFromString(messages[at])
        mutate_message(message, random)
        messages[at] = message.SerializeToString()
    except DecodeError:
        messages[at] = mutate_bytes(messages[at], random)
    return data[:1] + joined([each[:60_000] for each in messages[:20]])


def feed(seed: str, runs: int) -> None:
    """Make each example's call, and as many mutated ones."""
    target, random = call_target(), Random(seed)
    for example in target.examples:
        target.survives(example)
    for _ in range(runs):
        target.survives(target.mutate(random.choice(target.examples), random))


if __name__ == "__main__":
    feed(sys.argv[1], int(sys.argv[2]))
