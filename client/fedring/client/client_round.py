"""One client in one federated round, without I/O.

fl-client and the simulation run this, each with state of its own.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from fedring.client.protection import Protection
from fedring.client.transfer.kept import Sections
from fedring.client.transfer.residual import Residual, with_residual
from fedring.client.transfer.update import TrainingReport, Update, make_update
from fedring.client.transforms.interface import Sent, Transform
from fedring.codec.schema import Vectors
from fedring.train.plan import Plan
from fedring.train.tensors.download import HeldModel
from fedring.v1 import federation_pb2 as pb


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """An update, and all that the client keeps once it is accepted."""

    update: Update
    kept: Sections


@dataclass(frozen=True, slots=True, eq=False)
class ClientRound:
    """One client's part in one round."""

    command: pb.TrainCmd
    client_id: str
    start: HeldModel  # the values that the training begins with
    kept: Sections = field(default_factory=dict)  # what the newest accepted update has left
    residual: Residual | None = None  # what past updates have left out, if it may go into this one
    transforms: tuple[Transform, ...] = ()
    protection: Protection = field(default_factory=Protection)

    def plan(self, plan: Plan) -> Plan:
        """Return how the client trains, which the transforms may change."""
        for transform in self.transforms:
            plan = transform.plan(plan)
        return plan

    def corrections(self) -> Mapping[str, Tensor] | None:
        """Return the sum of the transforms' corrections to each step's gradients.

        The keys are the names of parameters. None if no transform corrects gradients.
        """
        all_of_them = [found for each in self.transforms if (found := each.corrections()) is not None]
        total: dict[str, Tensor] = {}
        for name, values in (pair for each in all_of_them for pair in each.items()):
            total[name] = total[name] + values if name in total else values
        return total if all_of_them else None

    def trained(self, values: Vectors, training: TrainingReport) -> Answer:
        """Return the update of a training.

        Args:
            values: What the training ended with. They are overwritten.
            training: What it reports.

        Raises:
            CodecError: With the reason "non_finite", if a value is not finite.
            CannotProtect, RoundOver: As Protection.update() raises them.
        """
        protected = self.protection.update(self.start, values, training.samples, self.residual)
        if protected is not None:
            return self._answer(protected)
        update = make_update(
            self.command, self.client_id, self.start, values, training, self.residual, describe=self._describe
        )
        sent = Sent(update, training.samples, self.start.schema)
        left = {each.name: section for each in self.transforms if (section := each.after(sent)) is not None}
        return self._answer(update, left)

    def nothing(self, noise: Vectors | None, samples: int) -> Answer:
        """Return an update that changes nothing, in the place of a failure.

        Args:
            noise: What a training on noise alone ended with, which is sent then; None = zeros are.
            samples: How many samples it counts for.

        Raises:
            CannotProtect, RoundOver: As Protection.update() raises them.
        """
        protected = self.protection.update(self.start, noise, samples, self.residual)
        if protected is not None:
            return self._answer(protected)
        make = (self.command, self.client_id, self.start)
        if noise is not None:
            return self._answer(make_update(*make, noise, TrainingReport(samples), self.residual))
        same = Vectors(self.start.vectors.parameters.copy(), self.start.vectors.buffers)
        zeros = make_update(*make, same, TrainingReport(samples=1), None)
        return self._answer(replace(zeros, residual=self.residual))

    def _describe(self, header: pb.UpdateHeader) -> None:
        for transform in self.transforms:
            transform.describe(header)

    def _answer(self, update: Update, left: Sections | None = None) -> Answer:
        schema = self.protection.residual_schema(self.command.schema_hash)
        kept = with_residual(self.kept, update.residual, update.header, update.offer.name, schema=schema)
        return Answer(update, {**kept, **(left or {})})
