"""The training of several clients at once, as one batched computation.

Each trained parameter of the model becomes one tensor for all clients, [clients, ...]. `torch.func.vmap` runs the
forward pass over the clients, one backward pass of the sum of their losses gives the gradients of all of them, and the
job's own optimizer steps the stacked tensors, which is right for optimizers that treat each value alone.

The law: each client ends where `fedring.train.loop.train` would have brought it, but for the rounding of float32. It
draws and orders its samples by the same seed. Batches of different sizes are padded, and what is padded weighs nothing;
a model or a loss that looks at several samples at once gets no padding, and its batches are computed size by size.
Clients with more steps come first, so that those that still train are the first rows of each tensor.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.utils.data import Dataset

from fedring.data import Samples
from fedring.data.samples import SamplesView
from fedring.train.batches import Inputs, draw, ends, fetch, size_of
from fedring.train.errors import TrainError
from fedring.train.loop import Loss, OptimizerFactory, add_corrections, add_proximal, precision_of
from fedring.train.plan import Plan, TrainResult
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

    values: NDArray[np.float32]  # of the trained parameters, one after the other; the caller may overwrite them
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
    """

    model: nn.Module
    loss: Loss
    optimizer_factory: OptimizerFactory
    device: torch.device
    padded: bool

    def train(self, plan: Plan, members: Sequence[CohortMember]) -> list[Trained | None]:
        """Train clients from their starts.

        Args:
            plan: Of all of them, but for its seed.
            members: The clients.

        Returns:
            Their results, in the order of the members; None for a member whose loss was not finite.

        Raises:
            TrainError: With the reason no_data, if a member has no samples.
            Exception: The model, the loss or the samples may raise anything.
        """
        began = time.perf_counter()
        unsorted = [_Feed(member, plan, self.device) for member in members]
        order = sorted(range(len(members)), key=lambda index: -unsorted[index].steps)
        feeds = [unsorted[index] for index in order]
        stack, most = _Stack(self, [members[index] for index in order], plan), feeds[0].steps
        losses, right = (torch.zeros(most, len(feeds), dtype=torch.float64, device=self.device) for _ in range(2))
        classified = False
        self.model.train()
        for step in range(most):
            active = [feed for feed in feeds if feed.steps > step]
            stack.narrow(len(active))
            for rows, batch in self._batches(active, step):
                found, answers = stack.add_gradients(rows, batch)
                losses[step, rows] = found.detach().double()
                if answers is not None:
                    right[step, rows], classified = answers.double(), True
            stack.step()
        # Figures are those of the last epoch, as in the loop, and weigh each batch by its samples.
        sizes = torch.tensor([[feed.size(step) for feed in feeds] for step in range(most)], device=self.device)
        last = torch.tensor([[feed.is_last(step) for feed in feeds] for step in range(most)], device=self.device)
        sums, counts = (losses * sizes).where(last, 0).sum(0).tolist(), right.where(last, 0).sum(0).tolist()
        finite, values = losses.isfinite().all(0).tolist(), stack.values()
        seconds = (time.perf_counter() - began) / len(members)
        trained: list[Trained | None] = [None] * len(members)
        for row, index in enumerate(order):
            feed = feeds[row]
            if finite[row]:
                accuracy = round(counts[row]) / feed.drawn if classified else None
                result = TrainResult(feed.drawn, sums[row] / feed.drawn, accuracy, seconds, feed.steps)
                trained[index] = Trained(values[row], result)
        return trained

    def losses(self, parameters: Mapping[str, Tensor], batch: Batch, plan: Plan) -> tuple[Tensor, Tensor]:
        """Return each client's loss, [clients], and its outputs, [clients, batch, ...].

        Args:
            parameters: The clients' values, [clients, ...] each.
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

        dims = (0, 0, 0, None if batch.weights is None else 0)
        with precision_of(plan, self.device)():
            found: tuple[Tensor, Tensor] = vmap(one, in_dims=dims)(
                dict(parameters), batch.inputs, batch.labels, batch.weights
            )
        return found

    def _batches(self, feeds: Sequence["_Feed"], step: int) -> Iterator[tuple[slice | Tensor, Batch]]:
        """Yield the batches of a step with the rows of their clients."""
        sizes = [feed.size(step) for feed in feeds]
        if self.padded or len({*sizes}) == 1:
            yield slice(len(feeds)), _together(feeds, step, self.device)
            return
        for size in sorted({*sizes}):
            rows = [row for row, each in enumerate(sizes) if each == size]
            yield torch.tensor(rows, device=self.device), _together([feeds[row] for row in rows], step, self.device)


class _Feed:
    """The batches of one client, in their order."""

    def __init__(self, member: CohortMember, plan: Plan, device: torch.device) -> None:
        samples, generator = member.samples, torch.Generator().manual_seed(member.seed)
        drawn = draw(size_of(samples), plan.subset_size, generator)
        if (size := drawn.shape[0]) == 0:
            raise TrainError("no_data", "A client has no samples to train on.")
        self.drawn = size
        self.source: Samples | None = None  # has all clients' samples, if those of this one are a view
        if isinstance(samples, SamplesView):
            self.source, drawn = samples.samples, samples.indices.index_select(0, drawn)
        self._ends = ends(size, plan.batch_size)
        orders = [drawn.index_select(0, torch.randperm(size, generator=generator)) for _ in range(plan.epochs)]
        self._orders, self.steps = orders, len(self._ends) * plan.epochs
        if self.source is None:
            batches = (self.indices(step) for step in range(self.steps))
            self._batches = fetch(samples, list(batches), device)
            # A data set may draw random numbers, which are the same as in the loop.
            self._random = torch.Generator().manual_seed(member.seed).get_state()

    def size(self, step: int) -> int:
        """Return the size of a batch; 0 after the last one."""
        if step >= self.steps:
            return 0
        start, end = self._span(step)
        return end - start

    def indices(self, step: int) -> Tensor:
        """Return the places of a batch's samples, [batch] int64."""
        start, end = self._span(step)
        order = self._orders[step // len(self._ends)]
        return order if end - start == self.drawn else order[start:end]

    def is_last(self, step: int) -> bool:
        """Return whether a step is one of the last epoch's."""
        return self.steps - len(self._ends) <= step < self.steps

    def next(self) -> tuple[dict[str, Tensor] | Tensor, Tensor]:
        """Return the next batch of a client whose samples are no view."""
        before = torch.get_rng_state()
        try:
            torch.set_rng_state(self._random)
            batch = next(self._batches)
            self._random = torch.get_rng_state()
        finally:
            torch.set_rng_state(before)
        return batch

    def _span(self, step: int) -> tuple[int, int]:
        """Return where a batch begins and ends in its epoch."""
        place = step % len(self._ends)
        return self._ends[place - 1] if place else 0, self._ends[place]


class _Stack:
    """The parameters of several clients, and one optimizer of them all."""

    def __init__(self, cohort: Cohort, members: Sequence[CohortMember], plan: Plan) -> None:
        self._cohort, self._plan, count = cohort, plan, len(members)
        starts = [member.start for member in members]
        same = all(start is starts[0] for start in starts)
        self._whole: dict[str, Tensor] = {}
        for name, first in starts[0].items():
            rows = first.expand(count, *first.shape) if same else torch.stack([start[name] for start in starts])
            self._whole[name] = rows.to(cohort.device, copy=True, memory_format=torch.contiguous_format)
        self._parameters = {name: nn.Parameter(values) for name, values in self._whole.items()}
        self._start = [values.clone() for values in self._whole.values()] if plan.mu > 0 else []
        self._corrections = {
            name: torch.stack([(member.corrections or {})[name] for member in members]).to(cohort.device)
            for name in self._whole
            if name in (members[0].corrections or {})
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

        Returns their losses, [clients], and their right answers, [clients], or None.
        """
        chosen = {
            name: parameter if isinstance(rows, slice) else parameter.index_select(0, rows)
            for name, parameter in self._parameters.items()
        }
        losses, outputs = self._cohort.losses(chosen, batch, self._plan)
        losses.sum().backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        count, size = batch.labels.shape[:2]
        right = right_answers(outputs.detach().flatten(0, 1), batch.labels.flatten(0, 1))
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

    def values(self) -> NDArray[np.float32]:
        """Return all clients' values, [clients, parameters]."""
        flat: NDArray[np.float32] = (
            torch.cat([each.flatten(1).float() for each in self._whole.values()], 1).cpu().numpy()
        )
        return flat


@torch.no_grad()
def _clip(parameters: Sequence[nn.Parameter], most: float) -> None:
    """Bound the norm of each client's gradient, as `clip_grad_norm_` does."""
    gradients = [each.grad for each in parameters if each.grad is not None]
    norms = torch.stack([torch.linalg.vector_norm(each.flatten(1), dim=1) for each in gradients], 1)
    factors = (most / (torch.linalg.vector_norm(norms, dim=1) + 1e-6)).clamp(max=1.0)
    for each in gradients:
        each.mul_(factors.view(-1, *[1] * (each.dim() - 1)))


def _together(feeds: Sequence[_Feed], step: int, device: torch.device) -> Batch:
    """Return the batches of several clients, all of one size."""
    sizes = [feed.size(step) for feed in feeds]
    most, source = max(sizes), feeds[0].source
    weights = None
    if min(sizes) < most:
        counts = torch.tensor(sizes)
        weights = ((torch.arange(most) < counts[:, None]) / counts[:, None]).to(device)
    if source is not None and all(feed.source is source for feed in feeds):
        indices = torch.cat([_padded(feed.indices(step), most) for feed in feeds])
        taken, labels = source.batch(indices)
        shape = (len(feeds), most)
        inputs = taken.view(*shape, *taken.shape[1:]).to(device, non_blocking=True)
        return Batch(inputs, labels.view(*shape, *labels.shape[1:]).to(device, non_blocking=True), weights)
    found = [
        (_padded_inputs(inputs, most), _padded(labels, most)) for inputs, labels in (each.next() for each in feeds)
    ]
    first = found[0][0]
    stacked: Inputs
    if isinstance(first, dict):
        stacked = {name: torch.stack([each[name] for each, _ in found if isinstance(each, dict)]) for name in first}
    else:
        stacked = torch.stack([each for each, _ in found if isinstance(each, Tensor)])
    return Batch(stacked, torch.stack([labels for _, labels in found]), weights)


def _padded(rows: Tensor, most: int) -> Tensor:
    """Return rows with the first one repeated at the end."""
    missing = most - rows.shape[0]
    return torch.cat([rows, rows[:1].expand(missing, *rows.shape[1:])]) if missing else rows


def _padded_inputs(inputs: Inputs, most: int) -> Inputs:
    if isinstance(inputs, dict):
        return {name: _padded(rows, most) for name, rows in inputs.items()}
    return _padded(inputs, most)
