"""A check that a model treats samples alone, as DP-SGD needs it.

The result of the check is told to the server, and not charged. So it sees no data: two samples that are made up, of the
shapes and types of the first one. And it sees none of the server's values, but weights that nobody has chosen: chosen
ones could make the answer depend on samples, or hide that the model mixes them.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedring.job_code import job_code
from fedring.train.batches import Inputs, fetch
from fedring.train.errors import SeamError
from fedring.train.loop import Loss, seeded
from fedring.train.private_loop import ADVICE, SAMPLES, UNFIT, SampleGradients, check_buffers, sample_gradients

log = logging.getLogger(__name__)

_SAME = 1e-3  # by how much two gradients of one sample may differ, relative to their norm


def check_private_training(model: nn.Module, samples: Dataset[Any], *, loss: Loss, device: torch.device) -> None:
    """Check that a model can be trained with DP-SGD here.

    Args:
        model: Lies on `device`. It is as it was afterwards.
        samples: As for `fedring.train.loop.train`; not empty. Only the first one is read.
        loss: As for `train_privately`.
        device: Where to train.

    Raises:
        TrainError: With the reason bad_batch, if the first sample is not a valid one.
        SeamError: With the reason no_opacus, if Opacus is not installed, or no_sample_dp, if the model does not fit.
    """
    inputs, label = next(fetch(samples, [torch.zeros(1, dtype=torch.int64)], device))
    drawn = torch.Generator().manual_seed(0)
    if isinstance(inputs, dict):
        inputs = {name: _made_up(tensor, drawn) for name, tensor in inputs.items()}
    else:
        inputs = _made_up(inputs, drawn)
    model.train()
    with _random_values(model, drawn), sample_gradients(model):
        gradients = SampleGradients(model, samples, loss, device)
        try:
            for value in (0, 1):  # A loss may leave out the class 0, such as that of padding.
                labels = torch.full((2, *label.shape[1:]), value, dtype=label.dtype, device=device)
                with job_code():
                    compared = _compare_samples(gradients, inputs, labels, device)
                if compared:
                    return
        except SeamError:
            raise
        except Exception as error:  # the user's code may raise anything
            log.warning("the model or the loss fails for samples that are made up", exc_info=error)
            kind = type(error).__name__
            raise SeamError(UNFIT, f"The model or the loss fails for samples that are made up ({kind}).") from error
    raise SeamError(
        UNFIT, "The gradients for samples that are made up are not finite, or all zero: nobody can compare them."
    )


def _made_up(first: Tensor, drawn: torch.Generator) -> Tensor:
    """Return two samples [2, ...] like the first one [1, ...].

    Numbers are from 0 to 1, and integers zeros, which any index may be. Two samples that are equal would not show all
    that a model does with both.
    """
    shape = (2, *first.shape[1:])
    if first.is_floating_point() or first.is_complex():
        return torch.rand(shape, generator=drawn, dtype=first.dtype).to(first.device)
    return first.new_zeros(shape)


@contextmanager
def _random_values(model: nn.Module, drawn: torch.Generator) -> Iterator[None]:
    """Give a model random weights inside the context, and its own afterwards.

    Raises:
        SeamError: With the reason no_sample_dp, if a buffer has changed.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    weights = [parameter.detach().clone() for parameter in parameters]
    buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
    try:
        for parameter in parameters:
            # Scaled as at a usual initialisation, so that activations neither vanish nor explode.
            inputs = parameter[0].numel() if parameter.dim() > 1 else 1
            values = torch.randn(parameter.shape, generator=drawn) / max(1, inputs) ** 0.5
            parameter.detach().copy_(values if parameter.dim() > 1 else 0.5 + 0.1 * values)
        yield
        check_buffers(model, buffers)
    finally:
        for parameter, values in zip(parameters, weights, strict=True):
            parameter.detach().copy_(values)
        for name, buffer in model.named_buffers():
            if name in buffers and buffer.shape == buffers[name].shape:
                buffer.copy_(buffers[name])


def _compare_samples(gradients: SampleGradients, inputs: Inputs, labels: Tensor, device: torch.device) -> bool:
    """Compare gradients of two samples; return whether that was possible.

    Gradients that are not finite, or all zero, cannot be compared. Those of both must add up to torch's own gradient,
    those of the first must not depend on its neighbour, and its loss alone must have none with respect to the second.

    Args:
        gradients: Of the model.
        inputs: Of two samples, [2, ...].
        labels: Of these, [2, ...].
        device: Where the model lies.

    Raises:
        SeamError: With the reason no_sample_dp, if a sample changes the gradient of another one.
    """
    doubled = {k: v[[0, 0]] for k, v in inputs.items()} if isinstance(inputs, dict) else inputs[[0, 0]]
    of_both, of_twice = (_gradients(gradients, given, labels, device) for given in (inputs, doubled))
    of_first = _gradients(gradients, inputs, labels, device, alone=True)
    finite = all(torch.isfinite(found).all() for found in (*of_both, *of_twice, *of_first))
    if not (finite and any(found.any() for found in of_first)):
        return False
    # Another neighbour must not change the first gradient, and the first loss must not depend on the neighbour.
    for (name, _), both, twice, first in zip(gradients.named, of_both, of_twice, of_first, strict=True):
        _compare(name, both[0], twice[0])
        _compare(name, first.sum(0), first[0])
    return True


def _gradients(
    gradients: SampleGradients, inputs: Inputs, labels: Tensor, device: torch.device, *, alone: bool = False
) -> list[Tensor]:
    """Return the gradients of two samples, [2, ...].

    Args:
        gradients: Of the model.
        inputs: Of two samples, [2, ...].
        labels: Of these, [2, ...].
        device: Where the model lies.
        alone: Whether only the first loss has gradients.
    """
    with seeded(0, device):
        gradients.backward(inputs, labels, alone=alone)
    found = list(gradients.found(2))
    for (name, parameter), each in zip(gradients.named, found, strict=True):
        if parameter.grad is not None:
            _compare(name, each.sum(0), parameter.grad)
        parameter.grad = None
        setattr(parameter, SAMPLES, None)
    return found


def _compare(name: str, first: Tensor, second: Tensor) -> None:
    difference, norm = float((first - second).norm()), float(second.norm())
    if difference > _SAME * norm + 1e-6:
        raise SeamError(UNFIT, f"The gradients of {name} for single samples depend on other samples: {ADVICE}")
