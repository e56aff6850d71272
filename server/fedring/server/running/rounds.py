"""The open rounds, each an object.

Whoever needs a round gets it by its number or as an argument: several may be open at once. `Rounds` takes events into
their states and tells operators what changes. It performs nothing: that is `fedring.server.running.runner`.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from fedring.rpc.errors import Unavailable, UnknownRound
from fedring.server.round import machine as rd
from fedring.server.round.eligibility import check_eligible
from fedring.server.round.events import (
    OPEN,
    Abandoned,
    Decided,
    Delayed,
    Delivered,
    Event,
    Freed,
    Joined,
    Left,
    LeftBehind,
    Matched,
    Phase,
    Round,
    RoundState,
    Shared,
)
from fedring.server.round.metrics import RoundMetrics
from fedring.server.round.open_round import OpenRound
from fedring.server.round.report import RoundJournal
from fedring.server.running.carried import Carried, Interrupted
from fedring.server.running.groups import Groups
from fedring.server.running.sharing import Turns
from fedring.server.sessions.members import Members
from fedring.server.sessions.sessions import Session, Sessions
from fedring.server.state.journal import Journal
from fedring.server.state.rows import ModelRow, RoundRow, UpdateRow
from fedring.v1 import federation_pb2 as pb

PresenceEvent = Joined | Matched | Left | LeftBehind | Freed | Decided


class Rounds:
    """The open rounds, for services, the runner, and operators.

    Attributes:
        last: the row of the round that ended last; None if none has.
        latest: the newest model.
        published_at: when each job that runs has published last, wall clock.
        interrupted: the rounds that a restart interrupted, and that wait to be resumed.
        carried: the rounds that have ended, while clients still work on their commands.
        groups: the groups of workers of the rounds.
        turns: who may draw which clients.
        journal: takes the events of rounds.
    """

    def __init__(self, run_id: str, sessions: Sessions, journal: Journal, metrics: RoundMetrics) -> None:
        self.last: RoundRow | None = None
        self.latest: ModelRow | None = None
        self.published_at: dict[int, float] = {}
        self._here = RoundState()  # the clients that are here, without a round
        self._open: dict[int, OpenRound] = {}
        self.carried, self.journal = Carried(), RoundJournal(journal)
        self.interrupted = Interrupted(changed=lambda: self.turns.share())
        self.groups = Groups(self._open, self.journal, slowest=lambda: sessions.returns.slowest)
        self.turns = Turns(self._open, self.carried, self.interrupted, here=lambda: self._here, handle=self.handle)
        self._run_id, self._sessions, self._metrics = run_id, sessions, metrics
        metrics.follow(lambda: self._here, lambda: [open_.state for open_ in self])

    def __iter__(self) -> Iterator[OpenRound]:
        return iter(tuple(self._open.values()))

    def get(self, number: int) -> OpenRound | None:
        """Return the open round of this number, or None."""
        return self._open.get(number)

    def of_job(self, job_id: int) -> OpenRound | None:
        """Return the open round of a job, or None."""
        return next((open_ for open_ in self if open_.row.job_id == job_id), None)

    def of_client(self, client: str) -> OpenRound | None:
        """Return the open round that a client works in.

        Else it is the newest one, if the client has just worked in it, or is late with an earlier one of its job. A
        client of another job has none.
        """
        for open_ in self._open.values():  # asked for every message of a round, so no generator is made for it
            if open_.asks(client):
                return open_
        if (newest := self.newest) is None:
            return None
        late = any(client in told.outstanding for told in self.carried.of(newest.row.job_id))
        return newest if late or client in newest.row.selected else None

    def awaits(self, client: str) -> bool:
        """Return whether an open round waits for something from a client."""
        asked = any(rd.awaits(open_.state.round, client) for open_ in self._open.values())
        return asked or any(client in told.outstanding for told in self.carried.of())

    def told(self, number: int, client: str) -> OpenRound | None:
        """Return the round whose command a client may answer, or None."""
        told = self._open.get(number) or self.carried.get(number)
        return None if told is None or (told.kind.lasting and client not in told.outstanding) else told

    def into(self, told: OpenRound) -> OpenRound | None:
        """Return the open round in which answers to a command count.

        None between two rounds of its job.
        """
        return self.of_job(told.row.job_id) if told.kind.lasting else told

    @property
    def gathering(self) -> bool:
        """Whether more clients may be needed than are here.

        A round waits for clients, or will be resumed.
        """
        return bool(self.interrupted.rows) or any(open_.phase is Phase.WAITING for open_ in self._open.values())

    @property
    def newest(self) -> OpenRound | None:
        """The open round that was opened last; None if none is open."""
        return next(reversed(self._open.values()), None)

    @property
    def labels(self) -> list[Mapping[str, str]]:
        """The labels of each client that is here."""
        return [member.labels for member in self._here.members.values()]

    def presence(self, event: PresenceEvent) -> None:
        """Tell all open rounds that a client came, went, or is late."""
        self._here = rd.apply(self._here, event, time.monotonic())
        for open_ in self:
            self.handle(open_, event)
        self.turns.share()

    def handle(self, open_: OpenRound, event: Event) -> None:
        """Take the event into the state of a round.

        The runner will perform what it makes due.
        """
        now = time.monotonic()
        before, open_.state = open_.state.round, rd.apply(open_.state, event, now)
        self._metrics.moved(before, open_.state.round, now)
        open_.trace.follow(open_.state.round)
        open_.changed.set()
        self.groups.expect(open_)
        if not isinstance(event, Shared | PresenceEvent) and _has_others(before, open_.state.round):
            self.turns.share()

    def job_ended(self, job_id: int) -> None:
        """Forget a job that has ended.

        Clients that still work on its commands are told.
        """
        self.turns.end(job_id)
        self.published_at.pop(job_id, None)
        self._metrics.job_ended()
        for told in self.carried.of(job_id):
            self.carried.drop(told)
            for session in filter(None, map(self._sessions.get, told.outstanding)):
                session.end(pb.RoundEnded(round=told.row.round, reason="job_ended"))
        self.interrupted.drop(job_id)

    def begin(self, open_: OpenRound, event: Event) -> None:
        """Take up a round that is opened or resumed by the event."""
        open_.command.traceparent = open_.trace.begin(open_.row.round, open_.row.job_id)
        open_.state = self._here
        if open_.absent:  # they keep the time since when they are away, so that no new round waits for them anew
            open_.state = replace(self._here, members=Members({**open_.absent, **self._here.members}.items()))
        self.turns.begin(open_.row.job_id)
        self._open[open_.row.round] = open_
        self.handle(open_, event)
        self.interrupted.drop(open_.row.job_id)

    def end(self, open_: OpenRound) -> None:
        """Forget a round that has ended."""
        self._open.pop(open_.row.round, None)
        self.carried.keep(open_)
        self.last = open_.row
        for session in filter(None, map(self._sessions.get, open_.missing if open_.started else ())):
            self.works(session)
        self.turns.share()
        self.groups.end(open_)

    def works(self, session: Session) -> None:
        """Note reasons for which a client cannot take part.

        It works on a round that has ended, or its site has not approved a job.
        """
        work = session.work
        unread = session.ended > 0 and work.ended_round != session.ended
        late = (work.round > 0 and self.told(work.round, session.client_id) is None) or unread
        member = self._here.members.get(session.client_id)
        if member is not None and member.unapproved != session.unapproved:
            self.presence(Decided(session.client_id, session.unapproved))
        if late != bool(session.late_since):
            session.late_since = time.time() if late else 0.0
            self.presence(LeftBehind(session.client_id) if late else Freed(session.client_id))

    def learn(self, model: ModelRow) -> None:
        """Note a model that may be the newest."""
        if self.latest is None or model.version > self.latest.version:
            self.latest = model

    def deliverable(self, run_id: str, number: int, client: str) -> OpenRound:
        """Return the round whose command an update of the client may answer.

        Raises:
            Unavailable: if the server has just started, and the round waits to be resumed; or if the command outlasts
                its round, and none of its job takes updates just now.
            UnknownRound: if the round does not take it: see `check_eligible`.
        """
        self.interrupted.check(number)
        if run_id != self._run_id:
            raise UnknownRound("the update belongs to another run")
        told = self._open.get(number) or self.carried.get(number)
        if told is None:
            raise UnknownRound(f"round {number} is not open")
        if told.kind.lasting:
            _check_lasting(told, self.into(told), client)
            return told
        workers = told.group.workers if told.group is not None else None
        check_eligible(told.state.round, number, client, workers=workers)
        told.kind.check_update(client)
        return told

    def accepted(self, open_: OpenRound, rows: Sequence[UpdateRow]) -> None:
        """Count updates of a round that became durable together.

        Its `settling` must be held.
        """
        # One worker delivers for its whole group.
        count = len(rows) * (len(open_.row.selected) if open_.job.training.grouped else 1)
        self.turns.serve(open_.row.job_id, count)
        if open_.group is not None:
            open_.group.accept()
        open_.accepted.update((row.client_id, row) for row in rows)
        open_.in_memory.update(row.client_id for row in rows if row.payload)
        self.handle(open_, Delivered({row.client_id for row in rows}))
        for row in rows:
            if (told := self.told(row.round, row.client_id)) is not None:
                open_.kind.answered(told, row.client_id)
        self.journal.accepted(open_, rows)


async def abandon(rounds: Rounds, open_: OpenRound | None, reason: str) -> int:
    """End a round without a model.

    Returns:
        Its number, or 0 if it cannot be ended.
    """
    if open_ is None:
        return 0
    async with open_.settling:
        round_ = open_.state.round
        if round_ is None or round_.phase not in OPEN:
            return 0
        if round_.phase is Phase.AGGREGATING:
            open_.stop_reason = reason  # holds if the disk refuses the model; else it is published in a moment
            if open_.making:
                return 0
        rounds.handle(open_, Abandoned(reason))
        return round_.number


def give_time_back(rounds: Rounds, since: float) -> None:
    """Discount the time since `since`, while nothing could be stored.

    `since` is in monotonic seconds. Commands that outlast their rounds have more time, too.
    """
    lost = time.monotonic() - since
    for told in (*rounds, *rounds.carried.of()):
        told.outstanding = {client: until + lost for client, until in told.outstanding.items()}
    for open_ in rounds:
        round_ = open_.state.round
        if round_ is None:
            continue
        seconds = time.monotonic() - max(since, round_.since)
        if open_.started:
            open_.started += seconds
        if open_.held_since:  # else this time would not count twice
            open_.held_since = min(time.monotonic(), open_.held_since + seconds)
        rounds.handle(open_, Delayed(seconds))


def _check_lasting(told: OpenRound, into: OpenRound | None, client: str) -> None:
    """Check that a client may answer a command that outlasts its round.

    `into` is the open round in which the answer would count, if there is one.
    """
    if client not in told.outstanding:
        text = f"{client} has no command of round {told.row.round}, or not any more"
        raise UnknownRound(text, reason="round_closed")
    if into is None or into.phase is not Phase.TRAINING or into.kind.room <= 0:
        raise Unavailable(f"a version of job {told.row.job_id} is being made: try again")


def _has_others(before: Round | None, after: Round | None) -> bool:
    """Return whether other clients than before take part in a round."""
    if before is None or after is None:
        return before is not after
    return (before.phase, before.failed, before.selected, before.evaluators) != (
        *(after.phase, after.failed),
        *(after.selected, after.evaluators),
    )
