"""The gRPC service of groups, with one stream for each worker.

Workers report their work, and are told their next step.
"""

import asyncio
import re
from collections.abc import AsyncIterator
from typing import Any

from fedring.codec.errors import CodecError
from fedring.rpc.address import check_peer_address
from fedring.rpc.errors import BadRequest, Gone, UnknownRound, refusal_in
from fedring.rpc.streams import TimedStream, write
from fedring.server.config import ServerConfig
from fedring.server.group import machine as gr
from fedring.server.group.rendezvous import Rendezvous
from fedring.server.round.open_round import OpenRound
from fedring.server.running.rounds import Rounds
from fedring.server.sessions.sessions import Session, Sessions
from fedring.server.update.admission import check_figures
from fedring.train.bounds import MAX_SAMPLES
from fedring.v1 import rendezvous_pb2 as pb
from fedring.v1 import rendezvous_pb2_grpc as rpc

_ADDRESS = re.compile(r"[!-~]{1,500}")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")


class RendezvousService(rpc.RendezvousServiceServicer):
    """Serves one stream of reports and instructions for each worker."""

    def __init__(self, rounds: Rounds, sessions: Sessions, config: ServerConfig) -> None:
        self._rounds, self._sessions, self._config = rounds, sessions, config
        self._streams: dict[str, asyncio.Event] = {}  # the newest of each client; set when a newer one comes

    async def Form(  # type: ignore[override]  # grpc takes a coroutine that writes to the context, too
        self, request_iterator: AsyncIterator[pb.WorkerMessage], context: Any
    ) -> None:
        session = self._sessions.of(context)
        client, replaced = session.client_id, asyncio.Event()
        first = await anext(TimedStream(request_iterator, self._config.lost_after_seconds), None)
        open_, group = self._enter(client, first)
        if older := self._streams.get(client):
            older.set()
        self._streams[client] = replaced
        try:
            async with asyncio.TaskGroup() as tasks:
                parts = (
                    self._listen(session, open_, request_iterator),
                    self._speak(client, group, context),
                    self._guard(session.closed),
                    self._guard(replaced),
                )
                for part in parts:
                    tasks.create_task(part)
        except ExceptionGroup as group:
            if (refusal := refusal_in(group)) is not None:  # workers learn of the end of a stream from the state
                raise refusal from None
        finally:
            if self._streams.get(client) is replaced:
                del self._streams[client]
                self._rounds.groups.handle(open_, gr.WorkerLeft(client))

    def _enter(self, client: str, message: pb.WorkerMessage | None) -> tuple[OpenRound, Rendezvous]:
        """Return the round and the group entered by a worker's first message.

        Raises:
            UnknownRound: if the round is not open for it.
        """
        if message is None or not message.HasField("enter"):
            raise BadRequest("the first message must be Enter")
        enter = message.enter
        self._rounds.interrupted.check(enter.round)
        open_ = self._rounds.get(enter.round)
        group = open_.group if open_ is not None and client in open_.row.selected else None
        if open_ is None or group is None or not group.active or enter.run_id != open_.command.run_id:
            raise UnknownRound(f"no round {enter.round} of a group is open for {client}")
        if not group.can_know(enter.generation):
            raise BadRequest(f"no generation {enter.generation} was ever formed")
        self._rounds.groups.handle(open_, gr.Entered(client, enter.generation))
        return open_, group

    async def _listen(self, session: Session, open_: OpenRound, messages: AsyncIterator[pb.WorkerMessage]) -> None:
        async for message in messages:  # without a deadline: the session notices whether the client lives
            session.hear()
            self._hear(session.client_id, open_, message)
        raise Gone("the worker closed its side")

    def _hear(self, client: str, open_: OpenRound, message: pb.WorkerMessage) -> None:
        match message.WhichOneof("message"):
            case "ready":
                ready = message.ready
                _check_address(ready.address)
                said = gr.Ready(client, ready.generation, ready.address, ready.steps, ready.samples)
                self._rounds.groups.handle(open_, said)
            case "joined":
                self._rounds.groups.handle(open_, gr.WorkerJoined(client, message.joined.generation))
            case "broken":
                broken = message.broken
                reason = broken.reason if _NAME.fullmatch(broken.reason) else "broken"
                self._rounds.groups.handle(open_, gr.Broken(client, broken.generation, reason))
            case "done":
                check_done(message.done)
                done = message.done
                # The result is noted before the event, which may end the group and so the round.
                if open_.group is not None:
                    open_.group.note(client, done)
                event = gr.WorkerDone(client, done.generation, done.digest, not done.cannot_deliver)
                self._rounds.groups.handle(open_, event)
            case _:
                raise BadRequest("this message is not known, or came too late")

    async def _speak(self, client: str, group: Rendezvous, context: Any) -> None:
        """Send the worker each change of its instruction, until its group ends."""
        told = None
        while told is None or not told.HasField("ended"):
            moved, now = group.moved, group.view(client)
            if now == told:
                await moved.wait()
                continue
            await write(context, now, self._config.lost_after_seconds)
            told = now
        raise Gone("there is nothing more to say")

    async def _guard(self, ended: asyncio.Event) -> None:
        await ended.wait()
        raise Gone("the session is lost, or another stream took over")


def check_done(done: pb.Done) -> None:
    """Check a worker's report of its work.

    Args:
        done: The worker's message.

    Raises:
        BadRequest: "bad_done", if the digest or the number of samples cannot be; "bad_metrics" as of an update.
    """
    if len(done.digest) != 32 or done.num_samples > MAX_SAMPLES:
        text = (
            f"a digest must be 32 bytes, not {len(done.digest)}, and num_samples at most 2^40, not {done.num_samples}"
        )
        raise BadRequest(text, reason="bad_done")
    try:
        check_figures(done.train_seconds, done.metrics)
    except CodecError as error:  # a group of tasks would report it as a fault, not as a refusal
        raise BadRequest(str(error), reason=error.reason) from error


def _check_address(text: str) -> None:
    """Check the address at which others are to reach a worker.

    The worker's words about its host may follow it after a semicolon.

    Raises:
        BadRequest: With the reason bad_address.
    """
    try:
        if not _ADDRESS.fullmatch(text):
            raise ValueError("it is too long, or not ASCII")
        check_peer_address(text.partition(";")[0])
    except ValueError as error:
        raise BadRequest(f"an address must be host:port: {error}", reason="bad_address") from error
