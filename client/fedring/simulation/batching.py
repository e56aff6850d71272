"""The check of a job whose clients are to be trained together.

It also finds how many of them fit into memory. A small computation is made in both ways, of one client alone and of two
at once. What vmap cannot take raises an error there, and what it would compute otherwise is found by comparing.
"""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedring.client.training.local_training import LoadedJob
from fedring.job_code import job_code
from fedring.simulation.cohort import Batch, Cohort
from fedring.simulation.samples import Batching
from fedring.train.batches import Inputs, apply, fetch, size_of
from fedring.train.errors import SeamError
from fedring.train.jobs.job import Job
from fedring.train.loop import precision_of, random_state, seeded
from fedring.train.plan import Plan

ELEMENTWISE = (
    torch.optim.SGD,
    torch.optim.Adam,
    torch.optim.AdamW,
    torch.optim.Adagrad,
    torch.optim.Adadelta,
    torch.optim.Adamax,
    torch.optim.NAdam,
    torch.optim.RAdam,
    torch.optim.RMSprop,
)
"""Optimizers whose step of a value depends on that value, its gradient and its state alone."""

_MOST = 3  # samples of the computation that is compared
_FAR = {"fp32": 1e-3, "bf16": 5e-2}  # the largest share by which both ways may differ there, by precision


@dataclass(frozen=True, slots=True, eq=False)
class Batched:
    """A job whose clients can be trained together."""

    cohort: Cohort
    names: tuple[str, ...]  # of the trained parameters
    most: int  # clients at once


def batched(loaded: LoadedJob, samples: Dataset[Any], job: Job, device: torch.device, batching: Batching) -> Batched:
    """Return the means to train clients together.

    Args:
        loaded: The job.
        samples: Some client's, at least one.
        job: Names what is loaded.
        device: Where to train.
        batching: The memory that may be used.

    Raises:
        SeamError: With the reason cannot_batch, if the job cannot be batched, or no client fits into the memory.
    """
    most = max(job.batch_size, *(each.batch_size or 0 for each in job.override), 0)
    plan = Plan(batch_size=most, mu=job.mu or any(each.mu for each in job.override), precision=job.precision)
    _check_keys(loaded, job)
    named = {name: p for name, p in loaded.model.named_parameters() if p.requires_grad}
    state = _check_optimizer(loaded, list(named.values()), job)
    try:
        with job_code(), seeded(0, device):
            cohort = _probe(loaded, named, samples, plan, device)
            each = _bytes_of(loaded, named, samples, plan, device, state)
    except SeamError:
        raise
    except Exception as error:  # the model, the loss and the samples may raise anything
        raise _cannot(_why(error)) from error
    if each > batching.most_bytes:
        text = f"One client takes about {-(-each // 10**6):,} MB to train, more than batch_mb = "
        raise SeamError("no_room", f"{text}{batching.most_bytes // 10**6:,}: allow more, or take engine = local.")
    return Batched(cohort, tuple(named), batching.most_bytes // each)


def _check_keys(loaded: LoadedJob, job: Job) -> None:
    """Check the keys of a job, and the layers of its model."""
    if loaded.trainer is not None:
        raise _cannot("its trainer is a loop of its own")
    for table in job.tables.values():
        if table.alone:
            raise _cannot(table.alone)
    for name, module in loaded.model.train().named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.training:
            raise _cannot(f"{name or 'the model'} is a {type(module).__name__}, whose statistics change in training")
    if not any(parameter.requires_grad for parameter in loaded.model.parameters()):
        raise _cannot("it trains no parameter")


def _check_optimizer(loaded: LoadedJob, parameters: list[nn.Parameter], job: Job) -> int:
    """Check that a job's optimizer treats each value alone.

    Returns the number of values that it keeps for each.
    """
    optimizer = loaded.optimizer(parameters, 0.1, 0.5)
    if type(optimizer) not in ELEMENTWISE:
        raise _cannot(f"its optimizer is a {type(optimizer).__name__}, which need not treat each value alone")
    if len(optimizer.param_groups) != 1 or len(optimizer.param_groups[0]["params"]) != len(parameters):
        raise _cannot("its optimizer treats parameters in several ways")
    return 1 if isinstance(optimizer, torch.optim.SGD) else 3


def _probe(
    loaded: LoadedJob, named: dict[str, nn.Parameter], samples: Dataset[Any], plan: Plan, device: torch.device
) -> Cohort:
    """Compare a small computation in both ways.

    Returns what trains in the second one.
    """
    model, count = loaded.model.train(), min(_MOST, size_of(samples))
    inputs, labels = next(fetch(samples, [torch.arange(count)], device))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    random = random_state(device)
    with precision_of(plan, device)():
        outputs = apply(model, inputs)
        loss = loaded.loss(outputs, labels)
    after = random_state(device)  # of the device, too, on which dropout would draw
    if not all(torch.equal(random[name], after[name]) for name in random):
        raise _cannot("its forward pass draws random numbers, such as dropout's, which would be other ones")
    if changed := next((name for name, each in model.named_buffers() if not torch.equal(each, before[name])), ""):
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
        raise _cannot(f"its forward pass changes the buffer {changed}")
    wanted = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    padded = _is_separable(loaded, inputs, labels, outputs.detach(), loss.detach(), plan, device)
    depends = all(each is not None for each in wanted)  # what the loss does not depend on would get zeros
    linear = padded and depends and _is_linear(model, named)
    cohort = Cohort(model, loaded.loss, loaded.optimizer, device, padded, linear)
    weights = torch.full((2, count), 1.0 / count, device=device) if padded else None
    batch = Batch(_twice(inputs), labels.expand(2, *labels.shape), weights)
    stacked = {name: nn.Parameter(p.detach().expand(2, *p.shape).clone()) for name, p in named.items()}
    cohort.backward(stacked, batch, plan)
    found = [each.grad for each in stacked.values()]
    largest = max((float(each.abs().max()) for each in wanted if each is not None), default=0.0)
    least = max(1e-6, 1e-3 * largest)  # of a gradient that is zero, only the rounding errors could be compared
    for name, one, two in zip(named, wanted, found, strict=True):
        if (one is None) != (two is None) or (one is not None and two is not None and _differ(one, two, plan, least)):
            raise _cannot(f"the gradient of {name} is another one if two clients are trained at once")
    return cohort


def _is_linear(model: nn.Module, named: Collection[str]) -> bool:
    """Return whether linear layers have all of these parameters."""
    layers = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    return set(named) <= {f"{layer}.{name}".lstrip(".") for layer in layers for name in ("weight", "bias")}


def _is_separable(
    loaded: LoadedJob, inputs: Inputs, labels: Tensor, outputs: Tensor, loss: Tensor, plan: Plan, device: torch.device
) -> bool:
    """Return whether each sample adds its own loss to the mean.

    It must not depend on the other samples.
    """
    count = len(labels)
    if count < 2 or (labels.ndim > 1 and not labels.is_floating_point()):  # of several labels, some may not count
        return False
    with torch.no_grad(), precision_of(plan, device)():
        fewer = {name: each[:1] for name, each in inputs.items()} if isinstance(inputs, dict) else inputs[:1]
        alone = apply(loaded.model, fewer)
        singles = [loaded.loss(outputs[row : row + 1], labels[row : row + 1]) for row in range(count)]
    return not _differ(alone, outputs[:1], plan) and not _differ(torch.stack(singles).mean(), loss, plan)


def _bytes_of(
    loaded: LoadedJob,
    named: dict[str, nn.Parameter],
    samples: Dataset[Any],
    plan: Plan,
    device: torch.device,
    state: int,
) -> int:
    """Return about how many bytes the training of one client takes.

    They are those of its values, gradients, state and start, of a copy of its result, and of a batch's activations.
    """
    values = sum(p.numel() for p in named.values())
    count = min(_MOST, size_of(samples))
    inputs, labels = next(fetch(samples, [torch.arange(count)], device))
    with _saved() as saved:
        loaded.loss(apply(loaded.model, inputs), labels)
    given = inputs.values() if isinstance(inputs, dict) else [inputs]
    activations = sum(saved.values()) + sum(each.nbytes for each in given)
    # A backward pass holds about as much again as the forward pass has saved.
    return 4 * values * (4 + state + (plan.mu > 0)) + 2 * activations * -(-plan.batch_size // count)


@contextmanager
def _saved() -> Iterator[dict[int, int]]:
    """Yield the bytes of the tensors that a forward pass saves.

    They are known by their places in memory.
    """
    found: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter) and not (
            tensor._base is not None and isinstance(tensor._base, nn.Parameter)
        ):
            found[tensor.data_ptr()] = tensor.nbytes
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found


def _twice(inputs: Inputs) -> Inputs:
    if isinstance(inputs, dict):
        return {name: each.expand(2, *each.shape) for name, each in inputs.items()}
    return inputs.expand(2, *inputs.shape)


def _differ(one: Tensor, two: Tensor, plan: Plan, least: float = 1e-6) -> bool:
    """Return whether values differ by a share of the largest, or `least`."""
    one, two = one.detach().double(), two.detach().double()
    return not bool(((one - two).abs() <= _FAR[plan.precision] * one.abs().max().clamp(min=least)).all())


def _why(error: Exception) -> str:
    """Return an error of the job's code as a clause."""
    text = " ".join(str(error).split())
    if "randomness" in text or "random operation" in text:
        return "its forward pass draws random numbers, such as dropout's, which would be other ones"
    if "data-dependent" in text or ".item()" in text:
        return "its forward pass depends on values, which differ from client to client"
    return f"{type(error).__name__}: {text[:200]}"


def _cannot(why: str) -> SeamError:
    return SeamError("cannot_batch", f"The job cannot be batched, because {why}.")
