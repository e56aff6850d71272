"""The end of a client's part in one round."""

from pathlib import Path

from fedring.client.client_round import Answer
from fedring.client.errors import RoundOver
from fedring.client.protection import Protection
from fedring.client.session.inbox import Assignment
from fedring.client.session.link import ServerLink
from fedring.client.transfer.delivery import Delivery
from fedring.client.transfer.kept import KeptState
from fedring.client.transfer.own_values import line_of
from fedring.client.transfer.residual import RESIDUAL
from fedring.client.transfer.spool import Spool, Spooled
from fedring.v1 import federation_pb2 as pb


class RoundEnd:
    """The end of a client's part in one round.

    Args:
        assignment: The round.
        link: The session to the server.
        spool: Where updates are kept before they are sent.
        protection: Of the round's updates.

    Attributes:
        done: Whether an update was submitted, or has failed or was refused.
        result: What became of the round here, one of `fedring.client.metrics.RESULTS`.
        train_seconds: How long the training took; None = it was not trained to its end.
        sent: Whether an answer may have been sent, so that there may be no other.
    """

    def __init__(self, assignment: Assignment, link: ServerLink, spool: Spool, protection: Protection) -> None:
        self.done = self.sent = False
        self.result = "over"
        self.train_seconds: float | None = None
        self._assignment, self._link, self._spool, self._protection = assignment, link, spool, protection
        self._delivery = Delivery(link, spool)

    @property
    def reason(self) -> str:
        """Why an update is no longer wanted; empty = it is wanted."""
        return self._assignment.stop_reason

    def trained(self, seconds: float) -> None:
        """Note that a training is to be delivered.

        Raises:
            RoundOver: If the round has ended.
        """
        self.train_seconds, self.done = seconds, True
        self._link.session.occupy()  # The job's code has ended.
        self.check_wanted()

    def check_wanted(self) -> None:
        """Raise RoundOver if no update is wanted any more."""
        if self.reason:
            raise RoundOver(self.reason)

    def send(self, answer: Answer) -> None:
        """Spool an answer, and deliver it.

        Raises:
            RoundOver: If the server has not accepted it; UpdateRefused, if it never will.
            OSError: If it cannot be written or charged; then nothing was sent.
        """
        command, update = self._assignment.command, answer.update
        precious = any(name != RESIDUAL for name in answer.kept)  # they take the place of older ones
        state = KeptState(line_of(command).key, answer.kept)
        spooled = self._spool.write(update.offer, update.parts, state, durable=precious)
        self._spool.ledger.charge(command, update.offer.name)  # which may fail; the delivery charges nothing then
        self.sent = True
        self._protection.bind(update.offer.payload_digest)
        self.deliver(spooled)

    @property
    def update_file(self) -> Path:
        """Where to write the payload of an update that is a file."""
        return self._spool.payload_part

    def adopt(self, offer: pb.UpdateOffer, path: Path) -> Spooled:
        """Move the file of an update to the spool.

        Raises:
            OSError: If that is impossible.
        """
        return self._spool.adopt(offer, path)

    def deliver(self, spooled: Spooled) -> None:
        """Deliver a spooled update.

        Raises:
            RoundOver: As Delivery.send() raises it.
        """
        self._link.session.occupy()
        self._delivery.send(spooled, self._assignment)

    def tell(self, reason: str, detail: str) -> None:
        """Tell the server that this client has no update."""
        self.failed()
        self._delivery.fail(self._assignment, reason, detail)

    def failed(self) -> None:
        """Note that this client has no update, which the server was told."""
        self.done, self.result = True, "failed"
        self._link.session.occupy()
        self._link.session.begin(pb.ACTIVITY_UNSPECIFIED)

    def stand_aside(self, train_seconds: float) -> None:
        """Note that another worker of the group delivers the model.

        Args:
            train_seconds: How long this worker has trained.
        """
        self.done, self.train_seconds = True, train_seconds
        self._link.session.occupy()
        if self.result == "over":
            self.result = "trained"
        self._link.session.begin(pb.ACTIVITY_UNSPECIFIED)

    def leave(self) -> None:
        """End the work on the round.

        If the server asks for the round again after this, it is trained anew.
        """
        mine = self._assignment
        if not (mine.undelivered or mine.accepted_name or mine.failure):
            mine.end_reason = mine.stop_reason
