"""The open rounds, each an object.

Whoever needs a round gets it by its number or as an argument: several may be open at once. `Rounds` takes events into
their states and tells operators what changes. It performs nothing: that is `fedring.server.round.runner`.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from fedring.daemon.notify import sd_notify
from fedring.daemon.wording import counted
from fedring.rpc.errors import Unavailable, UnknownRound
from fedring.server.group import machine as gr
from fedring.server.group.rendezvous import Rendezvous
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
    Presence,
    Round,
    RoundState,
    Shared,
)
from fedring.server.round.metrics import RoundMetrics
from fedring.server.round.open_round import OpenRound
from fedring.server.round.plan import group_rules
from fedring.server.round.report import open_message
from fedring.server.round.sharing import holders_of, shares
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
        interrupted: the rounds that a restart interrupted, and that wait to be resumed, by their numbers.
        all_resumed: set while there are none.
        published_at: when each job that runs has published last, wall clock.
        over: the ended rounds whose commands are over by now, and whose partial uploads are to be deleted.
        group: the newest group of workers, which outlives its round; None if there was none.
        group_moved: set whenever the state of a group has changed; whoever waits for it clears it.
    """

    def __init__(self, run_id: str, sessions: Sessions, journal: Journal, metrics: RoundMetrics) -> None:
        self.last: RoundRow | None = None
        self.latest: ModelRow | None = None
        self.interrupted: Mapping[int, RoundRow] = {}
        self.all_resumed = asyncio.Event()
        self.all_resumed.set()
        self.published_at: dict[int, float] = {}
        self.over: set[int] = set()
        self.group: Rendezvous | None = None
        self.group_moved = asyncio.Event()
        self._here = RoundState()  # the clients that are here, without a round
        self._open: dict[int, OpenRound] = {}
        self._carried: dict[int, OpenRound] = {}  # rounds that have ended, while clients still work on their commands
        self._served: dict[int, int] = {}  # by job: updates since it runs, and before it those of the least served one
        self._generation = 0  # the newest of the groups of rounds that have ended
        self._sessions = sessions
        self._run_id, self._returns, self._journal, self._metrics = run_id, sessions.returns, journal, metrics
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
        late = any(client in told.outstanding for told in self.carried(newest.row.job_id))
        return newest if late or client in newest.row.selected else None

    def awaits(self, client: str) -> bool:
        """Return whether an open round waits for something from a client."""
        asked = any(rd.awaits(open_.state.round, client) for open_ in self._open.values())
        return asked or any(client in told.outstanding for told in self._carried.values())

    def carried(self, job_id: int = 0) -> list[OpenRound]:
        """Return the ended rounds whose commands clients still work on.

        They are those of one job, unless `job_id` is 0.
        """
        return [told for told in tuple(self._carried.values()) if job_id in (0, told.row.job_id)]

    def carry(self, told: OpenRound) -> None:
        """Keep an ended round until its command is over for all."""
        if told.outstanding:
            self._carried[told.row.round] = told
        elif told.kind.lasting:
            self.over.add(told.row.round)

    def note_absent(self, open_: OpenRound) -> None:
        """Note the absent clients that go on after the round."""
        away = {name: each for name, each in open_.state.members.items() if each.presence is Presence.AWAY}
        for told in (open_, *self.carried(open_.row.job_id)):
            told.absent = {name: away[name] for name in told.outstanding if name in away}

    def release(self, told: OpenRound, client: str) -> None:
        """Note that a round's command is over for a client."""
        told.outstanding.pop(client, None)
        if not told.outstanding and self._carried.pop(told.row.round, None) is not None:
            self.over.add(told.row.round)

    def told(self, number: int, client: str) -> OpenRound | None:
        """Return the round whose command a client may answer, or None."""
        told = self._open.get(number) or self._carried.get(number)
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
        return bool(self.interrupted) or any(open_.phase is Phase.WAITING for open_ in self._open.values())

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
        self._share()

    def handle(self, open_: OpenRound, event: Event) -> None:
        """Take the event into the state of a round.

        The runner will perform what it makes due.
        """
        now = time.monotonic()
        before, open_.state = open_.state.round, rd.apply(open_.state, event, now)
        self._metrics.moved(before, open_.state.round, now)
        open_.trace.follow(open_.state.round)
        open_.changed.set()
        self.expect_workers(open_)
        if not isinstance(event, Shared | PresenceEvent) and _has_others(before, open_.state.round):
            self._share()

    def await_resumption(self, rows: Iterable[RoundRow]) -> None:
        """Note which rounds wait to be resumed."""
        self.interrupted = {row.round: row for row in rows}
        # A round that has ended is among them if clients still work on its command: no charge is open for that.
        if all(row.ended_at is not None for row in self.interrupted.values()):
            self.all_resumed.set()
        else:
            self.all_resumed.clear()
        self._share()

    def draw(self, open_: OpenRound, clients: Iterable[str]) -> None:
        """Let this round alone have these clients from now on."""
        open_.drawn = frozenset(clients)
        self._share()

    def has_room(self, open_: OpenRound, client: str) -> bool:
        """Return whether a client can take part in one more round."""
        member = self._here.members.get(client)
        if member is None or not member.max_jobs:
            return False
        held = holders_of(self, self.interrupted.values(), self._between, but=open_)
        return not held.hold_back(client, member.max_jobs, alone=open_.alone)

    @property
    def holders(self) -> Mapping[str, Sequence[int]]:
        """The jobs whose rounds each client takes part in now."""
        return holders_of(self, self.interrupted.values(), self._between).jobs

    def job_ended(self, job_id: int) -> None:
        """Forget a job that has ended.

        Clients that still work on its commands are told.
        """
        self._served.pop(job_id, None)
        self.published_at.pop(job_id, None)
        self._metrics.job_ended()
        for told in self.carried(job_id):
            del self._carried[told.row.round]
            self.over.add(told.row.round)
            for session in filter(None, map(self._sessions.get, told.outstanding)):
                session.end(pb.RoundEnded(round=told.row.round, reason="job_ended"))
        self.await_resumption(row for row in self.interrupted.values() if row.job_id != job_id)

    @property
    def _between(self) -> list[OpenRound]:
        """The rounds with commands whose job has no round open just now."""
        return [told for told in self._carried.values() if self.of_job(told.row.job_id) is None]

    def _share(self) -> None:
        """Say to each round that waits which clients it can draw."""
        if len(self._open) + len(self.interrupted) + len(between := self._between) > 1:
            for open_, busy in shares(tuple(self), self.interrupted.values(), self._served, between):
                if busy != open_.state.busy:
                    self.handle(open_, Shared(busy))
        else:
            for open_ in self:
                if open_.state.busy:
                    self.handle(open_, Shared(frozenset()))

    def begin(self, open_: OpenRound, event: Event) -> None:
        """Take up a round that is opened or resumed by the event."""
        open_.command.traceparent = open_.trace.begin(open_.row.round, open_.row.job_id)
        open_.state = self._here
        if open_.absent:  # they keep the time since when they are away, so that no new round waits for them anew
            open_.state = replace(self._here, members=Members({**open_.absent, **self._here.members}.items()))
        self._served.setdefault(open_.row.job_id, min(self._served.values(), default=0))
        self._open[open_.row.round] = open_
        self.handle(open_, event)
        self.await_resumption(row for row in self.interrupted.values() if row.job_id != open_.row.job_id)

    def end(self, open_: OpenRound) -> None:
        """Forget a round that has ended."""
        self._open.pop(open_.row.round, None)
        self.carry(open_)
        self.last = open_.row
        for session in filter(None, map(self._sessions.get, open_.missing if open_.started else ())):
            self.works(session)
        if open_.group is not None:
            self._generation = max(self._generation, open_.group.generation)
        self._share()
        for other in self:  # a group may have waited for one of its clients
            if other.group is not None:
                self.group_moved.set()

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

    def gather(self, open_: OpenRound, *, resumed: bool = False) -> None:
        """Let the workers of a round gather, if it needs a group."""
        if open_.job.training.grouped:
            row = open_.row
            # Generations are numbered through all rounds: a worker of an older group is never taken for one of this.
            older = max([self._generation, *(each.group.generation for each in self if each.group is not None)])
            self.group = open_.group = Rendezvous(
                row.round,
                group_rules(open_.job, target=len(row.selected)),
                row.selected,
                open_.done,
                slowest=lambda: self._returns.slowest,
                generation=older + 1,
                resumed=resumed,
            )
            self.group_moved.set()

    def group_event(self, open_: OpenRound, event: gr.Event) -> None:
        """Take an event into the state of a round's group.

        Operators are told what follows from it.
        """
        if open_.group is not None:
            before = open_.group.moved
            for kind, text in open_.group.handle(event):
                self.tell(open_, kind, text)
            if open_.group.moved is not before:
                self.group_moved.set()

    def expect_workers(self, open_: OpenRound) -> None:
        """Tell a round's group whom the round still expects.

        The grace of a client may have ended.
        """
        if open_.group is not None and open_.group.active:
            self.group_event(open_, gr.Expected(rd.pending(open_.state, time.monotonic())))

    def deliverable(self, run_id: str, number: int, client: str) -> OpenRound:
        """Return the round whose command an update of the client may answer.

        Raises:
            Unavailable: if the server has just started, and the round waits to be resumed; or if the command outlasts
                its round, and none of its job takes updates just now.
            UnknownRound: if the round does not take it: see `check_eligible`.
        """
        self.check_resumed(number)
        if run_id != self._run_id:
            raise UnknownRound("the update belongs to another run")
        told = self._open.get(number) or self._carried.get(number)
        if told is None:
            raise UnknownRound(f"round {number} is not open")
        if told.kind.lasting:
            self._check_lasting(told, client)
            return told
        workers = told.group.workers if told.group is not None else None
        check_eligible(told.state.round, number, client, workers=workers)
        told.kind.check_update(client)
        return told

    def _check_lasting(self, told: OpenRound, client: str) -> None:
        """Check that a client may answer a command that outlasts its round."""
        if client not in told.outstanding:
            text = f"{client} has no command of round {told.row.round}, or not any more"
            raise UnknownRound(text, reason="round_closed")
        into = self.into(told)
        if into is None or into.phase is not Phase.TRAINING or into.kind.room <= 0:
            raise Unavailable(f"a version of job {told.row.job_id} is being made: try again")

    def check_resumed(self, number: int) -> None:
        """Check that a round does not wait to be resumed.

        Raises:
            Unavailable: if it does, because the server has just started.
        """
        if number in self.interrupted:
            raise Unavailable("the server has just started: try again")

    def accepted(self, open_: OpenRound, rows: Sequence[UpdateRow]) -> None:
        """Count updates of a round that became durable together.

        Its `settling` must be held.
        """
        job_id = open_.row.job_id
        # One worker delivers for its whole group.
        count = len(rows) * (len(open_.row.selected) if open_.job.training.grouped else 1)
        self._served[job_id] = self._served.get(job_id, 0) + count
        open_.accepted.update((row.client_id, row) for row in rows)
        open_.in_memory.update(row.client_id for row in rows if row.payload)
        self.handle(open_, Delivered({row.client_id for row in rows}))
        for row in rows:
            if (told := self.told(row.round, row.client_id)) is not None:
                open_.kind.answered(told, row.client_id)
        state = open_message(open_, clients=False)  # the same for all of them, since they became durable at once
        for row in rows:
            text = f"{row.client_id} delivered {counted(row.num_samples, 'sample')}, {row.total_bytes} bytes"
            self._journal.write("update_accepted", text, job_id=open_.row.job_id, client_id=row.client_id, state=state)

    async def abandon(self, open_: OpenRound | None, reason: str) -> int:
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
            self.handle(open_, Abandoned(reason))
            return round_.number

    def give_time_back(self, since: float) -> None:
        """Discount the time since `since`, while nothing could be stored.

        `since` is in monotonic seconds. Commands that outlast their rounds have more time, too.
        """
        lost = time.monotonic() - since
        for told in (*self, *self.carried()):
            told.outstanding = {client: until + lost for client, until in told.outstanding.items()}
        for open_ in self:
            round_ = open_.state.round
            if round_ is None:
                continue
            seconds = time.monotonic() - max(since, round_.since)
            if open_.started:
                open_.started += seconds
            if open_.held_since:  # else this time would not count twice
                open_.held_since = min(time.monotonic(), open_.held_since + seconds)
            self.handle(open_, Delayed(seconds))

    def note(self, open_: OpenRound, kind: str, text: str, client: str, *, clients: bool = False) -> None:
        """Write an event of a client in a round to the journal.

        `clients` says whether the round is described with each client's part.
        """
        state = open_message(open_, clients=clients)
        self._journal.write(kind, text, job_id=open_.row.job_id, client_id=client, state=state)

    def tell(self, open_: OpenRound, kind: str, text: str) -> None:
        """Write an event of a round to the journal and systemd's status."""
        sd_notify(f"STATUS={text}")
        self._journal.write(kind, text, job_id=open_.row.job_id, state=open_message(open_))


def _has_others(before: Round | None, after: Round | None) -> bool:
    """Return whether other clients than before take part in a round."""
    if before is None or after is None:
        return before is not after
    return (before.phase, before.failed, before.selected, before.evaluators) != (
        *(after.phase, after.failed),
        *(after.selected, after.evaluators),
    )
