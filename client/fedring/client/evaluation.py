"""A model to evaluate, and the report on it."""

import logging
import time

from torch import nn

from fedring.client.loading import Loaded, ModelLoader, check_frozen
from fedring.client.policy.promises import promises_of
from fedring.client.session.inbox import EvaluationOrder
from fedring.client.session.link import ServerLink
from fedring.client.transfer.kept import KeptFiles
from fedring.client.transfer.own_values import PERSONAL, line_of, values_in
from fedring.train.evaluation import Counts
from fedring.train.metrics import sendable_metrics
from fedring.train.tensors.arrays import Arrays
from fedring.train.tensors.state import write_tensors
from fedring.untrusted import encodable
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

_MOST_TEXT = 1000  # characters of a failure, as the protocol has it


class Evaluation:
    """One published model to evaluate.

    `Federation` passes it to the function that evaluates.
    """

    def __init__(self, order: EvaluationOrder, link: ServerLink, loader: ModelLoader, kept: KeptFiles) -> None:
        self.command = order.command
        self._deadline = order.deadline
        self._link = link
        self._loader, self._kept = loader, kept
        self._loaded: Loaded | None = None

    @property
    def job(self) -> pb.JobSpec:
        """The job, with its mode."""
        return self.command.job

    def load_into(self, model: nn.Module | Arrays) -> None:
        """Load the values to evaluate into `model`.

        Private tensors get this client's own values, as for Task.load_into().

        Args:
            model: A torch module, or numpy arrays of floats by name.

        Raises:
            WrongModel: If the model shares other tensors than those that are trained, or has other frozen values.
            RoundOver: If the deadline has passed, or the model cannot be fetched.
        """
        self._loaded = self._loader.load(self.command, model, ended=self._ended)
        self._link.session.begin(pb.ACTIVITY_EVALUATING)

    def load_own(self, model: nn.Module) -> bool:
        """Load this client's own model into the evaluated module.

        Returns:
            Whether the client has a model of its own.
        """
        if self._loaded is None:
            return False
        line = line_of(self.command)
        values = values_in(self._kept.load(line.key), PERSONAL, line, self._loaded.parts.not_frozen)
        if values is not None:
            write_tensors(model, values)
        return values is not None

    def check_frozen(self, model: nn.Module) -> None:
        """Check that the evaluation has not changed frozen tensors.

        Raises:
            WrongModel: With the reason frozen_changed, if it has.
        """
        if self._loaded is not None:
            check_frozen(model, self._loaded)

    @property
    def ended(self) -> bool:
        """Whether the deadline has passed, so that further work would be wasted."""
        return bool(self._ended())

    def _ended(self) -> str:
        return "deadline" if time.monotonic() >= self._deadline else ""


def report_of(command: pb.EvaluateCmd, counts: Counts, why: str) -> pb.EvaluationReport:
    """Return the report of an evaluation, and log its failure.

    In jobs that promise to hide clients or samples, the server is told no text, which may quote a sample: then only the
    log has it.

    Args:
        command: What the server has sent.
        counts: The counts; zeros if the evaluation has failed.
        why: Why it has failed, for people; empty = it has not.
    """
    failure = " ".join([why] if why else counts.warnings)
    if why:
        log.error("model %d was not evaluated: %s", command.model_version, why)
    elif failure:
        log.warning("the evaluation of model %d is not complete: %s", command.model_version, failure)
    return pb.EvaluationReport(
        round=command.round,
        model_digest=command.model_digest,
        correct=counts.correct or 0,
        total=counts.total,
        loss_sum=counts.loss_sum,
        classified=None if counts.correct is not None else 0,  # it is sent only where it says something
        metrics=sendable_metrics(counts.metrics),
        failure="" if promises_of(command.job) else encodable(failure)[:_MOST_TEXT],
    )
