"""The evaluation of a model on held-out samples."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedring.job_code import job_code
from fedring.rpc.contract import MAX_FIGURE
from fedring.train.batches import apply, fetch, size_of
from fedring.train.errors import TrainError
from fedring.train.loop import Loss
from fedring.train.metrics import combine, usable_metrics
from fedring.train.tally import Tally

NO_SAMPLES = "There are no test samples here: let the job's data have some, or set evaluate = false in the job."
"""Why an evaluation without samples has no figures."""

Evaluator = Callable[[nn.Module, Dataset[Any]], Any]
"""A user's function of (model, samples); see `counts_of` for what it returns."""


@dataclass(frozen=True, slots=True)
class Counts:
    """Sums over samples.

    The counts of several clients add up to the counts of all their samples.
    """

    correct: int | None = 0  # samples whose largest output is that of their label; None = labels are not classes
    total: int = 0  # samples
    loss_sum: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)  # named figures: means, or sums (fedring.train.metrics)
    warnings: tuple[str, ...] = ()  # a sentence on each figure that could not be used

    @property
    def accuracy(self) -> float | None:
        """The share of samples that are classified correctly, or None.

        It is None without samples, and if labels are not classes.
        """
        return None if self.correct is None or not self.total else self.correct / self.total

    @property
    def loss(self) -> float | None:
        """The mean loss; None without samples."""
        return self.loss_sum / self.total if self.total else None

    def __add__(self, other: "Counts") -> "Counts":
        warnings = tuple(dict.fromkeys(self.warnings + other.warnings))
        if not (self.total and other.total):
            return replace(self if self.total else other, warnings=warnings)
        correct = None if self.correct is None or other.correct is None else self.correct + other.correct
        metrics = combine([(self.total, self.metrics), (other.total, other.metrics)])
        return Counts(correct, self.total + other.total, self.loss_sum + other.loss_sum, metrics, warnings)


@torch.no_grad()
def evaluate(
    model: nn.Module,
    samples: Dataset[Any],
    *,
    loss: Loss,
    batch_size: int = 64,
    device: torch.device,
    indices: Tensor | None = None,
) -> Counts:
    """Evaluate a model.

    Args:
        model: Is moved to `device`. It is in evaluation mode meanwhile, and in its former mode afterwards.
        samples: Any map-style dataset of pairs of inputs and a label; inputs may be a dict by the names of arguments.
        loss: Returns the mean loss of a batch.
        batch_size: Samples per batch. A small CNN is as fast with 32 as with 256, and needs 300 MB more with 512.
        device: Where to compute.
        indices: The samples that count, [n] int64; None = all.

    Returns:
        The counts over these samples. `correct` is None unless outputs are [batch, classes] and labels are integers
        [batch].
    """
    wanted = torch.arange(size_of(samples)) if indices is None else indices
    if len(wanted) == 0:
        return Counts()
    # By module, because a user's model may keep some of its layers in evaluation mode during training.
    modes = [(module, module.training) for module in model.modules()]
    model.to(device).eval()
    tally = Tally()
    cuts = torch.split(wanted, batch_size)
    try:
        for inputs, labels in fetch(samples, cuts, device):
            outputs = apply(model, inputs)
            tally.add(loss(outputs, labels), outputs, labels)
    finally:
        for module, training in modes:
            module.training = training
    return Counts(tally.correct if tally.classified else None, tally.total, tally.loss_sum)


@torch.no_grad()
def run_evaluator(
    evaluator: Evaluator | None, model: nn.Module, samples: Dataset[Any], *, loss: Loss, device: torch.device
) -> Counts:
    """Evaluate a model with a user's function, or without one.

    Without one, this does the same as `evaluate`.

    Args:
        evaluator: The function of (model, samples); None = the built-in evaluation.
        model: Is moved to `device`. It is in evaluation mode meanwhile, and in training mode afterwards.
        samples: The held-out samples.
        loss: The job's loss, which only the built-in evaluation uses.
        device: Where to compute.

    Raises:
        TrainError: With the reason bad_result, if the function reports nonsense, or the loss is not finite.
    """
    with job_code():
        if evaluator is None:
            return _checked(evaluate(model, samples, loss=loss, device=device))
        if (size := size_of(samples)) == 0:
            return Counts()
        model.to(device).eval()
        try:
            return counts_of(evaluator(model, samples), size)
        finally:
            model.to(device).train()  # The function may have moved it.


def counts_of(told: object, size: int | None = None) -> Counts:
    """Return the checked result of a user's evaluation.

    Args:
        told: Counts; or (correct, total, sum of losses), whose `correct` is None where accuracy is not defined; or a
            mapping with "loss", optionally "accuracy" and "num_samples", and any further figures by name.
        size: The number of samples, if the mapping does not say it.

    Raises:
        TrainError: With the reason bad_result, if it is something else, or the loss is not finite. A further figure
            that cannot be used is left out, with a warning in the counts.
    """
    try:
        counts = _read(told, size)
        if not 0 <= (counts.correct or 0) <= counts.total:
            raise ValueError(f"{counts.correct} of {counts.total} samples cannot be correct")
        metrics, warnings = usable_metrics(counts.metrics)
    except (TypeError, ValueError, OverflowError) as error:
        raise TrainError("bad_result", f"The evaluation's result cannot be used: {error}.") from error
    return _checked(replace(counts, metrics=metrics, warnings=warnings))


def _checked(counts: Counts) -> Counts:
    """Return counts whose loss can be added to others."""
    if abs(counts.loss_sum) <= MAX_FIGURE:
        return counts
    detail = f"The loss of the evaluation is {counts.loss_sum:g}: it must be a finite number of at most {MAX_FIGURE:g}."
    raise TrainError("bad_result", detail)


def _read(told: Any, size: int | None) -> Counts:
    match told:
        case Counts():
            return told
        case (correct, total, loss_sum):
            return Counts(None if correct is None else int(correct), int(total), float(loss_sum))
        case {"loss": loss}:
            rest = dict(told)
            total, accuracy = rest.pop("num_samples", size), rest.pop("accuracy", None)
            if total is None:
                raise ValueError("it does not say num_samples")
            del rest["loss"]
            correct = None if accuracy is None else round(float(accuracy) * total)
            return Counts(correct, int(total), float(loss) * total, rest)
    raise TypeError(f"it is {told!r:.100}; return a mapping with loss, and with further figures by name")
