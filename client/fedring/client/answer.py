"""The answers of a client in a round: updates of trained models, or of nothing."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from fedring.client.client_round import ClientRound
from fedring.client.errors import UpdateRefused, WrongModel
from fedring.client.loading import Loaded, check_frozen
from fedring.client.secure.desk import SecureDesk
from fedring.client.session.inbox import Assignment
from fedring.client.session.link import ServerLink
from fedring.client.transfer.control import OwnControl
from fedring.client.transfer.correction import Correction, load_correction
from fedring.client.transfer.delivery import Delivery
from fedring.client.transfer.download import HeldModel
from fedring.client.transfer.fetch import ModelFetcher
from fedring.client.transfer.private import PrivateValues, check_finite, check_own, line_of
from fedring.client.transfer.spool import Residual, Spool
from fedring.client.transfer.update import TrainingReport, Update, residual_of
from fedring.codec.schema import Schema
from fedring.train.state import read_tensors, read_vectors, schema_of
from fedring.v1 import federation_pb2 as pb


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """An update, and the values that stay with the client if it counts."""

    update: Update
    private: PrivateValues | None = None  # the private tensors; None = they stay as they are
    control: OwnControl | None = None  # the control variate that it leaves; None = none
    personal: PrivateValues | None = None  # the client's own model; None = it stays as it is


class Answers:
    """Makes answers to the command of one round.

    Args:
        assignment: The round.
        link: The session to the server.
        spool: What past updates have left.
        client_id: The client that sends the updates.
        secure: The client's part in secure aggregation.
        delivery: What delivers updates.

    Attributes:
        sent: Whether an answer may have been sent, so that there may be no other.
    """

    def __init__(
        self,
        assignment: Assignment,
        link: ServerLink,
        spool: Spool,
        client_id: str,
        secure: SecureDesk,
        delivery: Delivery,
    ) -> None:
        self.sent = False
        self._assignment, self._command = assignment, assignment.command
        self._link, self._spool, self._client_id, self._secure = link, spool, client_id, secure
        self._delivery = delivery

    def trained(
        self,
        model: nn.Module,
        loaded: Loaded,
        training: TrainingReport,
        own: Mapping[str, Tensor] | None,
        correction: Correction | None,
    ) -> Answer:
        """Return the update that leads from the loaded model to the trained one.

        Args:
            model: The trained model.
            loaded: What the training began with.
            training: What the training reports.
            own: The tensors of the client's own model; None = there is none.
            correction: What has corrected the gradients; None = nothing has.

        Raises:
            WrongModel: If the model has other tensors than those that were loaded, or its frozen ones were changed.
            CodecError: If a value is not finite, or the client's own model has other tensors.
            SecureError: If the update cannot be masked.
            UpdateRefused: If the server would refuse the update for its size.
            RoundOver: If the round ended before.
        """
        command, parts = self._command, loaded.parts
        for part in (parts.shared, parts.private):  # by their names: training may freeze tensors, or free them
            if clause := part.difference(schema_of(model, part.names)):
                raise WrongModel(f"this model is not the one that was loaded: {clause}")
        check_frozen(model, loaded)
        private, personal, line = None, None, line_of(command)
        if parts.private.entries:
            private = PrivateValues(line, parts.private, read_tensors(model, parts.private.names))
            check_finite(private.tensors)
        if own is not None:
            check_own(own, parts.not_frozen)
            personal = PrivateValues(line, parts.not_frozen, own)
            check_finite(own)
        values = read_vectors(model, parts.shared.names)
        update, control = self._round(loaded, correction).trained(values, training, self._residual())
        check_size(command, sum(map(len, update.parts)))
        return Answer(update, private, control, personal)

    def nothing(self, loaded: Loaded, noise: nn.Module | None, samples: int) -> Answer:
        """Return an update that changes nothing, with the full weight of the client.

        Private tensors and the client's own model stay as they are.

        Args:
            loaded: What the training began with.
            noise: A model after a training with noise and without samples, in the place of zeros; None = zeros.
            samples: How many samples the update counts for.

        Raises:
            SecureError, UpdateRefused, RoundOver: As trained() does, for reasons that depend on no sample.
        """
        values = None if noise is None else read_vectors(noise, loaded.parts.shared.names)
        update = self._round(loaded).nothing(values, samples, self._residual())
        check_size(self._command, sum(map(len, update.parts)))
        return Answer(update)

    def send(self, answer: Answer) -> None:
        """Spool an answer, and deliver it.

        Raises:
            RoundOver: If the server has not accepted it; UpdateRefused, if it never will.
            OSError: If it cannot be written or charged; then nothing was sent.
        """
        update = answer.update
        spooled = self._spool.write(
            update.offer,
            update.parts,
            update.residual,
            private=answer.private,
            control=answer.control,
            personal=answer.personal,
        )
        self._spool.ledger.charge(self._command, update.offer.name)  # which may fail; the delivery charges nothing then
        self.sent = True
        if self._command.HasField("secure"):
            self._secure.bind(self._assignment, update.offer.payload_digest)
        self._delivery.send(spooled, self._assignment, update.residual)

    def correction(self, schema: Schema, models: ModelFetcher) -> Correction:
        """Return the correction of the round's gradients.

        Args:
            schema: The shared tensors.
            models: What fetches the server's control variate.

        Raises:
            RoundOver: If the round has ended, or it cannot be fetched.
        """
        wanted, link, assignment = self._command.control, self._link, self._assignment
        own = self._spool.control.load(self._command.run_id, wanted.line, schema.num_parameters)

        def fetch(digest: str, part: Schema) -> HeldModel:
            return link.call(lambda: models.fetch_control(digest, part, lambda: assignment.stop_reason))

        return load_correction(wanted, schema, own, fetch)

    def waiting(self) -> Residual | None:
        """Return the values that the training adds to the model; None = none."""
        job, ledger = self._command.job, self._spool.ledger
        uncharged = job.sample_dp and not ledger.has_charged(self._command)  # the charge drops the residual
        return self._residual() if self._command.secure.blocks and not uncharged else None

    def _round(self, loaded: Loaded, correction: Correction | None = None) -> ClientRound:
        command = self._command
        mask = partial(self._secure.make_update, self._assignment) if command.HasField("secure") else None
        return ClientRound(command, self._client_id, loaded.start, mask, correction)

    def _residual(self) -> Residual | None:
        line, last = line_of(self._command), self._link.connection.last_accepted
        schema = residual_of(self._command.schema_hash, masked=self._command.HasField("secure"))
        return self._spool.residual(line.run_id, schema, last, after=line.after)


def check_size(command: pb.TrainCmd, size: int) -> None:
    """Check that an update of `size` bytes is not too large for the server.

    Raises:
        UpdateRefused: If it would.
    """
    if size > command.max_update_bytes > 0:
        limit = f"max_update_bytes={command.max_update_bytes}"
        detail = f"the update has {size} bytes, more than {limit} of fl-server: raise that or use another encoding"
        raise UpdateRefused("too_large", detail)
