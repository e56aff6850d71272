"""The check of a job whose clients are to be trained together.

It also finds how many of them fit into memory. A small computation is made in both ways, of one client alone and of two
at once. What vmap cannot take raises an error there, and what it would compute otherwise is found by comparing.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, cycle, islice
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedring.client.training.local_training import LoadedJob
from fedring.codec.schema import Schema, Vectors
from fedring.job_code import job_code
from fedring.simulation.cohort import Batch, Cohort, CohortMember, Trained
from fedring.simulation.samples import Batching, ClientSamples, Setup
from fedring.simulation.vectors import Vector
from fedring.train.batches import Inputs, apply, fetch, size_of
from fedring.train.errors import SeamError
from fedring.train.jobs.job import Job
from fedring.train.loop import Loss, precision_of, random_state, seeded
from fedring.train.plan import Plan
from fedring.train.tensors.state import values_of

log = logging.getLogger(__name__)

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

_PROBED = 64  # clients whose labels are looked at

_LABELS = 256  # of theirs
_MOST = 3  # samples of the computation that is compared
_FAR = {"fp32": 1e-3, "bf16": 5e-2}  # the largest share by which both ways may differ there, by precision


@dataclass(frozen=True, slots=True, eq=False)
class Batched:
    """A job whose clients can be trained together."""

    cohort: Cohort
    names: tuple[str, ...]  # of the trained parameters
    device: torch.device
    most: int  # clients at once

    def train(
        self,
        plan: Plan,
        members: Sequence[CohortMember],
        less: Mapping[str, Tensor] | None = None,
        *,
        round_: int,
    ) -> Sequence[Trained | None]:
        """Train clients with one plan: see Cohort.train.

        None stands for a client that must be trained alone. `round_` is the number of the round.
        """
        if not members:
            return []
        try:
            with job_code():
                return self.cohort.train(plan, members, less)
        except Exception:  # the user's code may raise anything
            log.warning("round %d: clients are trained one by one", round_, exc_info=True)
            return [None] * len(members)

    def values_of(
        self, model: nn.Module, schema: Schema, vectors: Vectors
    ) -> tuple[Mapping[str, Tensor], Mapping[str, Tensor]]:
        """Return the values of the trained parameters by name.

        They come in the model's dtypes, and in float32.
        """
        own = dict(model.named_parameters())
        values = {entry.name: values for entry, values in values_of(schema, vectors)}
        exact = {name: values[name].to(self.device) for name in self.names}
        return {name: each.to(own[name].dtype) for name, each in exact.items()}, exact

    def among_all(self, schema: Schema, trained: Vector, others: Vector) -> Vector:
        """Return the values of all shared parameters.

        Args:
            schema: The shared tensors.
            trained: The values of the trained parameters.
            others: Has those of the frozen ones in their places.
        """
        if trained.size == others.size:
            return trained
        parameters, at = others.copy(), 0
        for entry, place in schema.spans("parameter"):
            if entry.name in self.names:
                parameters[place], at = trained[at : at + entry.size], at + entry.size
        return parameters


def batched_or_not(
    loaded: LoadedJob, samples: ClientSamples, setup: Setup, device: torch.device, load: Callable[[], LoadedJob]
) -> tuple[LoadedJob, Batched | None, str]:
    """Return a job, with the means to train its clients together.

    Args:
        loaded: The job.
        samples: Those of its clients.
        setup: Says whether they are to be trained together, and with how much memory.
        device: Where to train.
        load: Loads the job once more.

    Returns:
        The job, which may have been loaded once more; the means, or None; and why there are none, as a sentence, which
        is empty if they were not asked for.

    Raises:
        SeamError: As `batched` does, if clients must be trained together, or none fits into the memory.
    """
    clients, batching = [client for client, size in enumerate(samples.sizes) if size], setup.batching
    if batching is None or not clients:
        return loaded, None, ""
    largest, others = max(clients, key=samples.sizes.__getitem__), clients[:: -(-len(clients) // _PROBED)]
    some = [partial(samples.train, client) for client in (largest, *others)]
    probed = copied(loaded) or loaded
    try:
        return loaded, batched(probed, some, setup.job, device, batching), ""
    except SeamError as error:
        if batching.demanded or error.reason == "no_room":
            raise
        # The attempt may have spoilt the model.
        return load() if probed is loaded else loaded, None, str(error)


def copied(loaded: LoadedJob) -> LoadedJob | None:
    """Return a job with a model and a loss of its own.

    It is for the training of clients together. What vmap leaves in attributes of the model or the loss is of no use
    outside of it. Parameters and buffers are shared.

    Returns:
        The job; None if the model or the loss cannot be copied, or an evaluator may give the model other tensors.
    """
    if loaded.evaluator is not None:
        return None
    shared: dict[int, Any] = {id(each): each for each in (*loaded.model.parameters(), *loaded.model.buffers())}
    try:
        model, loss = deepcopy((loaded.model, loaded.loss), shared)
    except Exception:  # such as of a model that keeps what has a gradient
        log.debug("the model or the loss cannot be copied", exc_info=True)
        return None
    return replace(loaded, model=model, loss=loss)


def batched(
    loaded: LoadedJob, samples: Sequence[Callable[[], Dataset[Any]]], job: Job, device: torch.device, batching: Batching
) -> Batched:
    """Return the means to train clients together.

    Args:
        loaded: The job.
        samples: Return those of some clients, of which the first one has at least one, and the most of all.
        job: Names what is loaded.
        device: Where to train.
        batching: The memory that may be used.

    Raises:
        SeamError: With the reason cannot_batch, if the job cannot be batched, or no client fits into the memory.
    """
    first = samples[0]()
    largest = max(job.batch_size, *(each.batch_size or 0 for each in job.override), 0)
    # No client has a batch of more samples than it has.
    most = min(largest, size_of(first))
    plan = Plan(batch_size=most, mu=job.mu or any(each.mu for each in job.override), precision=job.precision)
    _check_keys(loaded, job)
    named = {name: p for name, p in loaded.model.named_parameters() if p.requires_grad}
    state = _check_optimizer(loaded, list(named.values()), job)
    try:
        with job_code(), seeded(0, device):
            cohort = _probe(loaded, named, first, _labels_of(samples), plan, device)
            each = _bytes_of(loaded, named, first, plan, device, state)
    except SeamError:
        raise
    except Exception as error:  # the model, the loss and the samples may raise anything
        raise _cannot(_why(error)) from error
    if each > batching.most_bytes:
        text = f"One client takes about {-(-each // 10**6):,} MB to train, more than batch_mb = "
        raise SeamError("no_room", f"{text}{batching.most_bytes // 10**6:,}: allow more, or take engine = local.")
    return Batched(cohort, tuple(named), device, batching.most_bytes // each)


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
    loaded: LoadedJob,
    named: dict[str, nn.Parameter],
    samples: Dataset[Any],
    labels_of_many: Sequence[Tensor],
    plan: Plan,
    device: torch.device,
) -> Cohort:
    """Compare a small computation in both ways.

    Returns what trains in the second one.
    """
    model, count = loaded.model.train(), min(_MOST, size_of(samples))
    inputs, labels = next(fetch(samples, [torch.arange(count)], device))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    random = random_state(device)
    with precision_of(plan, device)():
        outputs = apply(model, _copied(inputs))  # the forward pass may change its inputs in place
        loss = loaded.loss(outputs, labels.clone())
    after = random_state(device)  # of the device, too, on which dropout would draw
    if not all(torch.equal(random[name], after[name]) for name in random):
        raise _cannot("its forward pass draws random numbers, such as dropout's, which would be other ones")
    if changed := next((name for name, each in model.named_buffers() if not torch.equal(each, before[name])), ""):
        with torch.no_grad():
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
        raise _cannot(f"its forward pass changes the buffer {changed}")
    wanted = dict(zip(named, torch.autograd.grad(loss, list(named.values()), allow_unused=True), strict=True))
    many = torch.cat([labels, *(each.to(labels) for each in labels_of_many if each.shape[1:] == labels.shape[1:])])
    separable = _is_alone(model, inputs, outputs.detach(), plan, device) and _is_separable(
        loaded.loss, outputs.detach(), many
    )
    other = ""
    # What looks separable and is not can still be trained without padding.
    for padded in (True, False) if separable else (False,):
        depends = all(each is not None for each in wanted.values())  # what it does not depend on would get zeros
        linear = padded and depends and _is_linear(model, named)
        cohort = Cohort(model, loaded.loss, loaded.optimizer, device, padded, linear)
        weights = torch.full((2, count), 1.0 / count, device=device) if padded else None
        found = dict[str, Tensor | None]()
        for _ in range(2):  # what vmap leaves in attributes of the model or the loss fails when it is used again
            stacked = {name: nn.Parameter(p.detach().expand(2, *p.shape).clone()) for name, p in named.items()}
            cohort.backward(stacked, Batch(_copied(inputs, 2), torch.stack([labels] * 2), weights), plan)
            found = {name: each.grad for name, each in stacked.items()}
        if not (other := _other_gradient(wanted, found, plan)):
            return cohort
    raise _cannot(f"the gradient of {other} is another one if two clients are trained at once")


def _other_gradient(wanted: Mapping[str, Tensor | None], found: Mapping[str, Tensor | None], plan: Plan) -> str:
    """Return the first parameter whose gradients differ.

    They are those of one client, and of two. If none does, the name is empty.
    """
    largest = max((float(each.abs().max()) for each in wanted.values() if each is not None), default=0.0)
    least = max(1e-6, 1e-3 * largest)  # of a gradient that is zero, only the rounding errors could be compared
    for name, one in wanted.items():
        two = found[name]
        if (one is None) != (two is None) or (one is not None and two is not None and _differ(one, two, plan, least)):
            return name
    return ""


def _is_linear(model: nn.Module, named: Collection[str]) -> bool:
    """Return whether linear layers have all of these parameters."""
    layers = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    return set(named) <= {f"{layer}.{name}".lstrip(".") for layer in layers for name in ("weight", "bias")}


def _is_alone(model: nn.Module, inputs: Inputs, outputs: Tensor, plan: Plan, device: torch.device) -> bool:
    """Return whether a sample's outputs do not depend on the others.

    Of one sample alone, nothing is seen.
    """
    if len(outputs) < 2:
        return False
    with torch.no_grad(), precision_of(plan, device)():
        fewer = {name: each[:1] for name, each in inputs.items()} if isinstance(inputs, dict) else inputs[:1]
        return not _differ(apply(model, _copied(fewer)), outputs[:1], plan)


def _is_separable(loss: Loss, outputs: Tensor, labels: Tensor) -> bool:
    """Return whether each sample adds its own loss to the mean.

    Args:
        loss: Returns the mean loss of a batch.
        outputs: Some of the model's, [n, ...].
        labels: Of many samples, [m, ...].
    """
    if len(labels) < 2 or (labels.ndim > 1 and not labels.is_floating_point()):  # of several, some may not count
        return False
    # The weights of classes and a root of the mean show only where samples differ: in outputs, which those of a fresh
    # model hardly do, and in labels, of which a client may have few. Random outputs stay where the model's own are: a
    # loss may take probabilities only.
    low, high = (-1 if (outputs < 0).any() else 0), (1 if (outputs > 0).any() else 0)
    generator = torch.Generator().manual_seed(0)
    shown = torch.rand(len(labels), *outputs.shape[1:], generator=generator) * (max(high, low + 1) - low) + low
    shown = shown.to(outputs.device, torch.promote_types(outputs.dtype, torch.float32))
    places = torch.randperm(len(labels), generator=generator).to(labels.device)
    stops = list(accumulate(islice(cycle((2, 3, 5)), len(labels))))
    try:
        with torch.no_grad():
            singles = torch.stack([loss(shown[[place]], labels[[place]]) for place in range(len(labels))])
            for some in torch.tensor_split(places, [stop for stop in stops if stop < len(labels)]):
                together = loss(shown[some], labels[some])
                if not abs(singles[some].mean() - together) <= 1e-5 * singles[some].abs().max():
                    return False
    except Exception:  # the loss may raise anything, such as for a sample alone: then it gets none
        log.debug("the loss takes no sample alone", exc_info=True)
        return False
    return True


def _labels_of(samples: Sequence[Callable[[], Dataset[Any]]]) -> list[Tensor]:
    """Return labels of all of these clients, as many of each."""
    found, generator = list[Tensor](), torch.Generator().manual_seed(0)
    for each in samples:
        with suppress(Exception):  # samples that cannot be read are the failure of their client alone
            own = each()
            places = torch.randperm(size_of(own), generator=generator)[: max(2, _LABELS // len(samples))]
            found.append(next(fetch(own, [places], torch.device("cpu")))[1])
    return found


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


def _copied(inputs: Inputs, clients: int = 0) -> Inputs:
    """Return a copy of inputs, or one for each of several clients."""

    def copy(each: Tensor) -> Tensor:
        return torch.stack([each] * clients) if clients else each.clone()

    return {name: copy(each) for name, each in inputs.items()} if isinstance(inputs, dict) else copy(inputs)


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
    if "escaped" in text:
        return "a call leaves something in the model or the loss, with which the next one fails"
    return f"{type(error).__name__}: {text[:200]}"


def _cannot(why: str) -> SeamError:
    return SeamError("cannot_batch", f"The job cannot be batched, because {why}.")
