"""The local epochs of one round in one process.

The process trains a model on its own samples.
"""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedring.train.batches import Inputs, apply, cut, diverged, draw, fetch, size_of
from fedring.train.errors import TrainError, TrainingStopped
from fedring.train.plan import Plan, TrainResult
from fedring.train.tally import Tally

Loss = Callable[[Tensor, Tensor], Tensor]
"""Takes outputs [batch, ...] and labels [batch, ...], and returns a scalar: the mean loss over the batch."""

OptimizerFactory = Callable[[Any, float, float], torch.optim.Optimizer]
"""Takes parameters, a learning rate and a momentum, and returns an optimizer."""

_NONE: Mapping[str, Tensor] = MappingProxyType({})
_CHECKS_PER_EPOCH = 100  # how often an epoch reports its progress, and checks that the loss is finite


def train(
    model: nn.Module,
    samples: Dataset[Any],
    plan: Plan,
    *,
    loss: Loss,
    optimizer_factory: OptimizerFactory,
    device: torch.device,
    progress: Callable[[float], None] = lambda share: None,
    stopped: Callable[[], bool] = lambda: False,
    corrections: Mapping[str, Tensor] = _NONE,
    towards: Mapping[str, Tensor] = _NONE,
) -> TrainResult:
    """Train a model in place.

    On a CPU, the same model, samples and plan give the same result, bit for bit.

    Args:
        model: Lies on `device`, and is trained there.
        samples: A map-style dataset of pairs of inputs and a label; inputs may be a dict by the names of arguments.
        plan: Says how many samples and epochs, and with which batch size, learning rate, momentum, mu, seed, largest
            norm of gradients, and precision. The model's values are float32 with each precision.
        loss: Returns the mean loss of a batch.
        optimizer_factory: Makes a new optimizer, so that no momentum is kept from round to round.
        device: Where to train.
        progress: Is called now and then with the share of the work that is done, 0 to 1.
        stopped: Is called before each step; once it returns True, training ends.
        corrections: Tensors that are added to the gradients in each step, by the names of the parameters, in their
            shapes.
        towards: Values to which the proximal term pulls parameters, by their names; others are pulled to their start.

    Returns:
        The means over the last epoch, and how long training took.

    Raises:
        TrainingStopped: If `stopped` returned True.
        TrainError: With the reason no_data, if there are no samples, or, if the loss is not finite, bad_batch if a
            sample has NaN, and diverged if not. With bad_precision, if this version does not know the plan's.
    """
    generator = torch.Generator().manual_seed(plan.seed)
    drawn = draw(size_of(samples), plan.subset_size, generator)
    if len(drawn) == 0:
        raise TrainError(
            "no_data", "This client has no samples to train on: give it some, or divide the data among fewer clients."
        )
    if not all(map(_trains, model.modules())):  # to set them all takes longer than to look
        model.train()
    step = _LocalStep(model, plan, loss, optimizer_factory, device, corrections, towards)
    tally, steps = Tally(), 0
    # Two sources of randomness: `generator` draws and orders samples, and the global ones drive dropout.
    with seeded(plan.seed, device):
        began = time.perf_counter()
        for epoch in range(plan.epochs):
            cuts = cut(drawn[torch.randperm(len(drawn), generator=generator)], plan.batch_size)
            tally.clear()
            for share in _epoch(step, fetch(samples, cuts, device), len(cuts), tally, stopped):
                if not math.isfinite(tally.loss_sum):
                    raise diverged(samples, cuts[: round(share * len(cuts))], plan.lr)
                progress((epoch + share) / plan.epochs)
            steps += len(cuts)
        seconds = time.perf_counter() - began
    return tally.result(len(drawn), seconds, steps)


def _trains(module: nn.Module) -> bool:
    """Return whether train() would change nothing."""
    own = getattr(module.train, "__func__", None) is not nn.Module.train  # such as one that keeps norms as they are
    return module.training and not own


@contextmanager
def seeded(seed: int, device: torch.device) -> Iterator[None]:
    """Seed torch's global generators inside the context.

    They drive dropout. Afterwards their states are restored.
    """
    if device.type != "cuda":  # fork_rng() takes longer
        state = torch.get_rng_state()
        try:
            torch.default_generator.manual_seed(seed)
            yield
        finally:
            torch.set_rng_state(state)
        return
    index = torch.cuda.current_device() if device.index is None else device.index
    with torch.random.fork_rng(devices=[index]):
        torch.default_generator.manual_seed(seed)
        torch.cuda.default_generators[index].manual_seed(seed)
        yield


def random_state(device: torch.device) -> dict[str, Tensor]:
    """Return the states of torch's global generators, [n] uint8 each.

    There is one of the CPU and, if the device is CUDA, one of the device.
    """
    states = {"cpu": torch.get_rng_state()}
    return states | {"cuda": torch.cuda.get_rng_state(device)} if device.type == "cuda" else states


def set_random_state(states: Mapping[str, Tensor], device: torch.device) -> None:
    """Restore torch's global generators from random_state().

    The states must be those of the same kind of device.
    """
    torch.set_rng_state(states["cpu"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def warm_up(device: torch.device) -> None:
    """Make torch load its optimizers now.

    Otherwise the first round would wait a second or two for that.
    """
    parameter = nn.Parameter(torch.zeros(1, device=device))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    parameter.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    optimizer.step()


def _epoch(
    step: "_LocalStep", batches: Iterator[tuple[Inputs, Tensor]], count: int, tally: Tally, stopped: Callable[[], bool]
) -> Iterator[float]:
    """Train on `count` batches, and yield the share that is done.

    It is yielded now and then, and at the end.
    """
    every = max(1, count // _CHECKS_PER_EPOCH)
    for number, (inputs, labels) in enumerate(batches, start=1):
        if stopped():
            raise TrainingStopped
        tally.add(*step(inputs, labels), labels)
        if number % every == 0 or number == count:
            yield number / count


class _LocalStep:
    """One step of a new optimizer for each call."""

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        loss: Loss,
        optimizer_factory: OptimizerFactory,
        device: torch.device,
        corrections: Mapping[str, Tensor],
        towards: Mapping[str, Tensor],
    ) -> None:
        self._model = model
        self._loss = loss
        self._clip = plan.clip_norm
        self._precision = precision_of(plan, device)
        self._mu = plan.mu
        named = list(model.named_parameters())
        trained = [(name, p) for name, p in named if p.requires_grad]
        self._parameters = [p for _, p in trained]
        self._start = [towards.get(name, p).detach().to(p, copy=True) for name, p in trained] if plan.mu > 0 else []
        self._corrections = [(p, corrections[name].to(p)) for name, p in named if name in corrections]
        for parameter in self._parameters:  # Training may have ended by an error before.
            parameter.grad = None
        self._optimizer = optimizer_factory(self._parameters, plan.lr, plan.momentum)
        # torch's own one does what the step does, and writes a record for profilers.
        self._own_zero_grad = type(self._optimizer).zero_grad is not torch.optim.Optimizer.zero_grad

    def __call__(self, inputs: Inputs, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Do a step on one batch. No gradients are left.

        Returns:
            The loss, a scalar, and the outputs of the batch, both from before the step.
        """
        with self._precision():
            outputs = apply(self._model, inputs)
            loss = self._loss(outputs, labels)
        loss.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if self._clip > 0:  # before the terms below: they do not come from samples, and algorithms count on them
            nn.utils.clip_grad_norm_(self._parameters, self._clip)
        if self._mu > 0:
            add_proximal(self._parameters, self._start, self._mu)
        add_corrections(self._corrections)
        self._optimizer.step()
        if self._own_zero_grad:
            self._optimizer.zero_grad()
        for parameter in self._parameters:
            parameter.grad = None
        return loss, outputs


def precision_of(plan: Plan, device: torch.device) -> Callable[[], AbstractContextManager[object]]:
    """Return a maker of contexts for a forward pass and its loss."""
    if plan.precision == "fp32":
        return nullcontext
    if plan.precision != "bf16":  # a newer server may know more
        raise TrainError("bad_precision", f"This version trains in fp32 and bf16, and not in {plan.precision!r:.100}.")
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)


@torch.no_grad()
def add_corrections(corrections: Sequence[tuple[nn.Parameter, Tensor]]) -> None:
    """Add corrections to the gradients in place.

    A parameter without a gradient is left out.
    """
    for parameter, correction in corrections:
        if parameter.grad is not None:
            parameter.grad.add_(correction)


@torch.no_grad()
def add_proximal(parameters: Sequence[nn.Parameter], start: Sequence[Tensor], mu: float) -> None:
    """Add the gradient of FedProx's proximal term to the gradients, in place.

    The term is mu/2 |w - w_start|^2 (Li et al. 2020, section 3.2, eq. 2), and its gradient is mu (w - w_start).

    Args:
        parameters: The parameters w; those without a gradient are left out.
        start: The values w_start that the round began with, one tensor for each parameter.
        mu: The weight of the term.
    """
    for parameter, origin in zip(parameters, start, strict=True):
        if parameter.grad is not None:
            parameter.grad.add_(parameter - origin, alpha=mu)
