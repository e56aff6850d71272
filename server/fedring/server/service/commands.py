"""TrainCmdService: clients join, watch for commands, and report evaluations."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from typing import Any

from fedring.rpc.contract import PROTOCOL
from fedring.rpc.errors import BadRequest, Gone, IdInUse, Unavailable, refusal_in
from fedring.rpc.identity import NAME
from fedring.rpc.streams import after_write, wire_bytes, write_whole
from fedring.server.config import ServerConfig
from fedring.server.round.events import Joined
from fedring.server.running.client_reports import ClientReports
from fedring.server.running.rounds import Rounds
from fedring.server.service.sweep import SessionSweep
from fedring.server.sessions.sessions import Session, Sessions
from fedring.server.state.facts import Facts
from fedring.server.state.journal import Journal
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import federation_pb2_grpc as rpc
from fedring.version import SOFTWARE


class TrainCmdService(rpc.TrainCmdServiceServicer):
    """Opens sessions, and keeps their streams."""

    def __init__(
        self,
        rounds: Rounds,
        reports: ClientReports,
        sessions: Sessions,
        facts: Facts,
        journal: Journal,
        sweep: SessionSweep,
        config: ServerConfig,
    ) -> None:
        self._rounds, self._reports, self._sessions, self._sweep = rounds, reports, sessions, sweep
        self._facts, self._journal, self._config = facts, journal, config

    async def Join(self, request: pb.JoinRequest, context: Any) -> pb.JoinReply:
        if request.protocol != PROTOCOL:
            older = "the client" if request.protocol < PROTOCOL else "fl-server"
            text = f"fl-server speaks protocol {PROTOCOL}, the client {request.protocol}: update {older}"
            raise BadRequest(text, reason="wrong_protocol")
        self._admit(request.client_id)
        try:
            session = self._sessions.join(request, context.peer())
        except IdInUse:
            self._contested(request.client_id, context.peer())
            raise
        self._rounds.presence(Joined(session.client_id, session.labels, session.max_jobs))
        last = self._facts.last_accepted.get(session.client_id)
        return pb.JoinReply(
            session_id=session.session_id,
            run_id=self._facts.store.run_id,
            heartbeat_seconds=self._config.heartbeat_seconds,
            lost_after_seconds=self._config.lost_after_seconds,
            no_progress_seconds=self._config.no_progress_seconds,
            software=SOFTWARE,
            last_accepted=pb.LastAccepted(epoch=last.epoch, round=last.round, name=last.name) if last else None,
            resume_secret=session.secret,
            epoch=self._facts.store.epoch,
        )

    async def Watch(  # type: ignore[override]  # grpc takes a coroutine that writes to the context, too
        self, request_iterator: AsyncIterator[pb.WatchRequest], context: Any
    ) -> None:
        session = self._sessions.of(context)
        session.watching, writing = True, asyncio.Lock()
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._speak(session, context, writing))
                for part in (self._listen(session, request_iterator), _until_closed(session)):
                    tasks.create_task(_between_writes(part, writing))
        except ExceptionGroup as group:
            if (refusal := refusal_in(group)) is not None:  # the end of a stream is told by `left`
                raise refusal from None
        finally:
            self._reports.left(session)

    async def ReportEvaluation(self, request: pb.EvaluationReport, context: Any) -> pb.EvaluationAck:
        session = self._sessions.of(context)
        await self._reports.evaluated(session.client_id, request)
        return pb.EvaluationAck()

    async def _listen(self, session: Session, requests: AsyncIterator[pb.WatchRequest]) -> None:
        async for request in requests:
            if session.closed.is_set():  # its stream only waits for a write to end; another session may count by now
                return
            session.hear()
            if session.report(request):
                self._reports.moved(session.client_id)
            self._rounds.works(session)
            if request.matched and not session.matched:
                self._sessions.arrived(session)
                self._reports.matched(session.client_id)
                if not session.was_sent_away:  # else operators were not told that it had gone
                    self._journal.write("client_joined", f"{session.client_id} is here", client_id=session.client_id)
            if request.HasField("failure"):
                self._reports.failed(session.client_id, request.failure)
        raise Gone("the client closed its side")

    async def _speak(self, session: Session, context: Any, writing: asyncio.Lock) -> None:
        event = self._sweep.greeting(session)
        while True:
            session.spoke, session.writing = time.monotonic(), True
            async with writing:  # a task for each write would cost more than the write itself
                await write_whole(context, event)
            session.writing = False
            if event not in self._sweep.heartbeats:
                self._reports.traffic(session.client_id).download_bytes += wire_bytes(event)
            event = await session.outbox.get()

    def _admit(self, client: str) -> None:
        """Send a client away if there are too many.

        Too many come at once, or more are here than may be. A client that a round waits for is always let in, and so is
        one that takes over its own session.
        """
        sessions, rounds = self._sessions, self._rounds
        if not NAME.fullmatch(client):
            return  # it is refused for that
        if rounds.awaits(client) or sessions.get(client) is not None:
            return
        sessions.check_line()
        if 0 < sessions.pace.most <= len(sessions) and not rounds.gathering:
            raise sessions.send_away(client)

    def _contested(self, client_id: str, peer: str) -> None:
        """Tell operators of a rival for the id of a client.

        The client is in session. They are told once for all tries of the rival.
        """
        session, now = self._sessions.get(client_id), time.monotonic()
        if session is not None and now >= session.contested + 3 * self._config.lost_after_seconds:
            session.contested = now
            text = f"{client_id} is here already: another client, at {peer}, was refused this id"
            self._journal.write("client_refused", text, client_id=client_id)


async def _between_writes(part: Coroutine[Any, Any, None], writing: asyncio.Lock) -> None:
    """Run a part of a stream; its error waits for a write."""
    try:
        await part
    except Exception:
        await after_write(writing)
        raise


async def _until_closed(session: Session) -> None:
    await session.closed.wait()
    raise session.reason or Unavailable("the session was closed")
