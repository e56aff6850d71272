"""The training of several clients at once, as one batched computation.

Each trained parameter of the model becomes one tensor for all clients, [clients, ...]. `torch.func.vmap` runs the
forward pass over the clients, one backward pass of the sum of their losses gives the gradients of all of them, and the
job's own optimizer steps the stacked tensors, which is right for optimizers that treat each value alone. If all layers
are linear, the backward pass is run by `vmap`, too: that is faster, while for convolutions it is slower.

The law: each client ends where `fedring.train.loop.train` would have brought it, but for the rounding of float32. It
draws and orders its samples by the same seed. Batches of different sizes are padded, and what is padded weighs nothing;
a model or a loss that looks at several samples at once gets no padding, and its batches are computed size by size.
Clients with more steps come first, so that those that still train are the first rows of each tensor.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap
from torch.utils.data import Dataset

from fedring.data import Samples
from fedring.data.samples import SamplesView
from fedring.train.batches import Inputs, cut, draw, fetch, size_of
from fedring.train.errors import TrainError
from fedring.train.loop import Loss, OptimizerFactory, add_corrections, add_proximal, precision_of
from fedring.train.plan import Plan, TrainResult, batches_in
from fedring.train.tally import right_answers


@dataclass(frozen=True, slots=True, eq=False)
class CohortMember:
    """One client of a cohort."""

    samples: Dataset[Any]
    seed: int  # of its samples and their order
    start: Mapping[str, Tensor]  # the values of the trained parameters that it begins with, by name
    corrections: Mapping[str, Tensor] | None = None  # added to each step's gradients


@dataclass(frozen=True, slots=True, eq=False)
class Trained:
    """The end of a member's training."""

    values: NDArray[np.float32]  # of the trained parameters, one after the other, or the difference that they have made
    result: TrainResult


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A batch of each of several clients."""

    inputs: Inputs  # [clients, batch, ...]
    labels: Tensor  # [clients, batch, ...]
    weights: Tensor | None  # [clients, batch], of each sample in its client's mean loss; None = all weigh the same


@dataclass(frozen=True, slots=True, eq=False)
class Cohort:
    """A model whose clients can be trained together.

    Attributes:
        model: It lies on `device`. Its frozen parameters and its buffers are those of all members.
        loss: Returns the mean loss of a batch.
        optimizer_factory: Makes an optimizer that treats each value alone.
        device: Where to train.
        padded: Whether batches of different sizes may be padded.
        linear: Whether they may, all trained parameters are linear layers', and the loss depends on each. Then vmap
            runs the backward pass in fp32; torch advises against one in autocast.
    """

    model: nn.Module
    loss: Loss
    optimizer_factory: OptimizerFactory
    device: torch.device
    padded: bool
    linear: bool = False

    def train(
        self, plan: Plan, members: Sequence[CohortMember], less: Mapping[str, Tensor] | None = None
    ) -> list[Trained | None]:
        """Train clients from their starts.

        Args:
            plan: Of all of them, but for its seed.
            members: The clients.
            less: Is subtracted from the values at the end, float32 on the device; None = nothing.

        Returns:
            Their results, in the order of the members; None for a member whose loss was not finite.

        Raises:
            TrainError: With the reason no_data, if a member has no samples.
            Exception: The model, the loss or the samples may raise anything.
        """
        began = time.perf_counter()
        feeds = _Feeds(members, plan, self.device)
        stack = _Stack(self, [members[place] for place in feeds.order], plan)
        losses, right = (torch.zeros(feeds.sizes.shape, dtype=torch.float64, device=self.device) for _ in range(2))
        classified = False
        self.model.train()
        for step in range(len(feeds.sizes)):
            stack.narrow(feeds.active(step))
            for rows, batch in feeds.batches(step, padded=self.padded):
                found, answers = stack.add_gradients(rows, batch)
                losses[step, rows] = found.double()
                if answers is not None:
                    right[step, rows], classified = answers.double(), True
            stack.step()
        # Figures are those of the last epoch, as in the loop, and weigh each batch by its samples. All of them come
        # from their device at once.
        weights, last = (torch.from_numpy(each).to(self.device) for each in (feeds.sizes * feeds.last, feeds.last))
        sums, counts = (losses * weights).sum(0), (right * last).sum(0)
        figures = torch.stack([sums, counts, losses.isfinite().all(0).double()], 1).tolist()
        values, seconds = stack.values(less), (time.perf_counter() - began) / len(members)
        trained: list[Trained | None] = [None] * len(members)
        for row, (place, (loss, correct, finite)) in enumerate(zip(feeds.order, figures, strict=True)):
            if finite:
                drawn = feeds.drawn[row]
                accuracy = round(correct) / drawn if classified else None
                trained[place] = Trained(
                    values[row], TrainResult(drawn, loss / drawn, accuracy, seconds, feeds.steps[row])
                )
        return trained

    def backward(self, parameters: Mapping[str, Tensor], batch: Batch, plan: Plan) -> tuple[Tensor, Tensor]:
        """Add gradients, and return losses, [clients], and outputs, [clients, batch, ...].

        Args:
            parameters: The clients' values, [clients, ...] each. Those of a linear cohort have no gradients yet.
            batch: A batch of each of them.
            plan: Says the precision.
        """

        def one(own: Mapping[str, Tensor], inputs: Inputs, labels: Tensor, weights: Tensor | None) -> Any:
            args, kwargs = ((), inputs) if isinstance(inputs, dict) else ((inputs,), {})
            outputs = functional_call(self.model, dict(own), args, kwargs)
            if weights is None:
                return self.loss(outputs, labels), outputs
            singles = vmap(lambda output, label: self.loss(output.unsqueeze(0), label.unsqueeze(0)))(outputs, labels)
            return (singles * weights).sum(), outputs

        def for_each(function: Callable[..., Any], own: Mapping[str, Tensor]) -> Any:
            dims = (0, 0, 0, None if batch.weights is None else 0)
            with precision_of(plan, self.device)():
                return vmap(function, in_dims=dims)(dict(own), batch.inputs, batch.labels, batch.weights)

        if self.linear and plan.precision == "fp32":
            values = {name: parameter.detach() for name, parameter in parameters.items()}
            gradients, (losses, outputs) = for_each(grad_and_value(one, has_aux=True), values)
            for name, parameter in parameters.items():
                parameter.grad = gradients[name]
        else:
            losses, outputs = for_each(one, parameters)
            losses.sum().backward()
        return losses.detach(), outputs.detach()


class _Feeds:
    """The batches of several clients, in their order.

    Clients with more steps come first.

    Attributes:
        order: The place of each client among the members.
        drawn: The number of samples that each client draws.
        steps: The number of steps that each client takes.
        sizes: The samples in each step's batches, [steps, clients]; 0 for a client that has no more.
        last: Which of them are of the client's last epoch, [steps, clients].

    Raises:
        TrainError: With the reason no_data, if a member has no samples.
    """

    def __init__(self, members: Sequence[CohortMember], plan: Plan, device: torch.device) -> None:
        sizes = [size_of(member.samples) for member in members]
        drawn = [min(size, plan.subset_size or size) for size in sizes]
        if not all(drawn):
            raise TrainError("no_data", "A client has no samples to train on.")
        batches = [batches_in(size, plan.batch_size) for size in drawn]
        self.order = sorted(range(len(members)), key=lambda place: -batches[place])
        self.drawn = [drawn[place] for place in self.order]
        self.steps = [plan.epochs * batches[place] for place in self.order]
        count, an_epoch = np.array(self.drawn), np.array([batches[place] for place in self.order])
        # As `ends` cuts: each batch has the plan's size, but for the last one of an epoch, which takes what is left.
        epoch, number = np.divmod(np.arange(self.steps[0])[:, None], an_epoch)
        starts = number * plan.batch_size
        stops = np.where(number == an_epoch - 1, count, starts + plan.batch_size)
        self.sizes, self.last = (stops - starts) * (epoch < plan.epochs), epoch == plan.epochs - 1
        # The samples of all clients lie one after the other, each client's epoch by epoch.
        self._starts = plan.epochs * _before(count) + epoch * count + starts
        self._device, chosen = device, [members[place] for place in self.order]
        self._source = _source_of(chosen)
        self._samples = np.empty(0, np.int64)  # the place of each one in the source
        self._own = list[_OwnBatches]()  # the batches of each client, if there is no source
        self._draw(chosen, np.array([sizes[place] for place in self.order]), plan)

    def active(self, step: int) -> int:
        """Return how many clients do a step: they are the first ones."""
        return int(np.count_nonzero(self.sizes[step]))

    def batches(self, step: int, *, padded: bool) -> Iterator[tuple[slice | Tensor, Batch]]:
        """Yield the batches of a step with the rows of their clients.

        Args:
            step: The step.
            padded: Whether batches of different sizes may come together.
        """
        active = self.active(step)
        sizes = self.sizes[step, :active]
        if padded or (sizes == sizes[0]).all():
            yield slice(active), self._batch(np.arange(active), step)
            return
        for size in np.unique(sizes):
            rows = np.flatnonzero(sizes == size)
            yield torch.from_numpy(rows).to(self._device), self._batch(rows, step)

    def _draw(self, members: Sequence[CohortMember], sizes: NDArray[np.int64], plan: Plan) -> None:
        """Let each client draw and order its samples, as the loop does."""
        generator, draws, orders = torch.Generator(), list[Tensor](), list[Tensor]()
        for member, size, count in zip(members, sizes.tolist(), self.drawn, strict=True):
            generator.manual_seed(member.seed)
            draws.append(draw(size, plan.subset_size, generator))
            orders += [torch.randperm(count, generator=generator) for _ in range(plan.epochs)]
        if self._source is None:
            for number, (member, drawn) in enumerate(zip(members, draws, strict=True)):
                epochs = orders[number * plan.epochs : (number + 1) * plan.epochs]
                self._own.append(
                    _OwnBatches(member, [drawn.index_select(0, order) for order in epochs], plan, self._device)
                )
            return
        # Places in an epoch's order become places in what a client has drawn, in its samples, and in those of all.
        views = [member.samples.indices for member in members if isinstance(member.samples, SamplesView)]
        counts = np.array(self.drawn)
        client = np.repeat(np.arange(len(members)), plan.epochs * counts)
        place = torch.cat(draws).numpy()[_before(counts)[client] + torch.cat(orders).numpy()]
        self._samples = torch.cat(views).numpy()[_before(sizes)[client] + place]

    def _batch(self, rows: NDArray[np.int64], step: int) -> Batch:
        """Return a batch of some clients.

        Shorter ones get their first sample once more, which weighs nothing.
        """
        sizes = self.sizes[step, rows][:, None]
        column = np.arange(sizes.max())
        full = column < sizes
        weights = None if full.all() else torch.from_numpy((full / sizes).astype(np.float32)).to(self._device)
        if self._source is None:
            inputs, labels = _stacked([self._own[row].next() for row in rows.tolist()], len(column))
            return Batch(inputs, labels, weights)
        samples = self._samples[self._starts[step, rows][:, None] + np.where(full, column, 0)]
        # One gather for all clients, and one copy to the device.
        taken, labels = self._source.batch(torch.from_numpy(samples.ravel()))
        taken, labels = (each.view(*samples.shape, *each.shape[1:]) for each in (taken, labels))
        return Batch(taken.to(self._device, non_blocking=True), labels.to(self._device, non_blocking=True), weights)


class _OwnBatches:
    """The batches of a client whose samples are its own.

    Args:
        member: The client.
        orders: The places of its samples in each epoch.
        plan: Says the size of a batch.
        device: Where to train.
    """

    def __init__(self, member: CohortMember, orders: Sequence[Tensor], plan: Plan, device: torch.device) -> None:
        cuts = [indices for order in orders for indices in cut(order, plan.batch_size)]
        self._batches = fetch(member.samples, cuts, device)
        # A data set may draw random numbers, which are the same as in the loop.
        self._random = torch.Generator().manual_seed(member.seed).get_state()

    def next(self) -> tuple[Inputs, Tensor]:
        """Return the next batch."""
        before = torch.get_rng_state()
        try:
            torch.set_rng_state(self._random)
            batch = next(self._batches)
            self._random = torch.get_rng_state()
        finally:
            torch.set_rng_state(before)
        return batch


class _Stack:
    """The parameters of several clients, and one optimizer of them all."""

    def __init__(self, cohort: Cohort, members: Sequence[CohortMember], plan: Plan) -> None:
        self._cohort, self._plan, self._count = cohort, plan, len(members)
        starts = [member.start for member in members]
        same = all(start is starts[0] for start in starts)
        self._whole: dict[str, Tensor] = {}
        for name, first in starts[0].items():
            if same:  # A device gets one client's values, and makes the others of them.
                rows = first.to(cohort.device).expand(self._count, *first.shape)
                self._whole[name] = rows.clone(memory_format=torch.contiguous_format)
            else:
                self._whole[name] = torch.stack([start[name] for start in starts]).to(cohort.device)
        self._parameters = {name: nn.Parameter(values) for name, values in self._whole.items()}
        self._start = [values.clone() for values in self._whole.values()] if plan.mu > 0 else []
        # Beside clients that come back with a control variate, newcomers have none, which is as good as zero.
        given = [member.corrections or {} for member in members]
        self._corrections = {
            name: torch.stack([_or_zeros(each.get(name), start) for each in given]).to(cohort.device)
            for name, start in starts[0].items()
            if any(name in each for each in given)
        }
        self._optimizer = cohort.optimizer_factory(list(self._parameters.values()), plan.lr, plan.momentum)

    def narrow(self, count: int) -> None:
        """Let only the first clients train from now on."""
        for parameter in self._parameters.values():
            size = len(parameter)
            if count == size:
                return
            parameter.data = parameter.data[:count]
            state = self._optimizer.state[parameter]
            for key, each in state.items():
                if isinstance(each, Tensor) and each.dim() == parameter.dim() and len(each) == size:
                    state[key] = each[:count]

    def add_gradients(self, rows: slice | Tensor, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """Add the gradients of a batch of some clients.

        Returns their losses, [clients], and their right answers, [clients], or None. Nothing that is returned refers to
        the graph: it would keep the shape that gradients have, and fewer clients may do the next step.
        """
        chosen = {
            name: parameter if isinstance(rows, slice) else parameter.index_select(0, rows)
            for name, parameter in self._parameters.items()
        }
        losses, outputs = self._cohort.backward(chosen, batch, self._plan)
        count, size = batch.labels.shape[:2]
        right = right_answers(outputs.flatten(0, 1), batch.labels.flatten(0, 1))
        if right is None:
            return losses, None
        right = right.view(count, size)
        return losses, (right if batch.weights is None else right * (batch.weights > 0)).sum(1)

    def step(self) -> None:
        """Do a step of the clients that train."""
        parameters = list(self._parameters.values())
        if self._plan.clip_norm > 0:
            _clip(parameters, self._plan.clip_norm)
        count = len(parameters[0])
        if self._plan.mu > 0:
            add_proximal(parameters, [start[:count] for start in self._start], self._plan.mu)
        corrected = [(self._parameters[name], each[:count]) for name, each in self._corrections.items()]
        add_corrections(corrected)
        self._optimizer.step()
        for parameter in parameters:
            parameter.grad = None

    def values(self, less: Mapping[str, Tensor] | None) -> NDArray[np.float32]:
        """Return all clients' values, [clients, parameters]: see Cohort.train.

        They come from their device at once.
        """
        size = sum(values[0].numel() for values in self._whole.values())
        flat, at = torch.empty(self._count, size, dtype=torch.float32, device=self._cohort.device), 0
        for name, values in self._whole.items():
            rows = _rows(values).float()
            place = flat[:, at : at + rows.shape[1]]
            if less is None:
                place.copy_(rows)
            else:
                torch.sub(rows, less[name].flatten(), out=place)
            at += rows.shape[1]
        found: NDArray[np.float32] = flat.cpu().numpy()
        return found


@torch.no_grad()
def _clip(parameters: Sequence[nn.Parameter], most: float) -> None:
    """Bound the norm of each client's gradient, as `clip_grad_norm_` does."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    norms = torch.stack([torch.linalg.vector_norm(_rows(each), dim=1) for each in gradients], 1)
    factors = (most / (torch.linalg.vector_norm(norms, dim=1) + 1e-6)).clamp(max=1.0)
    for each in gradients:
        each.mul_(factors.view(-1, *[1] * (each.dim() - 1)))


def _rows(values: Tensor) -> Tensor:
    """Return the values of each client, [clients, ...], as a row.

    A parameter of no dimensions has one value for each.
    """
    return values.unsqueeze(-1).flatten(1)


def _or_zeros(correction: Tensor | None, values: Tensor) -> Tensor:
    """Return a correction of values, or zeros in their shape."""
    return torch.zeros(values.shape) if correction is None else correction.float()


def _before(counts: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the sum of the counts before each one."""
    return np.cumsum(counts) - counts


def _source_of(members: Sequence[CohortMember]) -> Samples | None:
    """Return the samples that all members have views of, or None."""
    sources = [each.samples.samples if isinstance(each.samples, SamplesView) else None for each in members]
    return sources[0] if all(each is sources[0] for each in sources) else None


def _stacked(batches: Sequence[tuple[Inputs, Tensor]], most: int) -> tuple[Inputs, Tensor]:
    """Return batches of several clients as one, each padded to `most` samples."""
    labels = torch.stack([_padded(labels, most) for _, labels in batches])
    first = batches[0][0]
    if isinstance(first, Tensor):
        return torch.stack([_padded(each, most) for each, _ in batches if isinstance(each, Tensor)]), labels
    named = [each for each, _ in batches if isinstance(each, dict)]
    return {name: torch.stack([_padded(each[name], most) for each in named]) for name in first}, labels


def _padded(rows: Tensor, most: int) -> Tensor:
    """Return rows with the first one repeated at the end."""
    missing = most - rows.shape[0]
    return torch.cat([rows, rows[:1].expand(missing, *rows.shape[1:])]) if missing else rows
