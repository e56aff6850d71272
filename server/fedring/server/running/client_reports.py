"""Reports of clients in session: presence, failures, progress, evaluations."""

import re
import time
from collections.abc import Sequence
from math import inf

from fedring.rpc.errors import ComeBack
from fedring.server.group import machine as gr
from fedring.server.round import machine as rd
from fedring.server.round.dispatch import Dispatch
from fedring.server.round.eligibility import check_evaluation, classified
from fedring.server.round.events import Evaluated, Failed, Left, Matched, Moved, Stalled
from fedring.server.round.metrics import RoundMetrics
from fedring.server.round.open_round import ClientTraffic, KindMaker, OpenRound
from fedring.server.running.rounds import Rounds
from fedring.server.sessions.sessions import Session, Sessions
from fedring.server.state.facts import Facts
from fedring.server.state.journal import Journal, printable
from fedring.server.state.rows import NOT_APPROVED, EvaluationRow
from fedring.v1 import federation_pb2 as pb

_MOST_TEXT = 1000  # characters of a sentence of a client

_REASON = re.compile(r"[a-z0-9_]{1,64}")

_FAULTS_OF_THE_CODE = ("train_error", "cannot_cut")
"""Failures in which the job's next rounds would end, too."""

_FAULTS_OF_THE_WORKER = ("out_of_memory", "disk_failed")
"""Failures that another worker in the place of this one may not have."""


class ClientReports:
    """Takes reports of clients into their rounds."""

    def __init__(
        self,
        rounds: Rounds,
        kinds: Sequence[KindMaker],
        sessions: Sessions,
        facts: Facts,
        journal: Journal,
        metrics: RoundMetrics,
    ) -> None:
        self._rounds, self._kinds, self._facts = rounds, kinds, facts
        self._journal, self._metrics = journal, metrics
        self._sessions, self._dispatch = sessions, Dispatch(sessions)

    def matched(self, client: str) -> None:
        """Note that the client watches both ways.

        It counts from now on, and is reminded of what rounds wait for.
        """
        rounds = self._rounds
        rounds.presence(Matched(client))
        if rounds.last is not None and any(kind.outlasts(rounds.last) for kind in self._kinds):
            self._dispatch.over(rounds.last, rounds.latest, client)
        for open_ in (*rounds, *rounds.carried.of()):
            self._dispatch.remind(open_, rounds.latest, client)

    def left(self, session: Session) -> None:
        """Note that a session has ended.

        Its client is gone, unless a newer session has replaced it.
        """
        if self._sessions.drop(session):
            self._rounds.presence(Left(session.client_id))
            if session.matched and not isinstance(session.reason, ComeBack):
                text = f"{session.client_id} is gone"
                self._journal.write("client_lost", text, client_id=session.client_id)

    async def evaluated(self, client: str, report: pb.EvaluationReport) -> None:
        """Keep the client's counts of a new model.

        Raises:
            BadRequest, UnknownRound: if the round is not, or no longer, evaluated by this client: see
                `check_evaluation`.
        """
        rounds = self._rounds
        open_ = rounds.get(report.round)
        known = [each.row.round for each in rounds] + ([rounds.last.round] if rounds.last else [])
        round_, model = (open_.state.round, open_.made) if open_ else (None, None)
        version = check_evaluation(report, client, round_, model, newest=max(known, default=0))
        counts = (report.correct, report.total, report.loss_sum, classified(report), dict(report.metrics))
        row = EvaluationRow(report.round, version, client, *counts)
        await self._facts.db(self._facts.store.evaluations.add, row)
        if open_ is not None and open_.state.round is not None:  # it may have ended meanwhile
            self._note_failure(open_, client, report, version)
            rounds.handle(open_, Evaluated(client))

    def _note_failure(self, open_: OpenRound, client: str, report: pb.EvaluationReport, version: int) -> None:
        """Tell operators once why an evaluation lacks figures."""
        if not (why := printable(report.failure[:_MOST_TEXT]).strip()):
            open_.unevaluated.pop(client, None)  # of a report that this one replaces
            return
        has = f"has evaluated model {version}, but" if report.total else f"could not evaluate model {version}"
        text = f"{client} {has}: {why}"
        if open_.unevaluated.get(client) != text:
            open_.unevaluated[client] = text
            self._rounds.journal.note(open_, "evaluation_failed", text, client)

    def failed(self, client: str, failure: pb.Failure) -> None:
        """Note that the client cannot train in a round."""
        if (told := self._rounds.told(failure.round, client)) is None:
            return
        if (open_ := self._rounds.into(told)) is None:
            self._rounds.carried.release(told, client)  # between two rounds of its job
        elif not self._note_failed(told, open_, client):
            return
        reason = failure.reason if _REASON.fullmatch(failure.reason) else "bad_reason"
        # All that follows is shown to operators and to other clients, on terminals, too.
        text = f"{client} could not train: {reason}: {printable(failure.detail[:_MOST_TEXT])}"
        self._journal.write("client_failed", text, client_id=client)
        if open_ is None:
            return
        open_.failures.append(text)
        if (session := self._sessions.get(client)) is not None and open_.row.job_id in session.unapproved:
            open_.asked = True  # people there may approve the job before the round ends
        if open_.group is not None and open_.group.must_be_whole and open_.group.can_give_up:
            # It cannot do without any of its workers, and code that fails on one would fail on its replacement. But a
            # group that has run goes on without a newcomer whose site was never asked about the job.
            of_the_worker = reason in _FAULTS_OF_THE_WORKER or (reason == NOT_APPROVED and open_.group.state.has_run)
            if not of_the_worker:
                self._rounds.groups.handle(open_, gr.GroupClosed(reason))
                open_.retryable = open_.retryable and reason not in _FAULTS_OF_THE_CODE

    def _note_failed(self, told: OpenRound, open_: OpenRound, client: str) -> bool:
        """Take a failure into the open round.

        Returns whether it is news: it may have been reported before, or the client was not asked. A command that
        outlasts its round is not known any more once it is over.
        """
        if (before := open_.state.round) is None:
            return False
        self._rounds.handle(open_, Failed(client, open_.row.round))
        if open_.state.round == before and not told.kind.lasting:
            return False
        open_.kind.answered(told, client)
        return True

    def stalls_at(self, session: Session) -> float:
        """Return when the client will count as stalled.

        It does unless it makes progress before. In monotonic seconds; inf means never.
        """
        if session.transfers or not session.reports_progress:
            return inf
        client, moved = session.client_id, session.moved
        return min((rd.stalls_at(open_.state.round, client, moved) for open_ in self._rounds), default=inf)

    def stalled(self, session: Session) -> None:
        """Note that the client makes no progress.

        Rounds go on without it until it does.
        """
        client, now = session.client_id, time.monotonic()
        for open_ in self._rounds:
            if rd.stalls_at(open_.state.round, client, session.moved) > now:
                continue
            self._rounds.handle(open_, Stalled(client))
            self._metrics.stalled.inc()
            seconds = open_.job.stalled_after_seconds
            text = f"{client} is stalled: it has reported no progress for {seconds:g} s, and nobody waits for it"
            self._rounds.journal.note(open_, "client_stalled", text, client, clients=True)

    def moved(self, client: str) -> None:
        """Note that the client makes progress."""
        for open_ in self._rounds:
            if open_.state.round is not None and client in open_.state.round.stalled:
                self._rounds.handle(open_, Moved(client))
                self._rounds.journal.note(open_, "client_moves", f"{client} makes progress again", client, clients=True)

    def transfer(self, session: Session) -> "Transfer":
        """Count an upload or a download of the client.

        While one is in progress, the client is not stalled.
        """
        return Transfer(self, session)

    def traffic(self, client: str) -> ClientTraffic:
        """Return the counters of the client's traffic.

        They are those of its round, or nobody's if it has none.
        """
        open_ = self._rounds.of_client(client)
        return open_.traffic.setdefault(client, ClientTraffic()) if open_ else ClientTraffic()


class Transfer:
    """An upload or a download that is in progress within `with`."""

    __slots__ = ("_reports", "_session")

    def __init__(self, reports: ClientReports, session: Session) -> None:
        self._reports, self._session = reports, session

    def __enter__(self) -> None:
        self._reports.moved(self._session.client_id)
        self._session.transfers += 1

    def __exit__(self, kind: object, error: object, tb: object) -> None:
        self._session.transfers -= 1
        self._session.moved = time.monotonic()
