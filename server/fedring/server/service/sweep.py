"""Heartbeats of all sessions, and the silence that ends them.

A client in a round beats quickly, so that its loss is soon noticed. The many others beat seldom, because each heartbeat
costs processor time. Only clients beat. The server says how often, and repeats that after ten periods, so that a client
whose session has ended without a word learns of it in the end.
"""

import asyncio
import time
from math import inf

from fedring.rpc.errors import Stalled, Unauthenticated
from fedring.server.config import ServerConfig
from fedring.server.running.client_reports import ClientReports
from fedring.server.running.rounds import Rounds
from fedring.server.sessions.sessions import Session, Sessions
from fedring.v1 import federation_pb2 as pb

_REPEAT = 10  # periods after which the server repeats the period
_TICKS = 4  # looks of the sweep in one period of a client in a round
_MOST_TICK = 0.25  # seconds
_AT_ONCE = 256  # sessions that are looked after before others may run


class SessionSweep:
    """One task that looks after all sessions in turn.

    Args:
        rounds: Say who is in a round.
        reports: Are told of clients that stall or are lost.
        sessions: The sessions.
        config: Of the server, with its periods.
    """

    def __init__(self, rounds: Rounds, reports: ClientReports, sessions: Sessions, config: ServerConfig) -> None:
        self._rounds, self._reports, self._sessions = rounds, reports, sessions
        self._quick, self._idle, self._lost = config.heartbeat_seconds, config.idle_seconds, config.lost_after_seconds
        self._plain, self._to_quick, self._to_idle = map(_heartbeat, (0.0, self._quick, self._idle))
        self.heartbeats = (self._plain, self._to_quick, self._to_idle)

    async def run(self) -> None:
        """Look after the sessions until cancelled."""
        tick = min(self._quick / _TICKS, _MOST_TICK)
        while True:
            now = time.monotonic()
            due = [session for session in self._sessions.open if session.look_at <= now]
            for number, session in enumerate(due, 1):
                self.look(session, time.monotonic())
                if number % _AT_ONCE == 0:
                    await asyncio.sleep(0)
            await asyncio.sleep(tick)

    def greeting(self, session: Session) -> bytes:
        """Return the first event of a session, which sets its period."""
        session.quick, session.look_at = not session.paced or self._rounds.awaits(session.client_id), 0.0
        return self._heartbeat(session)

    def look(self, session: Session, now: float) -> None:
        """End a session that is lost, or send it a heartbeat.

        `now` is the time, in monotonic seconds. The session is looked at again when something may have become due.
        """
        if session.closed.is_set():
            return
        ends_at = inf if session.owner.ends_at is None else session.owner.ends_at - time.time() + now
        if now >= ends_at:
            session.close(Unauthenticated("the token of this session has expired", reason="expired_token"))
            return
        if not session.watching:
            # A client that joins, but never watches, must not hold its place forever, whatever calls it makes.
            session.look_at = session.joined + self._lost
            if now >= session.look_at:
                self._reports.left(session)
            return
        silence = self._lost + (0.0 if session.quick else self._idle)
        lost_at = max(session.heard, session.hurried) + silence
        # Both ways count: a client that beats but never reads would fill its queue.
        if now >= lost_at or (session.writing and now >= session.spoke + self._lost):
            session.close(Stalled(f"{session.client_id} said or read nothing for {silence:g} s"))
            return
        if self._rounds.awaits(session.client_id):
            session.engaged = now
        elif session.quick and session.paced and now >= session.engaged + self._lost:
            session.quick = False
            session.send(self._to_idle)
        elif self._can_leave(session, now):
            session.close(self._sessions.send_away(session.client_id))
            return
        speaks_at = session.spoke + self._every(session)
        if now >= speaks_at:
            speaks_at = now + self._every(session)
            if not session.writing:
                session.send(self._heartbeat(session))
        if now >= (stalls_at := self._reports.stalls_at(session)):
            self._reports.stalled(session)
            stalls_at = inf
        again = now + self._quick if session.quick else inf
        if self._sessions.pace.most:
            again = min(again, max(now + self._quick, session.engaged + self._sessions.pace.stay))
        session.look_at = min(again, lost_at, ends_at, speaks_at, stalls_at)

    def _can_leave(self, session: Session, now: float) -> bool:
        """Return whether a client is not needed, and one of many."""
        pace = self._sessions.pace
        if not (pace.most and session.paced and session.matched) or now < session.engaged + pace.stay:
            return False
        busy = session.transfers or session.late_since or self._rounds.gathering
        return not busy and pace.crowded(len(self._sessions), now)

    def _every(self, session: Session) -> float:
        if not session.paced:
            return self._quick
        return _REPEAT * (self._quick if session.quick else self._idle)

    def _heartbeat(self, session: Session) -> bytes:
        if not session.paced:
            return self._plain
        return self._to_quick if session.quick else self._to_idle


def _heartbeat(seconds: float) -> bytes:
    return pb.ServerEvent(heartbeat=pb.Heartbeat(period_seconds=seconds)).SerializeToString()
