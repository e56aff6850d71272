"""What a client answers to a command: fl-client and the simulation run this, each with state of its own. No I/O."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from fedring.client.transfer.control import OwnControl
from fedring.client.transfer.correction import Correction
from fedring.client.transfer.download import HeldModel
from fedring.client.transfer.spool import Residual
from fedring.client.transfer.update import TrainingReport, Update, make_update
from fedring.codec.schema import Vectors
from fedring.v1 import federation_pb2 as pb

Mask = Callable[[HeldModel, Vectors | None, int, Residual | None], Update]
"""Makes a masked update: see `MaskedUpdates.make`."""


@dataclass(frozen=True, slots=True, eq=False)
class ClientRound:
    """One client in one federated round."""

    command: pb.TrainCmd
    client_id: str
    start: HeldModel  # the values that the training begins with
    mask: Mask | None = None  # None = updates are not masked
    correction: Correction | None = None  # of the gradients; None = they are not corrected

    def trained(
        self, values: Vectors, training: TrainingReport, residual: Residual | None
    ) -> tuple[Update, OwnControl | None]:
        """Return the update of a training, and the control variate that it leaves.

        Args:
            values: What the training ended with. They are overwritten.
            training: What it reports.
            residual: What past updates left out, [num_parameters]; None = nothing.

        Raises:
            CodecError: With the reason "non_finite", if a value is not finite.
            SecureError: If it cannot be masked.
        """
        if self.mask is not None:
            return self.mask(self.start, values, training.samples, residual), None
        used = self.correction.used if self.correction else None
        update = make_update(self.command, self.client_id, self.start, values, training, residual, control=used)
        own = self.correction.after(update, self.command, training.samples) if self.correction else None
        return update, own

    def nothing(self, noise: Vectors | None, samples: int, residual: Residual | None) -> Update:
        """Return an update that changes nothing, in the place of a failure.

        Args:
            noise: What a training on noise alone ended with, which is sent then; None = zeros are.
            samples: How many samples it counts for.
            residual: What past updates left out, which stays as it is if zeros are sent; None = nothing.

        Raises:
            SecureError: If it cannot be masked.
        """
        if self.mask is not None:
            return self.mask(self.start, noise, samples, residual)
        if noise is not None:
            return make_update(self.command, self.client_id, self.start, noise, TrainingReport(samples), residual)
        same = Vectors(self.start.vectors.parameters.copy(), self.start.vectors.buffers)
        zeros = make_update(self.command, self.client_id, self.start, same, TrainingReport(samples=1), None)
        return replace(zeros, residual=residual)
