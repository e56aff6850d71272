"""A client's answers to a round: updates with or without a change."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from fedring.client.client_round import Answer, ClientRound
from fedring.client.errors import UpdateRefused, WrongModel
from fedring.client.loading import Loaded, check_frozen
from fedring.client.protection import Protection
from fedring.client.session.inbox import Assignment
from fedring.client.session.link import ServerLink
from fedring.client.transfer.fetch import ModelFetcher
from fedring.client.transfer.kept import Section
from fedring.client.transfer.own_values import PERSONAL, PRIVATE, check_finite, line_of, own_tensors, section_of
from fedring.client.transfer.residual import RESIDUAL, Residual, residual_in
from fedring.client.transfer.spool import Spool
from fedring.client.transfer.update import TrainingReport
from fedring.client.transforms.chosen import begin_transforms
from fedring.client.transforms.interface import Float32, RoundStart
from fedring.train.tensors.download import Download
from fedring.train.tensors.state import fill, read_tensors, read_vectors, schema_of
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class StartedRound:
    """A round whose model was loaded."""

    loaded: Loaded
    round_: ClientRound

    def restore(self, model: nn.Module) -> None:
        """Restore the module's starting values, except for private tensors."""
        fill(model, self.loaded.parts.shared, self.loaded.start.vectors)


class Answers:
    """Makes answers to the command of one round.

    Args:
        assignment: The round.
        link: The session to the server.
        spool: What past updates have left.
        client_id: The client that sends the updates.
        protection: Of these updates.
    """

    def __init__(
        self, assignment: Assignment, link: ServerLink, spool: Spool, client_id: str, protection: Protection
    ) -> None:
        self._assignment, self._command = assignment, assignment.command
        self._link, self._spool, self._client_id, self._protection = link, spool, client_id, protection
        self._line = line_of(assignment.command)

    def begin(self, loaded: Loaded, models: ModelFetcher) -> StartedRound:
        """Begin the round with a model that was loaded.

        Args:
            loaded: What the training begins with.
            models: What fetches further vectors of the server's.

        Raises:
            RoundOver: If the round has ended, or a vector cannot be fetched.
        """
        link, assignment, schema = self._link, self._assignment, loaded.parts.shared.without_buffers

        def fetch(digest: str) -> Float32:
            what, ended = f"the control variate {digest}", lambda: assignment.stop_reason
            held = link.call(lambda: models.download(what, lambda: Download(digest, schema, None), ended))
            return held.vectors.parameters

        command, kept = self._command, self._spool.kept.load(self._line.key)
        transforms = begin_transforms(RoundStart(command, loaded.base, fetch), kept)
        round_ = ClientRound(
            command, self._client_id, loaded.start, transforms=tuple(transforms), protection=self._protection
        )
        return StartedRound(loaded, round_)

    def trained(
        self,
        started: StartedRound,
        model: nn.Module,
        training: TrainingReport,
        own: Mapping[str, Tensor] | None,
    ) -> Answer:
        """Return the update from the loaded model to the trained one.

        Args:
            started: The round.
            model: The trained model.
            training: What the training reports.
            own: The tensors of the client's own model; None = there is none.

        Raises:
            WrongModel: If the model has other tensors than those that were loaded, or its frozen ones were changed.
            CodecError: If a value is not finite, or the client's own model has other tensors.
            CannotProtect: If the update cannot be protected; the server was told.
            UpdateRefused: If the server would refuse the update for its size.
            RoundOver: If the round ended before.
        """
        command, loaded, parts = self._command, started.loaded, started.loaded.parts
        for part in (parts.shared, parts.private):  # by their names: training may freeze tensors, or free them
            if clause := part.difference(schema_of(model, part.names)):
                raise WrongModel(f"this model is not the one that was loaded: {clause}")
        check_frozen(model, loaded)
        stay: dict[str, Section] = {}
        if parts.private.entries:
            private = read_tensors(model, parts.private.names)
            check_finite(private)
            stay[PRIVATE] = section_of(self._line, parts.private, private)
        if own is not None:
            personal = own_tensors(own, parts.not_frozen)
            check_finite(personal)
            stay[PERSONAL] = section_of(self._line, parts.not_frozen, personal)
        answer = self._now(started).trained(read_vectors(model, parts.shared.names), training)
        check_size(command, sum(map(len, answer.update.parts)))
        return replace(answer, kept={**answer.kept, **stay})

    def nothing(self, started: StartedRound, noise: nn.Module | None, samples: int) -> Answer:
        """Return an update without change, with the client's full weight.

        Private tensors and the client's own model stay as they are.

        Args:
            started: The round.
            noise: A model after a training with noise and without samples, in the place of zeros; None = zeros.
            samples: How many samples the update counts for.

        Raises:
            CannotProtect, UpdateRefused, RoundOver: As trained() does, for reasons that depend on no sample.
        """
        values = None if noise is None else read_vectors(noise, started.loaded.parts.shared.names)
        answer = self._now(started).nothing(values, samples)
        check_size(self._command, sum(map(len, answer.update.parts)))
        return answer

    def waiting(self) -> Residual | None:
        """Return the residual that training adds to the model, or None."""
        job, ledger = self._command.job, self._spool.ledger
        uncharged = job.sample_dp and not ledger.has_charged(self._command)  # the charge drops the residual
        return self._residual() if self._protection.trains_on_residual and not uncharged else None

    def _now(self, started: StartedRound) -> ClientRound:
        """Return the round with the state that is kept now.

        A charge may have dropped the residual since the round began.
        """
        residual = self._residual()
        return replace(started.round_, kept=self._spool.kept.load(self._line.key), residual=residual)

    def _residual(self) -> Residual | None:
        line, last, kept = self._line, self._link.connection.last_accepted, self._spool.kept
        if self._spool.is_of_another_line(last.name, line.key):  # so it is no word on this one
            last = pb.LastAccepted()
        schema = self._protection.residual_schema(self._command.schema_hash)
        found, why = residual_in(kept.load(line.key), line.run_id, schema, last, after=line.after)
        if why:
            # Said first: whoever is killed after the drop, which takes two syncs, could not say why it has no residual.
            log.warning("dropped the residual of past updates: %s", why)
            kept.forget(line.key, RESIDUAL)
        return found


def check_size(command: pb.TrainCmd, size: int) -> None:
    """Check that an update of `size` bytes fits the server's limit.

    Raises:
        UpdateRefused: If it does not fit.
    """
    if size > command.max_update_bytes > 0:
        limit = f"max_update_bytes={command.max_update_bytes}"
        detail = f"the update has {size} bytes, more than {limit} of fl-server: raise that or use another encoding"
        raise UpdateRefused("too_large", detail)
