"""A client of the wire contract, written from the .proto files alone; it can also send invalid messages."""

import queue
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from types import TracebackType
from typing import Any, ClassVar, Self

import grpc
import numpy as np

from fedring.codec import Encoding, encode
from fedring.codec.schema import Schema
from fedring.control.failure import Failure
from fedring.rpc.contract import PROTOCOL
from fedring.rpc.errors import reason_of
from fedring.train.models import vector
from fedring.train.tensors.state import schema_of
from fedring.v1 import control_pb2
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import federation_pb2_grpc as rpc
from tests.fleets import Control
from tests.made_updates import header_of, named_offer

SIZE = 1000
SECONDS = 60.0
CHUNK = 1 << 20


def vector_job(**keys: Any) -> dict[str, Any]:
    """Return a job whose model is one vector of SIZE values, with these keys changed."""
    fixed = {"model": "fedring.train.models:vector", "model_args": {"size": SIZE}, "encoding": "fp32"}
    return {**fixed, "min_clients": 1, "evaluate": False, "deadline_seconds": 240, **keys}


def vector_schema() -> Schema:
    """Return the schema of that model."""
    return schema_of(vector(SIZE))


class Refused(Exception):
    """A refused call, with the server's status and reason."""

    def __init__(self, error: grpc.RpcError) -> None:
        super().__init__(f"{error.code().name} {reason_of(error)}: {error.details()}")
        self.code: grpc.StatusCode = error.code()
        self.reason = reason_of(error)


class WireClient:
    """A client that joins, watches in a thread, and makes the calls that a test asks for.

    A newer client with the same name takes the session over, since it presents the older one's resume secret.
    """

    secrets: ClassVar[dict[tuple[str, str], str]] = {}  # resume secrets, by address and name

    def __init__(self, address: str, client_id: str = "wire") -> None:
        self.client_id = client_id
        self.channel = grpc.insecure_channel(address)
        self.commands = rpc.TrainCmdServiceStub(self.channel)
        self.models = rpc.ModelBlobServiceStub(self.channel)
        self.updates = rpc.ClientUpdateServiceStub(self.channel)
        secret = self.secrets.get((address, client_id), "")
        request = pb.JoinRequest(client_id=client_id, protocol=PROTOCOL, software="wire", resume_secret=secret)
        try:
            self.joined = self.commands.Join(request, timeout=SECONDS)
        except grpc.RpcError:
            self.channel.close()
            raise
        self.secrets[address, client_id] = self.joined.resume_secret
        self.metadata = (("fl-session", self.joined.session_id),)
        self.digests: dict[int, str] = {0: ""}  # of the models that were fetched, by version
        self.events: queue.Queue[pb.ServerEvent] = queue.Queue()
        self.ended: queue.Queue[grpc.RpcError | None] = queue.Queue()
        self._beats: queue.Queue[pb.WatchRequest | None] = queue.Queue()
        self._watch = self.commands.Watch(iter(self._beats.get, None), metadata=self.metadata)
        self._done = threading.Event()
        for target in (self._read, self._beat):
            threading.Thread(target=target, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def close(self) -> None:
        """Cancel all calls and close the channel."""
        self._done.set()
        self._beats.put(None)
        self._watch.cancel()
        self.channel.close()

    def stop_watching(self) -> None:
        """End the session; other calls go on as long as the server allows."""
        self._done.set()
        self._watch.cancel()

    def leave(self) -> None:
        """Close this side of the Watch stream, and wait for nothing."""
        self._done.set()
        self._beats.put(None)

    def say(self, request: pb.WatchRequest) -> None:
        """Send a message up the Watch stream."""
        self._beats.put(request)

    def expect(self, kind: str, seconds: float = SECONDS) -> Any:
        """Return the next event of this kind; drop those before it."""
        while True:
            event = self.events.get(timeout=seconds)
            if event.WhichOneof("event") == kind:
                return getattr(event, kind)

    def fetch(self, version: int = 0, held: int | str = 0) -> tuple[pb.ModelHeader, bytes]:
        """Fetch a model.

        Args:
            version: 0 for the newest one.
            held: a model that the client says to hold: a version that it has fetched, or a digest.

        Returns:
            The header and the payload.
        """
        held_digest = held if isinstance(held, str) else self.digests[held]
        request = pb.FetchModelRequest(version=version, held_digest=held_digest)
        try:
            messages = list(self.models.FetchModel(request, metadata=self.metadata))
        except grpc.RpcError as error:
            raise Refused(error) from error
        header = messages[0].header
        self.digests[header.version] = header.model_digest
        return header, b"".join(message.chunk.data for message in messages[1:])

    def base_of(self, header: pb.ModelHeader) -> int:
        """Return the fetched version to which the packets must be added; 0 for a whole model."""
        return next(version for version, digest in self.digests.items() if digest == header.base_digest)

    def header(self, command: pb.TrainCmd, payload: bytes, **changes: Any) -> pb.UpdateHeader:
        """Return a header that fits the command and the payload, with these changes."""
        return header_of(command, self.client_id, payload, samples=10, **{"train_seconds": 0.5, **changes})

    def push(
        self, header: pb.UpdateHeader | pb.UpdateOffer, payload: bytes, *, stop_at: int | None = None
    ) -> pb.UpdateReply | None:
        """Push an update as the contract says, or only its first `stop_at` bytes; return the last reply."""
        offsets: queue.Queue[int] = queue.Queue()

        def messages() -> Iterator[pb.ClientUpdate]:
            yield pb.ClientUpdate(offer=offer_of(header, payload))
            start = offsets.get(timeout=SECONDS)
            end = len(payload) if stop_at is None else stop_at
            for offset in range(start, end, CHUNK):
                data = payload[offset : min(offset + CHUNK, end)]
                yield pb.ClientUpdate(chunk=pb.Chunk(offset=offset, data=data))

        return self.push_raw(messages(), offsets)

    def push_small(self, header: pb.UpdateHeader | pb.UpdateOffer, payload: bytes) -> pb.Accepted:
        """Push an update in one message, with a call of its own."""
        (accepted,) = self.push_many_small([pb.SmallUpdate(offer=offer_of(header, payload), payload=payload)])
        return accepted

    def push_many_small(self, updates: Iterable[pb.SmallUpdate]) -> Iterator[pb.Accepted]:
        """Push updates with one call; yield the answers, and push each update only when its answer is asked for."""
        try:
            yield from self.updates.PushSmallUpdates(iter(updates), metadata=self.metadata, timeout=SECONDS)
        except grpc.RpcError as error:
            raise Refused(error) from error

    def push_raw(
        self, messages: Iterable[pb.ClientUpdate], offsets: "queue.Queue[int] | None" = None
    ) -> pb.UpdateReply | None:
        """Push exactly these messages; return the last reply."""
        last = None
        try:
            for reply in self.updates.PushUpdate(iter(messages), metadata=self.metadata, timeout=SECONDS):
                last = reply
                if offsets is not None and reply.WhichOneof("reply") == "resume_offset":
                    offsets.put(reply.resume_offset)
        except grpc.RpcError as error:
            raise Refused(error) from error
        finally:
            if offsets is not None:
                offsets.put(0)  # so that `messages` does not wait for an offset that will not come
        return last

    def _read(self) -> None:
        try:
            for event in self._watch:
                self.events.put(event)
                if event.WhichOneof("event") == "heartbeat":
                    self._beats.put(pb.WatchRequest(matched=True))
            self.ended.put(None)
        except grpc.RpcError as error:
            self.ended.put(error)

    def _beat(self) -> None:
        while not self._done.wait(self.joined.heartbeat_seconds):
            self._beats.put(pb.WatchRequest(matched=True))


def offer_of(header: pb.UpdateHeader | pb.UpdateOffer, payload: bytes, digest: str = "") -> pb.UpdateOffer:
    """Return an offer of the payload; `digest` replaces its right digest. An offer is returned as it is."""
    return header if isinstance(header, pb.UpdateOffer) else named_offer(header, payload, digest)


def payload_of(values: "np.ndarray[Any, np.dtype[np.float32]]", name: str = "fp32", **keys: Any) -> bytes:
    """Return the values in this encoding."""
    return encode(values, Encoding(name, **keys))


def run(control: Control, **keys: Any) -> tuple[int, Iterator[control_pb2.Event]]:
    """Start a job of `vector_job`; return its id and its events."""
    events = control.events()
    job_id = control.start_job(vector_job(**keys)).job_id
    return job_id, control.follow_job(job_id, events)


def next_commands(clients: Sequence[WireClient], count: int) -> dict[str, pb.TrainCmd]:
    """Return the commands of the next `count` clients that get one, by client."""
    commands: dict[str, pb.TrainCmd] = {}
    while len(commands) < count:
        for client in clients:
            with suppress(queue.Empty):
                event = client.events.get(timeout=0.01)
                if event.HasField("train"):
                    commands[client.client_id] = event.train
    return commands


def deliver(client: WireClient, values: "np.ndarray[Any, np.dtype[np.float32]] | None" = None) -> pb.TrainCmd:
    """Answer the client's next command with `values`, by default ones; return the command."""
    command: pb.TrainCmd = client.expect("train")
    payload = payload_of(np.ones(SIZE, np.float32) if values is None else values)
    client.push(client.header(command, payload), payload)
    return command


def published_version(control: Control, round_: int) -> int:
    """Wait until the round is published; return the version of its model."""
    events = control.events(after=1)
    ended = next(event for event in events if event.round == round_ and event.kind == "round_published")
    events.cancel()
    return ended.state.model_version


def outcome(control: Control, job_id: int, events: Iterator[control_pb2.Event]) -> control_pb2.Job:
    """Return the job when it has ended."""
    for _ in events:
        pass
    return control.job(job_id)


def parameters(client: WireClient, version: int = 0) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Fetch a version of a model of `vector_job`, by default the newest; return its parameters."""
    header, payload = client.fetch(version)
    assert [packet.encoding for packet in header.packets] == ["fp32"]
    return np.frombuffer(payload[16:], "<f4")


def stop_jobs(control: Control) -> None:
    """Stop all queued and running jobs, and wait for their end."""
    for job in control.jobs():
        if job.state in ("queued", "running"):
            with suppress(Failure):  # it may have ended by itself
                control.stop_job(job.job_id)
            for _ in control.follow_job(job.job_id) if job.state == "running" else ():
                pass
