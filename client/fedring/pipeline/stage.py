"""One stage of a model: forwards and backwards of micro-batches, in whatever order a schedule asks for.

BatchNorm normalises each micro-batch by itself, and its running averages take in every micro-batch once, in the order
of the forwards. A recomputed forward repeats its random numbers, and leaves the buffers alone.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedring.pipeline.errors import PipelineError
from fedring.pipeline.stash import WeightStashing

Loss = Callable[[Tensor, Tensor], Tensor]  # the mean over a micro-batch, of the model's output and the targets
Average = Callable[[Sequence[Tensor]], None]  # the gradients, in place, over the replicas of a stage


@dataclass(slots=True, eq=False)
class Flight:
    """A micro-batch between its forward and its backward."""

    inputs: Tensor  # a leaf
    version: int
    weights: Sequence[Tensor]
    target: Tensor | None
    share: float
    random: Tensor | None  # the generator's state, if the forward is to be repeated
    output: Tensor | None = None


class Stage:
    """A part of a model with its optimizer; the last part has the loss."""

    def __init__(
        self,
        module: nn.Module,
        stash: WeightStashing,
        *,
        loss: Loss | None = None,
        recompute: bool = False,
        average: Average | None = None,
    ) -> None:
        self.module, self.stash = module, stash
        self._loss, self._recompute, self._average = loss, recompute, average
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        strangers = sum(id(parameter) not in names for parameter in stash.parameters)
        if strangers:
            raise ValueError(f"{strangers} of the optimizer's parameters are not in the stage's module")
        self._names = [names[id(parameter)] for parameter in stash.parameters]
        self._flights: dict[int, Flight] = {}
        self.most_flying = 0

    @property
    def device(self) -> torch.device:
        """Where the stage computes."""
        return next((parameter.device for parameter in self.module.parameters()), torch.device("cpu"))

    def forward(
        self,
        micro_batch: int,
        inputs: Tensor,
        *,
        version: int | None = None,
        target: Tensor | None = None,
        share: float = 1.0,
    ) -> Tensor:
        """The output for the next stage, or, of the last, `share` times the loss; kept until the backward."""
        if micro_batch in self._flights:
            raise PipelineError(f"micro-batch {micro_batch} has gone forward already")
        leaf = inputs.detach().to(self.device)
        if leaf.is_floating_point():
            leaf = leaf.to(self.stash.compute_dtype or leaf.dtype).requires_grad_(inputs.requires_grad)
        target = None if target is None else target.to(self.device)
        random = torch.get_rng_state() if self._recompute else None
        number = self.stash.version if version is None else version
        flight = Flight(leaf, number, self.stash.weights(number), target, share, random)
        with torch.set_grad_enabled(not self._recompute):
            output = self._call(flight)
        if not self._recompute:
            flight.output = output
        self._flights[micro_batch] = flight
        self.most_flying = max(self.most_flying, len(self._flights))
        return output.detach() / self.stash.loss_scale if self._loss else output.detach()

    def weights_of(self, micro_batch: int) -> Sequence[Tensor]:
        """The weights that the micro-batch's forward used, and that its backward will use."""
        return self._flights[micro_batch].weights

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """The gradient of the inputs, if they require one, from that of the output (None for the last stage).

        The gradients of the weights are added to those of the next update.
        """
        if micro_batch not in self._flights:
            raise PipelineError(f"micro-batch {micro_batch} goes backward without a forward")
        flight = self._flights.pop(micro_batch)
        output = flight.output if flight.output is not None else self._again(flight)
        if gradient is not None:
            gradient = gradient.to(output.device, output.dtype)
            if gradient.shape != output.shape:
                raise PipelineError(f"a gradient {list(gradient.shape)} for an output {list(output.shape)}")
        if not output.requires_grad:
            return None
        differentiable = [flight.inputs] if flight.inputs.requires_grad else []
        wanted = [*flight.weights, *differentiable]
        found = torch.autograd.grad([output], wanted, [gradient], allow_unused=True)
        self.stash.add_gradients(found[: len(flight.weights)])
        return found[-1] if differentiable else None

    def update(self, *, keep: Collection[int] = ()) -> int:
        """The weights' new version; besides it those in `keep` stay, and those of micro-batches on their way."""
        if self._average is not None:
            for parameter in self.stash.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self._average([parameter.grad for parameter in self.stash.parameters if parameter.grad is not None])
        return self.stash.step(keep={*keep, *(flight.version for flight in self._flights.values())})

    def forget(self) -> None:
        """No micro-batch is on its way, and no gradient waits: what a run that failed has left is gone."""
        self._flights.clear()
        self.stash.optimizer.zero_grad()

    def _call(self, flight: Flight, buffers: Mapping[str, Tensor] | None = None) -> Tensor:
        """The output of the micro-batch, or its share of the loss; `buffers` stand in for the module's."""
        tensors = dict(zip(self._names, flight.weights, strict=True)) | dict(buffers or {})
        output: object = functional_call(self.module, tensors, (flight.inputs,))
        if not isinstance(output, Tensor):
            raise PipelineError(f"a stage returned a {type(output).__name__}: between stages there is one tensor")
        if self._loss is None:
            return output
        if flight.target is None:
            raise PipelineError("the last stage needs the targets of the micro-batch")
        exact = output if self.stash.compute_dtype is None else output.float()
        return self._loss(exact, flight.target) * (flight.share * self.stash.loss_scale)

    def _again(self, flight: Flight) -> Tensor:
        """The output, with the forward's random numbers, and with buffers that nobody sees."""
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        with torch.random.fork_rng(devices=[]):
            if flight.random is not None:
                torch.set_rng_state(flight.random)
            return self._call(flight, buffers)
