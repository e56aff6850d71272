"""The local epochs of one round with DP-SGD.

DP-SGD (Abadi et al. 2016, algorithm 1) protects single samples. In each step, each sample is in the batch with the same
probability, independently of all others (Poisson sampling). Opacus computes the gradient of each sample and shortens it
to `max_grad_norm`. The sum of them gets Gaussian noise, and is divided by the expected size of a batch. Batches and
noise follow from a secret of the operating system, which is forgotten when the training ends. Nothing of them, and no
other random choice, follows from the job's seed.
"""

import logging
import os
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedring.job_code import job_code
from fedring.privacy.account import SampledSteps
from fedring.privacy.keystream import SECRET_BYTES
from fedring.privacy.noise import Noise
from fedring.train.batches import Inputs, apply, fetch, size_of
from fedring.train.errors import SeamError, TrainError, TrainingStopped
from fedring.train.jobs.sample_privacy_table import SamplePrivacy
from fedring.train.loop import Loss, OptimizerFactory, add_proximal, seeded
from fedring.train.plan import Plan, TrainResult
from fedring.train.private_layers import unfit_layer
from fedring.train.tally import Tally

log = logging.getLogger(__name__)

UNFIT = "no_sample_dp"
"""The reason for which a job with [sample_dp] is not trained: something does not fit DP-SGD."""

_GRADIENT_BYTES = 32 << 20  # of the gradients of single samples that are in memory at once
_CHECKS_PER_EPOCH = 100  # how often an epoch reports its progress
SAMPLES = "grad_sample"  # the attribute of a parameter in which Opacus leaves the gradients of single samples
ADVICE = (
    "DP-SGD needs layers that treat each sample of a batch alone, in the first dimension, and are called as layers."
)


def sampled_steps(plan: Plan, privacy: SamplePrivacy, size: int) -> SampledSteps:
    """Return the steps that a training takes.

    Each sample is in a batch with the probability `batch_size` / `size`. An epoch has as many steps as `subset_size`
    samples, or all of them, have batches; the batches are always drawn from all samples.

    Args:
        plan: How the job wants the model trained.
        privacy: The noise.
        size: The number of samples, at least 1.
    """
    counted = min(plan.subset_size, size) if plan.subset_size else size
    steps = plan.epochs * ceil(counted / plan.batch_size)
    return SampledSteps(min(1.0, plan.batch_size / size), privacy.noise_multiplier, steps)


def train_privately(
    model: nn.Module,
    samples: Dataset[Any],
    plan: Plan,
    privacy: SamplePrivacy,
    *,
    loss: Loss,
    optimizer_factory: OptimizerFactory,
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
    stopped: Callable[[], bool] = lambda: False,
    on_nothing: bool = False,
) -> TrainResult:
    """Train a model in place with DP-SGD.

    The result cannot be repeated.

    Args:
        model: Lies on `device`, and is trained there. fedring.train.private_check must have accepted it.
        samples: As for `fedring.train.loop.train`.
        plan: Says how many epochs, which expected batch size, learning rate, momentum and mu. Its seed is not used.
        privacy: The noise, and the norm to which gradients are shortened.
        loss: Returns the mean loss of a batch. It is asked for the loss of each sample alone.
        optimizer_factory: Makes a new optimizer, which gets gradients with noise.
        device: Where to train.
        progress: As for `fedring.train.loop.train`.
        stopped: As for `fedring.train.loop.train`.
        on_nothing: Whether no sample is used, so that the model gets the noise of all steps, and nothing else.

    Returns:
        The means over the last epoch. They are not private, and must not leave the client.

    Raises:
        TrainingStopped: If `stopped` returned True.
        TrainError: With the reason no_data, if there are no samples, or diverged, if a parameter is not finite.
        SeamError: With the reason no_opacus, if Opacus is not installed, or no_sample_dp, if the model does not fit.
        Exception: That of the first sample, if every sample that was drawn has raised one.
    """
    size = size_of(samples)
    if size == 0:
        raise TrainError("no_data", "This client has no samples to train on: give it some.")
    taken = sampled_steps(plan, privacy, size)
    secret = os.urandom(SECRET_BYTES)
    choice = Noise(secret, ["batches"])
    kept = {name: buffer.clone() for name, buffer in model.named_buffers()}
    model.train()
    # Dropout must not follow from a seed that others know: a sample would change what those after it drop.
    with sample_gradients(model), seeded(int.from_bytes(os.urandom(8), "little") >> 1, device):
        gradients = SampleGradients(model, samples, loss, device)
        step = _PrivateStep(gradients, plan, privacy, optimizer_factory, taken.rate * size, Noise(secret, ["noise"]))
        tally, per_epoch = Tally(), taken.steps // plan.epochs
        every, rate = max(1, per_epoch // _CHECKS_PER_EPOCH), 0.0 if on_nothing else taken.rate
        began = time.perf_counter()
        for number in range(taken.steps):
            if stopped():
                raise TrainingStopped
            if number % per_epoch == 0:
                tally.clear()
            chosen = choice.uniform(number * size, (number + 1) * size) <= rate
            step(torch.from_numpy(chosen.nonzero()[0]), tally)
            if (number + 1) % every == 0 or number + 1 == taken.steps:
                progress((number + 1) / taken.steps)
        seconds = time.perf_counter() - began
    gradients.check()
    _check_trained(model, kept, plan)
    if tally.total == 0:  # none was drawn
        return TrainResult(size, seconds=seconds, steps=taken.steps)
    return tally.result(size, seconds, taken.steps)


class SampleGradients:
    """Computes the gradients of single samples.

    Opacus leaves them in `grad_sample` of each parameter.
    """

    def __init__(self, model: nn.Module, samples: Dataset[Any], loss: Loss, device: torch.device) -> None:
        self._model, self._samples, self._loss, self._device = model, samples, loss, device
        self._at_once = True  # whether the losses of all samples of a batch are computed at once
        self.named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        self.parameters = [parameter for _, parameter in self.named]
        values = sum(parameter.numel() for parameter in self.parameters)
        self.most = max(1, _GRADIENT_BYTES // (4 * max(1, values)))  # samples at once
        self._computed = self._left_out = 0  # samples
        self._first_error: Exception | None = None

    def __call__(self, indices: Tensor, tally: Tally) -> None:
        """Compute the gradients of the samples `indices` [n] int64.

        They are left in `grad_sample` of each parameter, [n, ...]; n may be 0. A sample that raises an error counts as
        zeros, and so does one whose gradients are not finite: if it ended the training, all other samples would be
        missing in the update, too, and everybody would see that.
        """
        try:
            with job_code():
                self._compute(indices, tally)
            failed = False
        except Exception:  # the model, the loss and the samples may raise anything
            log.debug("a batch raised an error: its samples are computed one by one", exc_info=True)
            failed = True
        if failed:  # not in the handler: the error keeps the memory of the batch
            self._compute_alone(indices, tally)
        norms = torch.zeros(len(indices), device=self._device)
        for found in self.found(len(indices)):
            norms += found.flatten(1).square().sum(1)
        broken = ~torch.isfinite(norms)
        if broken.any():  # A sample that is damaged must not say so by the failure of the whole training.
            for parameter in self.parameters:
                getattr(parameter, SAMPLES)[broken] = 0.0

    def check(self) -> None:
        """Log the number of samples that were left out.

        If there was no other sample, the first error is raised. Then the model has nothing but its noise, and the site
        should know.
        """
        if self._first_error is not None:
            log.warning("%d samples raised an error in the training, and count as zeros", self._left_out)
            if not self._computed:
                raise self._first_error

    def _compute(self, indices: Tensor, tally: Tally) -> None:
        if len(indices):
            inputs, labels = next(fetch(self._samples, [indices], self._device))
            losses, outputs = self.backward(inputs, labels)
            for _ in self.found(len(indices)):  # raises an error if there are none
                pass
            tally.add(losses.mean(), outputs, labels)
            self._computed += len(indices)

    def _compute_alone(self, indices: Tensor, tally: Tally) -> None:
        """Compute the gradients of each sample in its own batch.

        Those of samples that raise errors are zeros.
        """
        gradients = [p.new_zeros(len(indices), *p.shape) for p in self.parameters]
        for place, index in enumerate(indices):
            self._forget()
            try:
                with job_code():
                    self._compute(index[None], tally)
                for each, found in zip(gradients, self.found(1), strict=True):
                    each[place] = found[0]
            except Exception as error:
                if self._first_error is None:
                    log.warning("a sample raised an error in the training, and counts as zeros", exc_info=error)
                    self._first_error = error.with_traceback(None)
                self._left_out += 1
        self._forget()
        for parameter, each in zip(self.parameters, gradients, strict=True):
            setattr(parameter, SAMPLES, each)

    def _forget(self) -> None:
        """Remove Opacus' notes of a batch.

        An error may have ended the batch in the middle.
        """
        for module in self._model.modules():
            _forget_batch(module)
        for parameter in self.parameters:
            parameter.grad = None
            setattr(parameter, SAMPLES, None)
            vars(parameter)["_forward_counter"] = 0
            vars(parameter).pop("_current_grad_sample", None)

    def found(self, count: int) -> Iterator[Tensor]:
        """Yield the gradients of single samples of each parameter.

        They are [count, ...], and zeros if the model has not used the parameter.
        """
        for name, parameter in self.named:
            found: Tensor | None = getattr(parameter, SAMPLES)
            if found is None and parameter.grad is None:
                found = parameter.new_zeros(count, *parameter.shape)
                setattr(parameter, SAMPLES, found)
            if found is None or len(found) != count:
                raise SeamError(UNFIT, f"The parameter {name} has no gradients of single samples: {ADVICE}")
            yield found

    def backward(self, inputs: Inputs, labels: Tensor, *, alone: bool = False) -> tuple[Tensor, Tensor]:
        """Compute gradients from a batch.

        Args:
            inputs: [n, ...].
            labels: [n, ...].
            alone: Whether only the loss of the first sample has gradients.
        """
        outputs = apply(self._model, inputs)
        losses = self._losses(outputs, labels)
        (losses[0] if alone else losses.sum()).backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return losses, outputs

    def _losses(self, outputs: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of each sample alone, [n].

        The loss of a batch may depend on several samples at once.
        """

        def one(output: Tensor, label: Tensor) -> Tensor:
            return self._loss(output.unsqueeze(0), label.unsqueeze(0))

        if self._at_once:
            try:
                return torch.func.vmap(one)(outputs, labels)
            except (RuntimeError, TypeError, ValueError):  # The loss does what vmap cannot.
                self._at_once = False
        return torch.stack([one(*pair) for pair in zip(outputs, labels, strict=True)])


class _PrivateStep:
    """Does one step of DP-SGD at each call.

    All steps use the same optimizer.
    """

    def __init__(
        self,
        gradients: SampleGradients,
        plan: Plan,
        privacy: SamplePrivacy,
        optimizer_factory: OptimizerFactory,
        expected: float,
        noise: Noise,
    ) -> None:
        _, optimizer = _opacus()
        self._gradients, self._noise, self._place = gradients, noise, 0
        self._mu = plan.mu
        self._start = [p.detach().clone() for p in gradients.parameters] if plan.mu > 0 else []
        self._deviation = privacy.noise_multiplier * privacy.max_grad_norm / expected
        self._optimizer = optimizer(
            optimizer_factory(gradients.parameters, plan.lr, plan.momentum),
            noise_multiplier=0.0,  # Opacus would draw the noise from torch's generator.
            max_grad_norm=privacy.max_grad_norm,
            expected_batch_size=expected,
        )
        self._optimizer.attach_step_hook(lambda _: self._complete())

    def __call__(self, drawn: Tensor, tally: Tally) -> None:
        """Do a step with the samples `drawn`, [n] int64.

        There may be none of them. No gradients are left.
        """
        parts = torch.split(drawn, self._gradients.most)  # which yields an empty part if there are none
        for number, part in enumerate(parts, start=1):
            self._gradients(part, tally)
            self._optimizer.signal_skip_step(number < len(parts))
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

    @torch.no_grad()
    def _complete(self) -> None:
        """Add noise to the mean of the shortened gradients.

        Then add the proximal term, which does not depend on samples.
        """
        for parameter in self._gradients.parameters:
            start, self._place = self._place, self._place + parameter.numel()
            noise = torch.from_numpy(self._noise.normal(start, self._place)).view(parameter.shape).to(parameter.device)
            gradient = parameter.grad
            if gradient is None:
                raise RuntimeError("Opacus has left a parameter without a gradient")
            gradient.copy_(gradient.double() + self._deviation * noise)
        if self._mu > 0:
            add_proximal(self._gradients.parameters, self._start, self._mu)


def check_private_model(model: nn.Module) -> None:
    """Check that a model can be trained with DP-SGD here.

    Raises:
        SeamError: With the reason no_opacus, if Opacus is not installed, or no_sample_dp, if a layer does not fit.
    """
    _opacus()
    sentence = unfit_layer(model)
    if not sentence:
        from opacus.validators import ModuleValidator

        model.train()
        refused = ModuleValidator.validate(model)
        sentence = f"Opacus refuses the model: {str(refused[0]).partition('. ')[0]}" if refused else ""
    if sentence:
        raise SeamError(UNFIT, f"{sentence[0].upper()}{sentence[1:]}.")


@contextmanager
def sample_gradients(model: nn.Module) -> Iterator[None]:
    """Let Opacus compute gradients of single samples inside the context.

    Afterwards the model is as it was.
    """
    check_private_model(model)
    sampler, _ = _opacus()
    replacing = [vars(module) for module in model.modules() if getattr(module, "inplace", False) is True]
    for attributes in replacing:  # Opacus still needs what these layers would overwrite.
        attributes["inplace"] = False
    for parameter in model.parameters():  # Training may have ended by an error before.
        parameter.grad = None
    hooks = sampler(model, loss_reduction="sum")
    try:
        yield
    finally:
        hooks.cleanup()
        for attributes in replacing:
            attributes["inplace"] = True
        for module in model.modules():
            _forget_batch(module)
        for parameter in model.parameters():
            parameter.grad = None
            vars(parameter).pop("summed_grad", None)


def _forget_batch(module: nn.Module) -> None:
    for name in ("activations", "max_batch_len"):
        vars(module).pop(name, None)


def check_buffers(model: nn.Module, kept: dict[str, Tensor]) -> None:
    for name, buffer in model.named_buffers():
        if name not in kept or not torch.equal(buffer, kept[name]):
            raise SeamError(UNFIT, f"Training changes the buffer {name}, which no noise covers: use other layers.")


def _check_trained(model: nn.Module, kept: dict[str, Tensor], plan: Plan) -> None:
    check_buffers(model, kept)
    if not all(torch.isfinite(parameter).all() for parameter in model.parameters()):
        raise TrainError("diverged", f"A parameter is not finite: use a learning rate below {plan.lr:g}.")


def _opacus() -> Sequence[Any]:
    """Return Opacus' class of hooks, and its class of optimizers.

    The first call takes seconds.
    """
    root = logging.getLogger()
    handlers = root.handlers[:]
    try:
        from opacus.grad_sample import GradSampleHooks
        from opacus.optimizers import DPOptimizer
    except ImportError as error:
        text = "Install fedring[privacy], whose Opacus trains with [sample_dp]."
        if (error.name or "").partition(".")[0] != "opacus":
            text = f"Opacus, which trains with [sample_dp], does not work with torch {torch.__version__}: {error}."
        raise SeamError("no_opacus", text) from error
    finally:
        root.handlers[:] = handlers  # It adds one of its own.
    warnings.filterwarnings("ignore", "Full backward hook is firing when gradients are computed")
    return GradSampleHooks, DPOptimizer
