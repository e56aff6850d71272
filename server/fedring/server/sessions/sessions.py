"""Sessions of connected clients, with their queues of outgoing events."""

import asyncio
import secrets
import time
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from hmac import compare_digest
from math import inf, isfinite
from typing import Any

from fedring.daemon.logs import log_with
from fedring.rpc.chunks import serialize
from fedring.rpc.contract import RESUME_SECRET, SESSION_KEY
from fedring.rpc.errors import (
    BadRequest,
    ComeBack,
    FedringError,
    IdInUse,
    InLine,
    NoSession,
    NotAllowed,
    Overloaded,
    Superseded,
    Unavailable,
)
from fedring.rpc.identity import IDENTITY, NAME, Identity
from fedring.server.sessions.crowd import ARRIVING, Line, PaceSteering
from fedring.server.sessions.returns import Returns
from fedring.server.state.journal import printable
from fedring.train.jobs.labels import Wanted, check_labels, match
from fedring.v1 import federation_pb2 as pb

_MOST_UNAPPROVED = 64

OUTBOX = 64
"""Events that may wait for one client. A client that lets more pile up is cut off."""

MOST_CALLS = 16
"""Calls of one client at once. Five would do, but those of a broken connection may take a while to end."""


@dataclass(slots=True, eq=False)
class Session:
    """A client's session, from Join to the end of its stream.

    The next Join of the client ends it, too.
    """

    client_id: str
    session_id: str
    software: str
    address: str
    owner: Identity  # who opened it; knowing the id alone lets nobody in
    labels: Mapping[str, str] = field(default_factory=dict)  # that it claims
    max_jobs: int = 1  # of how many jobs it takes part in rounds at once; 0 = of none
    secret: str = field(default_factory=lambda: secrets.token_hex(16), repr=False)  # takes over; never stored
    outbox: asyncio.Queue[bytes] = field(default_factory=lambda: asyncio.Queue(OUTBOX))
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    reason: FedringError | None = None  # why it was closed
    watching: bool = False
    matched: bool = False
    holds: str = ""  # the digest of the model that the client was sent last
    activity: int = 0
    progress: float = 0.0
    reports_progress: bool = True  # False while it trains with code that reports none
    last_seen: float = field(default_factory=time.time)  # wall clock, for people
    moved: float = field(default_factory=time.monotonic)  # when its reported progress last changed
    work: pb.Work = field(default_factory=pb.Work)  # what its code works on; round 0 = nothing
    tells_work: bool = False  # whether it says that at all
    ended: int = 0  # the newest round whose end it was told in this session, if it answers that
    late_since: float = 0.0  # wall clock: since when it may work on a round that has ended; 0 = it does not
    transfers: int = 0  # uploads and downloads in progress, which end if their bytes do not move
    was_sent_away: bool = False  # until it has joined; it comes and goes as it was told
    paced: bool = False  # whether it beats as often as it is told, and waits for no heartbeat of the server
    unapproved: frozenset[int] = frozenset()  # jobs that nobody at its site has approved yet
    quick: bool = True  # whether it beats as clients in rounds do
    engaged: float = field(default_factory=time.monotonic)  # when it was last seen to be in a round, or joined
    hurried: float = -inf  # when it was last told to beat quickly
    look_at: float = 0.0  # when there may be something to do for it, monotonic seconds
    joined: float = field(default_factory=time.monotonic)
    heard: float = field(default_factory=time.monotonic)
    spoke: float = field(default_factory=time.monotonic)  # when the newest event began to be written
    writing: bool = False  # whether the newest event is still being written
    contested: float = -inf  # when operators were last told that somebody else wants this client id

    def hear(self) -> None:
        """Note that the client has said something just now."""
        self.last_seen, self.heard = time.time(), time.monotonic()

    def report(self, request: pb.WatchRequest) -> bool:
        """Note the client's activity and progress, and return whether they changed."""
        if request.HasField("work"):
            self.work, self.tells_work = request.work, True
        self.unapproved = frozenset(request.unapproved_jobs[:_MOST_UNAPPROVED])
        progress = request.progress if isfinite(request.progress) else 0.0
        said = (request.activity, progress, not request.reports_no_progress)
        if said == (self.activity, self.progress, self.reports_progress):
            return False
        self.activity, self.progress, self.reports_progress = said
        self.moved = time.monotonic()
        return True

    def send(self, event: pb.ServerEvent | bytes) -> None:
        """Queue an event, or its bytes.

        A client that does not read is cut off: nobody waits for it.
        """
        try:
            self.outbox.put_nowait(serialize(event))
        except asyncio.QueueFull:
            self.close(Overloaded(f"{self.client_id} does not read what it is sent"))

    def ask(self, event: pb.ServerEvent | bytes) -> None:
        """Queue a command, with which the client begins to beat quickly.

        However long it has been silent until now, from now on it is lost as soon as any client in a round.
        """
        self.engaged = time.monotonic()
        if not self.quick:
            self.quick, self.hurried = True, self.engaged
        self.look_at = 0.0
        self.send(event)

    def end(self, ended: pb.RoundEnded) -> None:
        """Tell the client that a round is over.

        A client that tells its work will say that it has read this. Only then it is known whether it is free. A later
        session is not told again, and so it owes no answer.
        """
        if self.tells_work:
            self.ended = ended.round
        self.send(pb.ServerEvent(round_ended=ended))

    def close(self, reason: FedringError) -> None:
        """End the session's stream with `reason`, unless it was ended before."""
        if not self.closed.is_set():
            self.reason = reason
            self.closed.set()


class Sessions:
    """At most one session per client.

    Args:
        limit: The most sessions that may be open at once.
        lost_after_seconds: Silence after which a session is dropped; twice as long a newcomer is to try again.
        pace: Says when clients that are not needed come back; None = all of them stay.
    """

    def __init__(self, limit: int, lost_after_seconds: float = 5.0, pace: PaceSteering | None = None) -> None:
        self._limit = limit
        self.pace, self.line = pace or PaceSteering(0, 0.0), Line()
        self._arriving: set[str] = set()  # sessions that were not greeted yet
        self._retry_seconds = 2 * lost_after_seconds
        self._by_id: dict[str, Session] = {}
        self._by_client: dict[str, Session] = {}
        self._barred: Counter[str] = Counter()  # clients that may not join now
        self._calls: Counter[str] = Counter()  # in progress, by client
        self.returns = Returns()

    def join(self, request: pb.JoinRequest, address: str) -> Session:
        """Open a session for the caller's client, and close its older one.

        An older session gives way to whoever shows its secret, and to a caller who has proven by a certificate or a
        token to be this client. Anybody else could be anyone: then the older session stays, idle or not, and also if
        its client has not begun to watch yet, which it may put off for `lost_after_seconds` at most.

        Raises:
            BadRequest: if the client id, or the secret that is shown, is none, or if the labels are out of bounds.
            IdInUse: if there is an older session that stays.
            Overloaded: if `limit` sessions are open.
            Unavailable: if the client is being forgotten.
        """
        if not NAME.fullmatch(request.client_id):
            raise BadRequest("client_id must be 1 to 128 characters of A-Z a-z 0-9 . _ -", reason="bad_client_id")
        shown, who = request.resume_secret, IDENTITY.get()
        if shown and not RESUME_SECRET.fullmatch(shown):
            raise BadRequest("resume_secret must be as Join returned it, 32 hexadecimal digits in lower case, or empty")
        try:
            labels = check_labels(dict(request.labels))
        except ValueError as error:
            raise BadRequest(f"labels: {error}", reason="bad_labels") from None
        if self._barred[request.client_id]:
            raise Unavailable(f"{request.client_id} is being forgotten: try again")
        older = self._by_client.get(request.client_id)
        if older is None and len(self._by_client) >= self._limit:
            raise Overloaded(f"max_clients={self._limit} sessions are open; raise max_clients or stop a client")
        # Compared in constant time, since the secret is the only proof of a caller without a role.
        if older and who.role is None and not compare_digest(shown, older.secret):
            raise IdInUse(
                f"{older.client_id} is here in another session: give each client an id of its own; if this is the same "
                "client and has lost its resume_secret, try again until that session has ended",
                retry_seconds=self._retry_seconds,
            )
        software = printable(request.software[:128])
        session = Session(request.client_id, secrets.token_hex(16), software, address, who, labels)
        session.secret, session.paced = shown or session.secret, request.paced
        session.max_jobs = request.max_jobs if request.HasField("max_jobs") else 1
        # The older session goes only now, when nothing can refuse the new one any more.
        if older:
            older.close(Superseded(f"a newer session of {older.client_id} took over"))
            self.drop(older)
        self._by_id[session.session_id] = self._by_client[session.client_id] = session
        self._arriving.add(session.session_id)
        session.was_sent_away = self.pace.came(session.client_id)
        self.returns.came(session.client_id, request.startup_seconds, time.monotonic())
        log_with(client=session.client_id)
        return session

    @contextmanager
    def barred(self, client: str) -> Iterator[None]:
        """Let a client that is away not join within."""
        self._barred[client] += 1
        try:
            yield
        finally:
            self._barred[client] -= 1
            if not self._barred[client]:
                del self._barred[client]

    def of(self, context: Any) -> Session:
        """Return the session named by a call, and count the call.

        It counts until the call ends.

        Raises:
            NoSession: if the call names no session, or one that has ended.
            NotAllowed: "other_session" if the session is not the caller's.
            Overloaded: if too many calls of its client are in progress.
        """
        name = next((value for key, value in context.invocation_metadata() or () if key == SESSION_KEY), "")
        session = self._by_id.get(str(name))
        if session is None:
            raise NoSession("this session is not open: join first")
        who = IDENTITY.get()
        if not who.owns(session.owner):
            raise NotAllowed(f"this session is not {who}'s", reason="other_session")
        # Counted by client, not by session: a new session must not bring more calls.
        if self._calls[session.client_id] >= MOST_CALLS:
            raise Overloaded(f"{MOST_CALLS} calls of {session.client_id} are in progress already")
        self._calls[session.client_id] += 1
        context.add_done_callback(lambda _: self._ended(session.client_id))
        session.hear()
        log_with(client=session.client_id)
        return session

    def check_line(self) -> None:
        """Check that one more client can be greeted soon.

        Raises:
            InLine: if too many are arriving.
        """
        if len(self._arriving) >= ARRIVING:
            seconds = self.line.place(time.monotonic())
            raise InLine(f"too many clients come at once: come back in {seconds:.1f} s", seconds=seconds)

    def send_away(self, client: str) -> ComeBack:
        """Return the refusal for a client that no round needs."""
        seconds = self.pace.leave(client, len(self), time.monotonic())
        return ComeBack(f"no round needs this client now: come back in {seconds:.0f} s", seconds=seconds)

    def arrived(self, session: Session) -> None:
        """Note that the client watches both ways."""
        session.matched = True
        self._arriving.discard(session.session_id)
        self.line.arrived(time.monotonic())

    def drop(self, session: Session) -> bool:
        """Forget the session, and end its other streams.

        Returns whether it was its client's newest.
        """
        self._by_id.pop(session.session_id, None)
        self._arriving.discard(session.session_id)
        session.close(NoSession("the session is lost: join again"))
        if self._by_client.get(session.client_id) is not session:
            return False
        del self._by_client[session.client_id]
        if not isinstance(session.reason, ComeBack):
            self.returns.left(session.client_id, time.monotonic())
        return True

    def _ended(self, client_id: str) -> None:
        self._calls[client_id] -= 1
        if not self._calls[client_id]:
            del self._calls[client_id]

    def get(self, client_id: str) -> Session | None:
        """Return the client's session, or None."""
        return self._by_client.get(client_id)

    def here(self, wanted: Wanted) -> list[str]:
        """Return the free matched clients with the labels of a job."""
        free = (session for session in self if session.matched and session.max_jobs and not session.late_since)
        return [session.client_id for session in free if match(session.labels, wanted)]

    @property
    def open(self) -> Collection[Session]:
        """All sessions, in the order of their beginnings."""
        return self._by_client.values()

    def __iter__(self) -> Iterator[Session]:
        return iter(sorted(self._by_client.values(), key=lambda session: session.client_id))

    def __len__(self) -> int:
        return len(self._by_client)
