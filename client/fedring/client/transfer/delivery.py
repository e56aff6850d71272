"""Delivers spooled updates, and learns their outcome.

An update is accepted, refused, or not known yet.
"""

import logging
from collections.abc import Callable
from contextlib import suppress

from fedring.client.consent.consent import NOT_APPROVED
from fedring.client.errors import FederationClosed, RoundOver, UpdateRefused
from fedring.client.session.inbox import Assignment
from fedring.client.session.link import ServerLink
from fedring.client.transfer.own_values import line_of
from fedring.client.transfer.residual import RESIDUAL
from fedring.client.transfer.spool import Spool, Spooled
from fedring.client.transfer.upload import DamagedSpool, GivenUp, Undecided, Upload
from fedring.daemon.tracing import span
from fedring.untrusted import encodable
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

_MAY_BE_WANTED = ("next_round", "deadline")
"""The reasons to stop sending an update which do not mean that the server no longer wants it. A server that sends a
command for another round may have been restored, and may ask for this update later."""
_OF_THE_VALUES = "out_of_range"
"""The reason for which a server refuses an update because of its values, which the residual is added to."""
_NOT_A_WORKER = "not_a_worker"
"""The reason for which a server refuses an update of a group that was lost meanwhile. A new group trains the round."""


class Delivery:
    """Delivers updates from the spool to the server.

    It keeps the residual consistent with the updates that the server has accepted. It belongs to the user's thread, and
    calls into the session's.
    """

    def __init__(self, link: ServerLink, spool: Spool) -> None:
        self._link = link
        self._spool = spool

    def send(self, spooled: Spooled, assignment: Assignment) -> None:
        """Deliver an update, and note its outcome in the assignment.

        If the server has neither accepted nor refused it, it stays in the spool and will be offered again.

        Args:
            spooled: The update.
            assignment: The round that it is for.

        Raises:
            RoundOver: If the server has not accepted the update.
            UpdateRefused: If it has refused the update for good.
        """
        self._spool.ledger.charge(assignment.command, spooled.offer.name)
        self._link.session.begin(pb.ACTIVITY_PUSHING)
        try:
            with span("upload", assignment.command.traceparent, round=assignment.command.round):
                self._push(spooled, lambda: assignment.stop_reason or assignment.withdrawn(), assignment.deadline)
        except UpdateRefused as error:
            self._spool.drop()
            detail = error.detail
            # A bit that the disk has flipped in a residual would keep this client out for ever.
            if error.reason == _OF_THE_VALUES and self._spool.kept.forget(line_of(assignment.command).key, RESIDUAL):
                log.warning("dropped the residual of past updates: an update with it is out of range")
                detail += "; what past updates have left out is dropped"
            if spooled.parts or not isinstance(error, DamagedSpool):  # An update of an earlier process is made again.
                self.fail(assignment, error.reason, detail)
            raise
        except RoundOver as error:
            given_up = isinstance(error, GivenUp) and error.reason in _MAY_BE_WANTED
            assignment.undelivered = given_up or isinstance(error, Undecided) or error.reason == "interrupted"
            if not assignment.undelivered and error.reason != "closed":
                self._spool.drop()
            if not assignment.undelivered and error.reason not in ("closed", _NOT_A_WORKER):
                # If the server asks for this round again, it was restored to a time before it, and wants a new update.
                assignment.end_reason = assignment.end_reason or error.reason
            if error.reason == NOT_APPROVED:  # the server waits for this client
                self.fail(assignment, error.reason, "this site does not approve the job any more")
            if error.reason == _NOT_A_WORKER:
                self._link.call(lambda: self._link.session.inbox.hand_out_again(assignment))
            raise
        finally:
            self._link.session.begin(pb.ACTIVITY_UNSPECIFIED)
        self._accept(spooled, assignment, line_of(assignment.command).key)
        assignment.accepted_name = spooled.offer.name

    def settle(self, assignment: Assignment, *, send: bool = True) -> bool:
        """Deal with an update in the spool before the assignment is trained.

        Args:
            assignment: The round that the server wants.
            send: Whether an update for this round may be sent; if not, it is dropped, unless it was accepted before.

        Returns:
            Whether there is nothing to train: the update was for this round and could be read, or the server could not
            say what became of it.
        """
        spooled = self._spool.pending()
        if spooled is None:
            return self._is_done(assignment)
        header, command = spooled.header, assignment.command
        is_wanted = send and (header.run_id, header.round, header.base_digest) == assignment.round_key
        # A job that begins anew may begin with the same model. What the update leaves would go to the line of before,
        # and this line would lack it.
        if is_wanted and self._spool.kept.line_of_left(spooled.offer.name) in ("", line_of(command).key):
            log.info("sending the spooled update of round %d", header.round)
            try:
                self.send(spooled, assignment)
            except DamagedSpool:
                log.warning("the spooled update of round %d was damaged on the disk: training again", header.round)
                return False
            except RoundOver as error:
                log.warning("the server did not accept the spooled update of round %d: %s", header.round, error)
            return True
        accepted = header.run_id == command.run_id and (
            spooled.offer.name == self._link.connection.last_accepted.name or self._was_accepted(spooled, assignment)
        )
        # Without an answer the update stays: the server may have it, and it may count.
        if accepted is None:
            log.warning("the server does not say whether it has accepted the spooled update of round %d", header.round)
            assignment.undelivered = True
            return True
        if accepted:
            log.info("the spooled update of round %d had been accepted", header.round)
            self._accept(spooled, assignment)
        else:
            log.warning("dropped the spooled update of round %d, which is over, or has begun anew", header.round)
            self._spool.drop()
        return False

    def fail(self, assignment: Assignment, reason: str, detail: str) -> None:
        """Report to the server that this client has failed in the round.

        Args:
            assignment: The round.
            reason: A stable word.
            detail: A sentence; the first 1000 letters are sent.
        """
        told = {"reason": encodable(reason), "detail": encodable(detail)[:1000]}
        failure = pb.Failure(round=assignment.command.round, **told)
        with suppress(FederationClosed):  # The end of the session tells the server.
            self._link.call(lambda: self._link.session.report_failure(failure))

    def _is_done(self, assignment: Assignment) -> bool:
        """Return whether a restored server has accepted the update already.

        It may have done so while it was asking for the round again.
        """
        before, known = assignment.previous, self._link.connection.last_accepted
        if (
            before is None
            or not before.accepted_name
            or (before.accepted_name, before.round_key) != (known.name, assignment.round_key)
        ):
            return False
        assignment.accepted_name = before.accepted_name
        return True

    def _was_accepted(self, spooled: Spooled, assignment: Assignment) -> bool | None:
        """Ask whether the update was accepted, without sending its payload.

        None if there was no answer.
        """
        try:
            self._push(spooled, lambda: "next_round", assignment.deadline)
        except FederationClosed:
            raise
        except RoundOver as error:
            return None if isinstance(error, Undecided) or error.reason == "interrupted" else False
        return True

    def _accept(self, spooled: Spooled, assignment: Assignment, line: str = "") -> None:
        self._spool.accept(spooled)
        connection, name = self._link.connection, spooled.offer.name
        heard = connection.audit_head if name == connection.audited else ""
        self._spool.audit.try_to_note("accepted", round=spooled.header.round, update=name, server_head=heard)
        header, known = spooled.header, self._link.connection.last_accepted
        # The two epochs differ if the server was restored in the meantime, to an older or to a newer state.
        epoch = min(header.epoch, assignment.command.epoch)
        if (epoch, header.round) >= (known.epoch, known.round):  # If not, it is of a state folder that was restored.
            last = pb.LastAccepted(epoch=epoch, round=header.round, name=spooled.offer.name)
            self._link.connection.last_accepted = last
            if line:
                self._spool.note_accepted(last.name, line)

    def _push(self, spooled: Spooled, ended: Callable[[], str], deadline: float) -> None:
        link = self._link
        link.call(lambda: Upload(link.connection, spooled, ended, link.session.advance).run(deadline))
