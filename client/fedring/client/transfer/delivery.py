"""A spooled update and its fate: accepted, refused, or not known yet."""

import logging
from collections.abc import Callable
from contextlib import suppress

from fedring.client.errors import FederationClosed, RoundOver, UpdateRefused
from fedring.client.session.inbox import Assignment
from fedring.client.session.link import ServerLink
from fedring.client.transfer.spool import Residual, Spool, Spooled
from fedring.client.transfer.upload import DamagedSpool, GivenUp, Undecided, Upload
from fedring.daemon.tracing import span
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

_UNTOLD = ("next_round", "deadline")
"""Why an update is not sent on though the server has not said that its round is over. A command for another round may
be of a server that was restored, and wants this very update."""
_NOT_A_WORKER = "not_a_worker"
"""Why a server refuses what a worker has of a group that was lost since: the round is to be trained by another one."""


class Delivery:
    """Moves updates from the spool to the server, and keeps the residual true to what the server has."""

    def __init__(self, link: ServerLink, spool: Spool) -> None:
        self._link = link
        self._spool = spool

    def send(self, spooled: Spooled, assignment: Assignment, residual: Residual | None = None) -> None:
        """Return when the server has accepted; RoundOver if it has not.

        Unless the server has said no, the spool stays, and the update is offered again.
        """
        self._link.session.begin(pb.ACTIVITY_PUSHING)
        try:
            with span("upload", assignment.command.traceparent, round=assignment.command.round):
                self._push(spooled, lambda: assignment.stop_reason, assignment.deadline)
        except UpdateRefused as error:
            self._spool.drop()
            if spooled.parts or not isinstance(error, DamagedSpool):  # what lay on the disk alone can be made again
                self.fail(assignment, error.reason, error.detail)
            raise
        except RoundOver as error:
            given_up = isinstance(error, GivenUp) and error.reason in _UNTOLD
            assignment.undelivered = given_up or isinstance(error, Undecided) or error.reason == "interrupted"
            if not assignment.undelivered and error.reason != "closed":
                self._spool.drop()
            if not assignment.undelivered and error.reason not in ("closed", _NOT_A_WORKER):
                # Should the server ask for this very round again, it was put back to before it, and wants it anew.
                assignment.end_reason = assignment.end_reason or error.reason
            if error.reason == _NOT_A_WORKER:
                self._link.call(lambda: self._link.session.inbox.hand_out_again(assignment))
            raise
        finally:
            self._link.session.begin(pb.ACTIVITY_UNSPECIFIED)
        self._accept(spooled, assignment, residual)
        assignment.accepted_name = spooled.offer.name

    def settle(self, assignment: Assignment) -> bool:
        """Bring an update of before to its end; whether nothing is to train now.

        That is so if the update was of this very round, and not damaged, or if the server could not say what has become
        of it.
        """
        spooled = self._spool.pending()
        if spooled is None:
            return self._is_done(assignment)
        header, command = spooled.header, assignment.command
        if (header.run_id, header.round, header.base_digest) == assignment.round_key:
            log.info("sending the spooled update of round %d", header.round)
            try:
                self.send(spooled, assignment)
            except DamagedSpool:
                log.warning("the spooled update of round %d was damaged on the disk: training again", header.round)
                return False
            except RoundOver as error:
                log.warning("the spooled update of round %d was not taken: %s", header.round, error)
            return True
        accepted = header.run_id == command.run_id and (
            spooled.offer.name == self._link.connection.last_accepted.name or self._was_accepted(spooled, assignment)
        )
        if accepted is None:
            log.warning("the server does not say whether it has the spooled update of round %d", header.round)
            assignment.undelivered = True
            return True
        if accepted:
            log.info("the spooled update of round %d had been accepted", header.round)
            self._accept(spooled, assignment)
        else:
            log.warning("dropped the spooled update of round %d, which is over", header.round)
            self._spool.drop()
        return False

    def fail(self, assignment: Assignment, reason: str, detail: str) -> None:
        """The server learns that this client has nothing for the round."""
        failure = pb.Failure(round=assignment.command.round, reason=reason, detail=detail[:1000])
        with suppress(FederationClosed):  # the server learns it from the end of the session
            self._link.call(lambda: self._link.session.report_failure(failure))

    def _is_done(self, assignment: Assignment) -> bool:
        """Whether the server has the update already: it was on its way when a restored server asked for it again."""
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
        """Ask, without sending a byte of the payload; None if there was no answer."""
        try:
            self._push(spooled, lambda: "next_round", assignment.deadline)
        except FederationClosed:
            raise
        except RoundOver as error:
            return None if isinstance(error, Undecided) or error.reason == "interrupted" else False
        return True

    def _accept(self, spooled: Spooled, assignment: Assignment, residual: Residual | None = None) -> None:
        self._spool.accept(spooled, residual)
        header, known = spooled.header, self._link.connection.last_accepted
        # The epochs that the two name differ if the server was put back in the meantime, in either direction.
        epoch = min(header.epoch, assignment.command.epoch)
        if (epoch, header.round) >= (known.epoch, known.round):  # else it is of a folder that was put back
            last = pb.LastAccepted(epoch=epoch, round=header.round, name=spooled.offer.name)
            self._link.connection.last_accepted = last

    def _push(self, spooled: Spooled, ended: Callable[[], str], deadline: float) -> None:
        link = self._link
        link.call(lambda: Upload(link.connection, spooled, ended, link.session.advance).run(deadline))
