"""SCAFFOLD, with the server's control variate of each round."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

from fedring.codec.errors import CodecError
from fedring.server.aggregation.combining import Walk
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.aggregation.rule import Rule
from fedring.server.aggregation.steps import BaseFiles, Step, VectorFile
from fedring.server.aggregation.terms import Terms
from fedring.server.model.control import ControlPlan, next_control, plan_control
from fedring.server.model.transforms.transform import ClosedRound, Feature
from fedring.server.state.failures import StorageError
from fedring.server.state.rows import ModelRow
from fedring.train.jobs.job import Job
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Scaffold(Feature):
    """The correction of `scaffold = true`."""

    @classmethod
    def of(cls, job: Job) -> Self | None:
        """See Feature.of."""
        return cls() if job.scaffold else None

    def command(self, job: Job, command: pb.TrainCmd, base: ModelRow, files: BaseFiles) -> None:
        """Name the control variate of the base.

        Without one, a new line begins from zero.
        """
        if base.control_blob:
            command.control.CopyFrom(pb.Control(line=base.control_line, digest=base.control_digest))
        else:
            command.control.CopyFrom(pb.Control(line=f"{command.epoch}.{command.round}"))

    def terms(self, terms: Terms, command: pb.TrainCmd, members: int) -> Terms:
        """See Transform.terms."""
        return replace(terms, control_line=command.control.line)

    def close(self, closed: ClosedRound, rule: Rule | None) -> Step:
        """See Transform.close."""
        return NextControl(closed)


class NextControl(Step):
    """The control variate that the updates of one round leave.

    Args:
        closed: the round.

    Attributes:
        plan: how they change it, after `read`; None = it begins anew with the next round.
    """

    def __init__(self, closed: ClosedRound) -> None:
        self._closed, self._line = closed, closed.command.control.line
        self.plan: ControlPlan | None = None

    def read(self, base: ModelRow, files: BaseFiles) -> None:
        """See Step.read."""
        same_line = base.control_blob and base.control_line == self._line
        control = files.open(base.control_blob) if same_line else None
        try:
            before = ModelReader(control) if control else None
            closed, job_round = self._closed, self._closed.command.job_round
            plan = plan_control(closed.job, job_round, closed.updates, before, told=closed.told)
        except (CodecError, StorageError) as error:
            raise files.damage_of(error) from error
        if isinstance(plan, ControlPlan):
            self.plan = plan
            return
        log.warning(
            "the control variate begins anew, because %s used one that its newest counted update has not left",
            ", ".join(plan),
        )

    def files(self, walk: Walk) -> Mapping[str, bytes | VectorFile]:
        """See Step.files."""
        if self.plan is None:
            return {}
        pieces = next_control(walk, self.plan)
        return {"control_blob": VectorFile(pieces, self.plan.metadata, digest_column="control_digest")}

    def columns(self) -> Mapping[str, Any]:
        """See Step.columns."""
        return {"control_line": self._line} if self.plan else {}
