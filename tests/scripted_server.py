"""A scripted fl-server on a real socket, for tests of the client."""

import asyncio
import queue
import socket
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

from torch import nn

from fedring.codec import Encoding, Schema, Vectors, encode, encode_buffers
from fedring.codec.digest import name_of, update_name
from fedring.rpc.boundary import Boundary
from fedring.rpc.channel import make_server
from fedring.rpc.errors import BadRequest, DamagedOnTheWay, FedringError, NoSession, UnknownMethod
from fedring.rpc.leader_term import TellTerm, term_text
from fedring.train.tensors.state import read_vectors, schema_of
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import federation_pb2_grpc as rpc
from fedring.v1 import rendezvous_pb2, rendezvous_pb2_grpc

RUN = "run-1"
PIECE = 1000  # bytes of a model in each chunk
SECONDS = 60.0  # a timeout that is long enough even if the machine does nothing for a while


class ScriptedServer(
    rpc.TrainCmdServiceServicer,
    rpc.ModelBlobServiceServicer,
    rpc.ClientUpdateServiceServicer,
    rendezvous_pb2_grpc.RendezvousServiceServicer,
):
    """A server that answers as the test says, and records the requests that it receives."""

    def __init__(self) -> None:
        self._place = socket.socket()  # reserves the port while the server is stopped; it never listens
        self._place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._place.bind(("127.0.0.1", 0))
        self.port: int = self._place.getsockname()[1]
        self.run_id = RUN
        self.epoch = 0
        self.term = 0  # in which it leads, when it starts; 0 = it shares its state with no other server
        self.secret = ""  # the secret in replies to Join
        self.heartbeat_seconds = 0.2  # the longest time between two reports of a client
        self.joins: queue.Queue[pb.JoinRequest] = queue.Queue()
        self.reports: queue.Queue[pb.WatchRequest] = queue.Queue()
        self.failures: queue.Queue[pb.Failure] = queue.Queue()
        self.evaluations: queue.Queue[pb.EvaluationReport] = queue.Queue()
        self.fetches: queue.Queue[pb.FetchModelRequest] = queue.Queue()
        self.accepted: queue.Queue[tuple[pb.UpdateHeader, bytes]] = queue.Queue()
        self.offers: queue.Queue[pb.UpdateOffer] = queue.Queue()  # of accepted and of refused updates
        self.upload_calls: list[tuple[str, str]] = []  # the name of the call and the client's address, for each offer
        self.last_accepted: pb.LastAccepted | None = None  # the last accepted update in replies to Join
        self.small_calls = 0  # calls of PushSmallUpdates
        self.resumed: list[int] = []  # the offsets at which uploads were resumed
        # By version. If there is a difference to another version, it comes first.
        self.models: dict[int, list[tuple[pb.ModelHeader, bytes]]] = {}
        self.on_join: Callable[[], FedringError | None] = lambda: None
        self.on_header: Callable[[pb.UpdateHeader], FedringError | None] = lambda header: None
        self.on_bytes: Callable[[int], FedringError | None] = lambda received: None
        self.on_payload: Callable[[bytearray], object] = lambda payload: None  # may damage it
        self.on_accepted: Callable[[], FedringError | None] = lambda: None
        self.on_chunk: Callable[[int], FedringError | None] = lambda offset: None
        self.on_evaluation: Callable[[], FedringError | None] = lambda: None
        # Serves one stream of a worker; None = this server has no rendezvous.
        self.form: Callable[[AsyncIterator[rendezvous_pb2.WorkerMessage], Any], Awaitable[None]] | None = None
        self._sessions = 0
        self._outbox: asyncio.Queue[pb.ServerEvent | FedringError]
        self._partial: dict[str, bytearray] = {}  # what was received of each update, by its name
        self._taken: set[str] = set()

    def start(self) -> None:
        """Listen, on the same port each time."""
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), name="scripted server")
        self._thread.start()
        started.wait()

    def stop(self) -> None:
        """End every call and stop listening."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    def close(self) -> None:
        """Stop the server and release its port."""
        self.stop()
        self._place.close()

    def send(self, event: pb.ServerEvent | FedringError) -> None:
        """Send an event on the Watch stream, or end the stream with an error."""
        asyncio.run_coroutine_threadsafe(self._outbox.put(event), self._loop).result()

    def train(self, command: pb.TrainCmd) -> None:
        """Send a command to train."""
        self.send(pb.ServerEvent(train=command))

    def publish(
        self, version: int, schema: Schema, vectors: Vectors, *, step: tuple[int, Vectors] | None = None
    ) -> None:
        """Offer a model in full, and also as a `step`, if given: a base version, and the difference to it."""
        digest = vectors.digest()
        offers = [_offer(version, schema, vectors, pb.KIND_WEIGHTS, digest, "")]
        if step:
            offers.insert(0, _offer(version, schema, step[1], pb.KIND_DELTA, digest, self.digest(step[0])))
        self.models[version] = offers

    def digest(self, version: int) -> str:
        """Return the digest of a published model."""
        return self.models[version][-1][0].model_digest

    def command(
        self,
        model: nn.Module,
        *,
        round_: int = 1,
        encoding: str = "fp32",
        names: Collection[str] | None = None,
        **fields: Any,
    ) -> pb.TrainCmd:
        """Return a command to train `model`, and publish it as version 1 if no model is published yet.

        Args:
            model: The model.
            round_: The number of the round.
            encoding: How the client encodes its update.
            names: The tensors that the job shares; None = all.
            fields: Of the command.
        """
        schema = schema_of(model, names)
        if not self.models:
            self.publish(1, schema, read_vectors(model, names))
        given: dict[str, Any] = {"run_id": self.run_id, "job_round": 1, "model_version": 1, "deadline_seconds": 600.0}
        given |= {"epochs": 1, "batch_size": 8, "lr": 0.1, "momentum": 0.9, "seed": 1, "max_update_bytes": 1 << 30}
        given |= {"job": pb.JobSpec(mode="federated", rounds=9)} | fields
        given.setdefault("model_digest", self.digest(given["model_version"]))
        return pb.TrainCmd(
            round=round_,
            schema_hash=schema.hash,
            encoding=pb.Encoding(name=encoding, chunk=64, keep_ratio=0.25, step=1.0),
            **given,
        )

    def evaluation(self, version: int, **fields: Any) -> pb.EvaluateCmd:
        """Return a command to evaluate a published version."""
        header = self.models[version][-1][0]
        given: dict[str, Any] = {"round": 2, "deadline_seconds": 600.0} | fields
        return pb.EvaluateCmd(
            model_version=version, model_digest=header.model_digest, schema_hash=header.schema_hash, **given
        )

    def mark_accepted(self, offer: pb.UpdateOffer) -> None:
        """Treat this update as accepted from now on."""
        self._taken.add(offer.name)

    def small_model(self, version: int) -> pb.SmallModel:
        """Return a published model in the form in which a command carries it."""
        header, payload = self.models[version][-1]
        return pb.SmallModel(header=header, payload=payload)

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        error = self.on_join()
        if error is None:
            self._sessions += 1
            self._outbox = asyncio.Queue()
        self.joins.put(request)
        if error:
            raise error
        return pb.JoinReply(
            session_id=str(self._sessions),
            run_id=self.run_id,
            heartbeat_seconds=self.heartbeat_seconds,
            lost_after_seconds=SECONDS,
            no_progress_seconds=SECONDS,
            last_accepted=self.last_accepted,
            resume_secret=self.secret,
            epoch=self.epoch,
        )

    async def Watch(  # type: ignore[override]  # grpc takes a coroutine that writes to the context, too
        self, request_iterator: AsyncIterator[pb.WatchRequest], context: Any
    ) -> None:
        self._require_session(context)
        reading = asyncio.create_task(self._read(request_iterator))
        event: pb.ServerEvent | FedringError = pb.ServerEvent(heartbeat=pb.Heartbeat())
        try:
            while not reading.done():
                if isinstance(event, FedringError):
                    raise event
                await context.write(event)
                try:
                    event = await asyncio.wait_for(self._outbox.get(), 0.2)
                except TimeoutError:
                    event = pb.ServerEvent(heartbeat=pb.Heartbeat())
        finally:
            reading.cancel()

    async def ReportEvaluation(self, request: pb.EvaluationReport, context: Any) -> pb.EvaluationAck:
        self._require_session(context)
        self.evaluations.put(request)
        if error := self.on_evaluation():
            raise error
        return pb.EvaluationAck()

    async def FetchModel(self, request: pb.FetchModelRequest, context: Any) -> AsyncIterator[pb.ModelBlob]:
        self._require_session(context)
        self.fetches.put(request)
        offers = next(each for each in self.models.values() if each[-1][0].model_digest == request.digest)
        header, payload = next((o for o in offers if o[0].base_digest in ("", request.held_digest)), offers[-1])
        yield pb.ModelBlob(header=header)
        start = request.offset if request.payload_name == header.payload_name else 0
        for offset in range(start, len(payload), PIECE):
            if error := self.on_chunk(offset):
                raise error
            yield pb.ModelBlob(chunk=pb.Chunk(offset=offset, data=payload[offset : offset + PIECE]))

    async def PushUpdate(
        self, request_iterator: AsyncIterator[pb.ClientUpdate], context: Any
    ) -> AsyncIterator[pb.UpdateReply]:
        self._require_session(context)
        offer = (await anext(request_iterator)).offer
        header = self._open(offer, "PushUpdate", context)
        if offer.name in self._taken:
            yield pb.UpdateReply(accepted=pb.Accepted(already=True))
            return
        received = self._partial.setdefault(offer.name, bytearray())
        self.resumed.append(len(received))
        yield pb.UpdateReply(resume_offset=len(received))
        while len(received) < header.total_bytes:
            message = await anext(request_iterator, None)
            if message is None:
                raise BadRequest(reason="truncated")
            chunk = message.chunk
            if chunk.offset != len(received):
                raise BadRequest(reason="bad_chunk")
            received += chunk.data
            if error := self.on_bytes(len(received)):
                raise error
        self._take(offer, header, self._partial.pop(offer.name))
        yield pb.UpdateReply(accepted=pb.Accepted())

    async def PushSmallUpdates(
        self, request_iterator: AsyncIterator[pb.SmallUpdate], context: Any
    ) -> AsyncIterator[pb.Accepted]:
        self._require_session(context)
        self.small_calls += 1
        async for request in request_iterator:
            header = self._open(request.offer, "PushSmallUpdates", context)
            self._take(request.offer, header, bytearray(request.payload))
            if error := self.on_accepted():
                raise error
            yield pb.Accepted()

    async def Form(  # type: ignore[override]  # grpc takes a coroutine that writes to the context, too
        self, request_iterator: AsyncIterator[rendezvous_pb2.WorkerMessage], context: Any
    ) -> None:
        self._require_session(context)
        if self.form is None:
            raise UnknownMethod
        await self.form(request_iterator, context)

    def _open(self, offer: pb.UpdateOffer, call: str, context: Any) -> pb.UpdateHeader:
        """Return the header of an offered update, or raise the error with which the test refuses it."""
        self.offers.put(offer)
        self.upload_calls.append((call, context.peer()))
        if update_name(offer.header, offer.payload_digest) != offer.name:
            raise DamagedOnTheWay("the header does not match the name")
        header = pb.UpdateHeader.FromString(offer.header)
        if error := self.on_header(header):
            raise error
        return header

    def _take(self, offer: pb.UpdateOffer, header: pb.UpdateHeader, received: bytearray) -> None:
        self.on_payload(received)
        payload = bytes(received)
        if name_of(payload) != offer.payload_digest:
            raise DamagedOnTheWay("the payload does not match its digest")
        self._taken.add(offer.name)
        self.last_accepted = pb.LastAccepted(epoch=header.epoch, round=header.round, name=offer.name)
        self.accepted.put((header, payload))

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop, self._outbox = asyncio.get_running_loop(), asyncio.Event(), asyncio.Queue()
        told = [TellTerm(term_text(self.term, self.run_id))] if self.term else []
        server = make_server([*told, Boundary()], max_streams=64)
        for add in (
            rpc.add_TrainCmdServiceServicer_to_server,
            rpc.add_ModelBlobServiceServicer_to_server,
            rpc.add_ClientUpdateServiceServicer_to_server,
            rendezvous_pb2_grpc.add_RendezvousServiceServicer_to_server,
        ):
            add(self, server)
        server.add_insecure_port(f"127.0.0.1:{self.port}")
        await server.start()
        started.set()
        await self._stop.wait()
        await server.stop(None)

    async def _read(self, requests: AsyncIterator[pb.WatchRequest]) -> None:
        async for request in requests:
            self.reports.put(request)
            if request.HasField("failure"):
                self.failures.put(request.failure)

    def _require_session(self, context: Any) -> None:
        """Refuse a call of any but the newest session."""
        if dict(context.invocation_metadata()).get("fl-session") != str(self._sessions):
            raise NoSession("join first")


def _offer(
    version: int, schema: Schema, vectors: Vectors, kind: "pb.Kind.ValueType", digest: str, base: str
) -> tuple[pb.ModelHeader, bytes]:
    parts: list[tuple[pb.Vector.ValueType, str, bytes]] = []
    if vectors.parameters.size:
        parts.append((pb.VECTOR_PARAMETERS, "fp32", encode(vectors.parameters, Encoding("fp32"))))
    if vectors.buffers.size:
        parts.append((pb.VECTOR_BUFFERS, "fp64", encode_buffers(vectors.buffers)))
    payload = b"".join(data for _, _, data in parts)
    header = pb.ModelHeader(
        run_id=RUN,
        version=version,
        schema_hash=schema.hash,
        schema=schema.json,
        packets=[pb.Packet(vector=v, kind=kind, encoding=name, bytes=len(data)) for v, name, data in parts],
        base_digest=base,
        total_bytes=len(payload),
        payload_name=name_of(payload),
        model_digest=digest,
    )
    return header, payload
