"""A server of secure aggregation on the wire that does what a test says: honest by default, or as malicious as can be.

It speaks all services that a client uses. A test takes a round from step to step: each step sends what an honest server
would send, or other messages to some clients, and waits for what they answer.
"""

import asyncio
import threading
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from functools import partial
from typing import Any, Self

import numpy as np
from google.protobuf.message import Message
from numpy.typing import NDArray
from torch import nn

from fedring.codec import Encoding, Vectors, encode
from fedring.codec.digest import name_of
from fedring.rpc.boundary import Boundary
from fedring.rpc.channel import make_server
from fedring.rpc.errors import NoSession, Unavailable, UnknownRound
from fedring.rpc.tls import PLAINTEXT, Tls, server_credentials
from fedring.secure.levels import open_blocks
from fedring.secure.limits import bits_of_sum
from fedring.secure.masks import MaskedPacket, Width, Words
from fedring.train.tensors.state import read_vectors, schema_of
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import federation_pb2_grpc as rpc
from fedring.v1 import secure_pb2 as wire
from fedring.v1 import secure_pb2_grpc as secure_rpc
from tests.honest_clients import BLOCK, LEVELS, SECONDS, STEP, learned, new_model
from tests.secure_sums import (
    masks_of,
    peers_of,
    read_roster,
    roster_of,
    survivors_of,
    total_of,
    unmask_of,
)

RUN = "run-1"


class SecureServer(
    rpc.TrainCmdServiceServicer,
    rpc.ModelBlobServiceServicer,
    rpc.ClientUpdateServiceServicer,
    secure_rpc.SecureAggregationServiceServicer,
):
    """The server. Its methods that take steps belong to the test's thread."""

    def __init__(self, tls: Tls = PLAINTEXT) -> None:
        self.address = ""
        self.commands: dict[int, pb.TrainCmd] = {}  # by round
        self.keys: dict[tuple[int, str], wire.SecureKeys] = {}  # by round and client, and so are all others
        self.shares: dict[tuple[int, str], wire.SecureShares] = {}
        self.payloads: dict[tuple[int, str], bytes] = {}
        self.signatures: dict[tuple[int, str], wire.SurvivorsSignature] = {}
        self.answers: dict[tuple[int, str], wire.UnmaskShares] = {}
        self.failures: dict[tuple[int, str], str] = {}  # the last reason
        self.seen: dict[str, list[tuple[str, ...]]] = defaultdict(list)  # what each client has sent, in order
        self.progress: dict[str, list[float]] = defaultdict(list)  # that the heartbeats of each client tell
        self.said_twice: dict[str, int] = defaultdict(int)  # how often a call repeated a message, by its name
        self.contradictions: list[str] = []  # of clients that said something else than before
        self.lost_answers: set[str] = set()  # calls of which the next answer is lost
        self.refuse_updates = threading.Event()  # while it is set, no update is taken
        self.offered: dict[str, set[str]] = defaultdict(set)  # the payloads that each client has offered
        self.matched: set[str] = set()  # clients in session
        self._tls = tls
        self._sessions: dict[str, str] = {}  # client by session
        self._newest: dict[str, str] = {}  # session by client
        self._outboxes: dict[str, asyncio.Queue[pb.ServerEvent]] = {}  # by session
        self._known = threading.Condition()

    def __enter__(self) -> Self:
        started = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve(started)), name="secure server")
        self._thread.start()
        assert started.wait(SECONDS)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Stop it. No client may have said two different things."""
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()
        assert kind or self.contradictions == []

    def until(self, happened: Callable[[], object]) -> None:
        """Wait until something has happened."""
        with self._known:
            assert self._known.wait_for(happened, SECONDS), self.failures

    def command(self, round_: int, model: nn.Module | None = None, **fields: Any) -> pb.TrainCmd:
        """Return the command of a round.

        Args:
            round_: the round.
            model: what it starts from; None = that of all rounds.
            fields: of the command.
        """
        model = new_model() if model is None else model
        schema, vectors = schema_of(model), read_vectors(model)
        payload = encode(vectors.parameters, Encoding("fp32"))
        header = pb.ModelHeader(
            run_id=RUN,
            version=1,
            schema_hash=schema.hash,
            schema=schema.json,
            packets=[pb.Packet(vector=pb.VECTOR_PARAMETERS, kind=pb.KIND_WEIGHTS, encoding="fp32", bytes=len(payload))],
            total_bytes=len(payload),
            payload_name=name_of(payload),
            model_digest=Vectors(vectors.parameters, vectors.buffers).digest(),
        )
        count = -(-schema.num_parameters // BLOCK)
        secure = wire.SecureRound(scales=np.full(count, STEP, "<f4").tobytes(), block=BLOCK, levels=LEVELS)
        given: dict[str, Any] = {"run_id": RUN, "job_round": 1, "model_version": 1, "deadline_seconds": 600.0}
        given |= {"epochs": 1, "batch_size": 8, "lr": 0.1, "seed": round_, "max_update_bytes": 1 << 30}
        given |= {"job": pb.JobSpec(mode="federated", rounds=9, min_results=3, secure_aggregation='{"block": 16}')}
        given |= {"encoding": pb.Encoding(name="masked"), "model_digest": header.model_digest, "secure": secure}
        given |= {"model": pb.SmallModel(header=header, payload=payload)} | fields
        return pb.TrainCmd(round=round_, schema_hash=schema.hash, **given)

    def begin(self, round_: int, names: Iterable[str], **fields: Any) -> None:
        """Start a round, and wait for the keys of its clients."""
        names = list(names)
        self.commands[round_] = self.command(round_, **fields)
        self.until(lambda: self.matched >= set(names))
        for name in names:
            self.train(name, self.commands[round_])
        self.await_all(self.keys, round_, names)

    def await_all(self, messages: Mapping[tuple[int, str], object], round_: int, names: Iterable[str]) -> None:
        """Wait until all these clients have sent a message."""
        wanted = {(round_, name) for name in names}
        self.until(lambda: wanted <= messages.keys())

    def of(self, messages: Mapping[tuple[int, str], Any], round_: int) -> dict[str, Any]:
        """Return the messages of a round, by client."""
        return {name: message for (number, name), message in sorted(messages.items()) if number == round_}

    def roster(self, round_: int) -> wire.SecureRoster:
        """Return the honest group: all that have sent keys."""
        return roster_of(self.of(self.keys, round_))

    def share(self, round_: int) -> None:
        """Tell all clients their group, and wait for their shares."""
        names = self.of(self.keys, round_)
        for name in names:
            self.step(name, round_, roster=self.roster(round_))
        self.await_all(self.shares, round_, names)

    def pair(self, round_: int) -> None:
        """Tell all clients their peers, and wait for their updates."""
        names = self.of(self.shares, round_)
        for name in names:
            self.step(name, round_, peers=peers_of(names, name))
        self.await_all(self.payloads, round_, names)

    def name_survivors(self, round_: int, names: Iterable[str] | None = None) -> None:
        """Tell all survivors who they are, and wait for their signatures.

        Args:
            round_: the round.
            names: the survivors; None = all that have sent updates.
        """
        survivors = sorted(self.of(self.payloads, round_) if names is None else names)
        for name in survivors:
            self.step(name, round_, survivors=survivors_of(survivors))
        self.await_all(self.signatures, round_, survivors)

    def unmask(self, round_: int) -> None:
        """Show all who have signed the signatures, and wait for their answers."""
        signatures = self.of(self.signatures, round_)
        for name in signatures:
            self.step(name, round_, unmask=unmask_of(signatures))
        self.await_all(self.answers, round_, signatures)

    def run_round(self, round_: int, names: Iterable[str], **fields: Any) -> NDArray[np.int64]:
        """Take a round from its start to its end, and return the sum of the clients' integers."""
        self.begin(round_, names, **fields)
        self.share(round_)
        self.pair(round_)
        self.name_survivors(round_)
        self.unmask(round_)
        return self.total(round_)

    def total(self, round_: int) -> NDArray[np.int64]:
        """Return the sum of the clients' integers, as an honest server computes it, [n]."""
        survivors = sorted(self.of(self.signatures, round_))
        group = read_roster(self.roster(round_), self.commands[round_])
        masks = masks_of(group, sorted(self.of(self.shares, round_)), survivors, self.of(self.answers, round_))
        return total_of([self.words(round_, name) for name in survivors], masks, self.bits(round_))

    def bits(self, round_: int) -> int:
        """Return the bits of a masked value."""
        return bits_of_sum(len(self.of(self.keys, round_)), LEVELS, self.commands[round_].secure.max_weight or 1)

    def words(self, round_: int, name: str) -> Words:
        """Return a client's masked integers."""
        payload, secure = self.payloads[round_, name], self.commands[round_].secure
        count = open_blocks(secure, learned(name, round_).size).count + bool(secure.max_weight)
        packet = MaskedPacket(lambda at, size: payload[at : at + size], len(payload), Width(count, self.bits(round_)))
        return packet.words(0, count)

    def failure(self, round_: int, name: str) -> str:
        """Wait until a client fails in a round, and return its reason."""
        self.until(lambda: (round_, name) in self.failures)
        return self.failures[round_, name]

    def train(self, name: str, command: pb.TrainCmd) -> None:
        """Send a command to one client."""
        self.send(name, pb.ServerEvent(train=command))

    def step(self, name: str, round_: int, **step: Message) -> None:
        """Send a step of a round to one client."""
        command = self.commands[round_]
        sent = wire.SecureStep(run_id=command.run_id, epoch=command.epoch, round=round_, **step)  # type: ignore[arg-type]  # one of the steps
        self.send(name, pb.ServerEvent(secure=sent))

    def end(self, name: str, round_: int, reason: str = "") -> None:
        """Tell a client that a round has ended."""
        self.send(name, pb.ServerEvent(round_ended=pb.RoundEnded(round=round_, reason=reason)))

    def send(self, name: str, event: pb.ServerEvent) -> None:
        """Send an event to one client, which is in session."""
        outbox = self._outboxes[self._newest[name]]
        asyncio.run_coroutine_threadsafe(outbox.put(event), self._loop).result()

    def gone(self, name: str) -> None:
        """Wait until a client is no longer in session."""
        self.until(lambda: name not in self.matched)

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        session = f"{request.client_id} {len(self._sessions)}"
        self._sessions[session], self._newest[request.client_id] = request.client_id, session
        self._outboxes[session] = asyncio.Queue()
        return pb.JoinReply(
            session_id=session,
            run_id=RUN,
            heartbeat_seconds=0.5,
            lost_after_seconds=SECONDS,
            no_progress_seconds=SECONDS,
        )

    async def Watch(  # type: ignore[override]  # grpc takes a coroutine that writes to the context, too
        self, request_iterator: AsyncIterator[pb.WatchRequest], context: Any
    ) -> None:
        client, session = self._client(context), _session(context)
        reading = asyncio.create_task(self._read(client, request_iterator))
        event = pb.ServerEvent(heartbeat=pb.Heartbeat())
        try:
            while not reading.done():
                await context.write(event)
                try:
                    event = await asyncio.wait_for(self._outboxes[session].get(), 0.5)
                except TimeoutError:
                    event = pb.ServerEvent(heartbeat=pb.Heartbeat())
        finally:
            reading.cancel()
            if self._newest[client] == session:
                self._note(lambda: self.matched.discard(client))

    async def FetchModel(self, request: pb.FetchModelRequest, context: Any) -> AsyncIterator[pb.ModelBlob]:
        model = next(each.model for each in self.commands.values() if each.model_digest == request.digest)
        yield pb.ModelBlob(header=model.header)
        yield pb.ModelBlob(chunk=pb.Chunk(data=model.payload))

    async def ReportEvaluation(self, request: pb.EvaluationReport, context: Any) -> pb.EvaluationAck:
        return pb.EvaluationAck()

    async def PushSmallUpdates(
        self, request_iterator: AsyncIterator[pb.SmallUpdate], context: Any
    ) -> AsyncIterator[pb.Accepted]:
        client = self._client(context)
        async for request in request_iterator:
            self._open(client, request.offer)
            header = pb.UpdateHeader.FromString(request.offer.header)
            self.seen[client].append(("UpdateHeader", *_form(header)))
            assert [packet.encoding for packet in header.packets] == ["masked"]
            assert (header.train_seconds, len(header.metrics), header.packets[0].num_samples) == (0, 0, 1)
            self._take("PushSmallUpdates", self.payloads, (header.round, client), request.payload)
            yield pb.Accepted()

    async def PushUpdate(
        self, request_iterator: AsyncIterator[pb.ClientUpdate], context: Any
    ) -> AsyncIterator[pb.UpdateReply]:
        client, offer = self._client(context), (await anext(request_iterator)).offer
        header = pb.UpdateHeader.FromString(offer.header)
        self._open(client, offer)
        known = self.payloads.get((header.round, client))
        if known is not None and name_of(known) == offer.payload_digest:
            yield pb.UpdateReply(accepted=pb.Accepted(already=True))
            return
        yield pb.UpdateReply(resume_offset=0)
        payload = b"".join([message.chunk.data async for message in request_iterator])
        if len(payload) < header.total_bytes:
            raise UnknownRound("the client has only asked")
        self._take("PushUpdate", self.payloads, (header.round, client), payload)
        yield pb.UpdateReply(accepted=pb.Accepted())

    async def SendKeys(self, request: wire.SecureKeys, context: Any) -> wire.SecureAck:
        return self._take("SendKeys", self.keys, (request.round, self._client(context)), request)

    async def SendShares(self, request: wire.SecureShares, context: Any) -> wire.SecureAck:
        return self._take("SendShares", self.shares, (request.round, self._client(context)), request)

    async def SignSurvivors(self, request: wire.SurvivorsSignature, context: Any) -> wire.SecureAck:
        return self._take("SignSurvivors", self.signatures, (request.round, self._client(context)), request)

    async def SendUnmaskShares(self, request: wire.UnmaskShares, context: Any) -> wire.SecureAck:
        return self._take("SendUnmaskShares", self.answers, (request.round, self._client(context)), request)

    def _open(self, client: str, offer: pb.UpdateOffer) -> None:
        self._note(partial(self.offered[client].add, offer.payload_digest))
        if self.refuse_updates.is_set():
            raise Unavailable("no update is taken now")

    def _take(
        self, call: str, messages: dict[tuple[int, str], Any], key: tuple[int, str], message: Any
    ) -> wire.SecureAck:
        """Note a message, which must be the same each time."""
        self.seen[key[1]].append((call, *(_form(message) if isinstance(message, Message) else [str(len(message))])))
        if key in messages:
            self.said_twice[call] += 1
            if messages[key] != message:
                self.contradictions.append(f"{call} of {key}")
                raise UnknownRound("another message was sent before", reason="other_message")
        self._note(lambda: messages.setdefault(key, message))
        if call in self.lost_answers:
            self.lost_answers.remove(call)
            raise Unavailable("the answer is lost")
        return wire.SecureAck()

    def _note(self, change: Callable[[], object]) -> None:
        with self._known:
            change()
            self._known.notify_all()

    async def _serve(self, started: threading.Event) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        server = make_server([Boundary()], max_streams=256, tls=self._tls)
        for add in (
            rpc.add_TrainCmdServiceServicer_to_server,
            rpc.add_ModelBlobServiceServicer_to_server,
            rpc.add_ClientUpdateServiceServicer_to_server,
            secure_rpc.add_SecureAggregationServiceServicer_to_server,
        ):
            add(self, server)
        if self._tls.on:
            port = server.add_secure_port("localhost:0", server_credentials(self._tls, lambda: None))
        else:
            port = server.add_insecure_port("127.0.0.1:0")
        self.address = f"{'localhost' if self._tls.on else '127.0.0.1'}:{port}"
        await server.start()
        started.set()
        await self._stop.wait()
        await server.stop(None)

    async def _read(self, client: str, requests: AsyncIterator[pb.WatchRequest]) -> None:
        async for request in requests:
            if request.matched:
                self._note(lambda: self.matched.add(client))
            self._note(partial(self.progress[client].append, request.progress))
            if request.HasField("failure"):
                self.seen[client].append(("Failure", request.failure.reason, request.failure.detail))
                self._note(partial(self.failures.update, {(request.failure.round, client): request.failure.reason}))

    def _client(self, context: Any) -> str:
        """Return the client that calls; a call of any but its newest session is refused."""
        client = self._sessions.get(_session(context), "")
        if self._newest.get(client) != _session(context):
            raise NoSession("join first")
        return client


def _form(message: Message) -> list[str]:
    """Return the fields of a message, each with its number of bytes."""
    return [f"{field.name} {len(_bytes_of(value))}" for field, value in message.ListFields()]


def _bytes_of(value: Any) -> bytes:
    if isinstance(value, Message):
        return value.SerializeToString()
    if isinstance(value, bytes | str):
        return value if isinstance(value, bytes) else value.encode()
    return b"".join(map(_bytes_of, value)) if hasattr(value, "__len__") else b"1"


def _session(context: Any) -> str:
    return str(dict(context.invocation_metadata()).get("fl-session"))
