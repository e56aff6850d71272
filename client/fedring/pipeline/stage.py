"""One stage of a model: forwards and backwards of micro-batches, in any order that a schedule asks for.

BatchNorm normalises each micro-batch separately, and its running averages use every micro-batch once, in the order of
the forwards. A recomputed forward draws the same random numbers again, and does not change the buffers.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedring.pipeline.errors import PipelineError
from fedring.pipeline.stash import WeightStashing

Loss = Callable[[Tensor, Tensor], Tensor]
"""Takes outputs [batch, ...] and targets [batch, ...] of a micro-batch, and returns its mean loss, a scalar."""

Average = Callable[[Sequence[Tensor]], None]
"""Takes the gradients of a stage, and replaces them, in place, by their means over the stage's replicas."""


@dataclass(slots=True, eq=False)
class InFlight:
    """A micro-batch between its forward and its backward."""

    inputs: Tensor  # a leaf of the autograd graph, [batch, ...]
    version: int  # of the weights
    weights: Sequence[Tensor]
    target: Tensor | None  # of the last stage
    share: float  # of the loss
    random: Tensor | None  # the generator's state before the forward, if that is recomputed
    output: Tensor | None = None  # with its graph, unless the forward is recomputed


class Stage:
    """A part of a model with its optimizer. The last part has the loss.

    Attributes:
        module: The layers.
        stash: The optimizer, and the versions of the weights.
        most_in_flight: The largest number of micro-batches that were in flight at a time.
    """

    def __init__(
        self,
        module: nn.Module,
        stash: WeightStashing,
        *,
        loss: Loss | None = None,
        recompute: bool = False,
        average: Average | None = None,
    ) -> None:
        """Make a stage.

        Args:
            module: The layers.
            stash: Has the optimizer, whose parameters must be parameters of the module.
            loss: The loss, of the last stage only.
            recompute: Whether to keep inputs instead of activations, and repeat each forward before its backward.
            average: Averages gradients over replicas of the stage before each update.
        """
        self.module, self.stash = module, stash
        self._loss, self._recompute, self._average = loss, recompute, average
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        unknown = sum(id(parameter) not in names for parameter in stash.parameters)
        if unknown:
            raise ValueError(f"{unknown} of the optimizer's parameters are not in the stage's module")
        self._names = [names[id(parameter)] for parameter in stash.parameters]
        self._in_flight: dict[int, InFlight] = {}
        self.most_in_flight = 0

    @property
    def device(self) -> torch.device:
        """The device that the stage computes on."""
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
        """Compute the forward of a micro-batch, and keep what its backward needs.

        Args:
            micro_batch: Its number within the run.
            inputs: [batch, ...]; the stage before it needs their gradient if they require one.
            version: The version of the weights to use; None means the newest.
            target: The targets [batch, ...] of the micro-batch, for the last stage only.
            share: The share of the micro-batch's mean loss in the loss of its update, for the last stage only.

        Returns:
            The output [batch, ...] for the next stage; for the last stage, `share` times the loss, a scalar.

        Raises:
            PipelineError: If the micro-batch is in flight already, or the module does not return one tensor.
        """
        if micro_batch in self._in_flight:
            raise PipelineError(f"micro-batch {micro_batch} had its forward already, and not its backward")
        leaf = inputs.detach().to(self.device)
        if leaf.is_floating_point():
            leaf = leaf.to(self.stash.compute_dtype or leaf.dtype).requires_grad_(inputs.requires_grad)
        target = None if target is None else target.to(self.device)
        random = torch.get_rng_state() if self._recompute else None
        number = self.stash.version if version is None else version
        kept = InFlight(leaf, number, self.stash.weights(number), target, share, random)
        with torch.set_grad_enabled(not self._recompute):
            output = self._call(kept)
        if not self._recompute:
            kept.output = output
        self._in_flight[micro_batch] = kept
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        return output.detach() / self.stash.loss_scale if self._loss else output.detach()

    def weights_of(self, micro_batch: int) -> Sequence[Tensor]:
        """Return the weights that the micro-batch's forward used, and that its backward will use."""
        return self._in_flight[micro_batch].weights

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """Compute the backward of a micro-batch, and add the gradients of the weights to those of the next update.

        Args:
            micro_batch: Its number within the run.
            gradient: The gradient of the output, of its shape; None for the last stage.

        Returns:
            The gradient of the inputs [batch, ...], or None if they do not require one.

        Raises:
            PipelineError: If the micro-batch is not in flight, or the gradient has another shape than the output.
        """
        if micro_batch not in self._in_flight:
            raise PipelineError(f"micro-batch {micro_batch} cannot have a backward before its forward")
        kept = self._in_flight.pop(micro_batch)
        output = kept.output if kept.output is not None else self._recomputed(kept)
        if gradient is not None:
            gradient = gradient.to(output.device, output.dtype)
            if gradient.shape != output.shape:
                raise PipelineError(
                    f"the gradient has the shape {list(gradient.shape)}, but the output has {list(output.shape)}"
                )
        if not output.requires_grad:
            return None
        differentiable = [kept.inputs] if kept.inputs.requires_grad else []
        wanted = [*kept.weights, *differentiable]
        found = torch.autograd.grad([output], wanted, [gradient], allow_unused=True)
        self.stash.add_gradients(found[: len(kept.weights)])
        return found[-1] if differentiable else None

    def evaluate(self, inputs: Tensor) -> Tensor:
        """Compute a forward with the newest weights in evaluation mode, without a graph and without a loss.

        Args:
            inputs: [batch, ...].

        Returns:
            The output of the module [batch, ...].

        Raises:
            PipelineError: If the module does not return one tensor.
        """
        given = inputs.to(self.device)
        if given.is_floating_point():
            given = given.to(self.stash.compute_dtype or given.dtype)
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                return self._output(self.stash.weights(), given)
        finally:
            self.module.train(training)

    def update(self, *, keep: Collection[int] = ()) -> int:
        """Step the optimizer, and return the version of the new weights.

        Args:
            keep: Older versions that stay, besides those of micro-batches in flight.
        """
        if self._average is not None:
            for parameter in self.stash.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self._average([parameter.grad for parameter in self.stash.parameters if parameter.grad is not None])
        return self.stash.step(keep={*keep, *(kept.version for kept in self._in_flight.values())})

    def forget(self) -> None:
        """Drop all micro-batches in flight and all gradients, after a run that failed."""
        self._in_flight.clear()
        self.stash.optimizer.zero_grad()

    def _call(self, kept: InFlight, buffers: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the output of the micro-batch, or its scaled share of the loss; `buffers` replace the module's."""
        output = self._output(kept.weights, kept.inputs, buffers)
        if self._loss is None:
            return output
        if kept.target is None:
            raise PipelineError("the last stage needs the targets of each micro-batch: pass target to forward()")
        exact = output if self.stash.compute_dtype is None else output.float()
        return self._loss(exact, kept.target) * (kept.share * self.stash.loss_scale)

    def _output(self, weights: Sequence[Tensor], inputs: Tensor, buffers: Mapping[str, Tensor] | None = None) -> Tensor:
        tensors = dict(zip(self._names, weights, strict=True)) | dict(buffers or {})
        output: object = functional_call(self.module, tensors, (inputs,))
        if not isinstance(output, Tensor):
            raise PipelineError(f"a stage returned a {type(output).__name__}: it must return one tensor")
        return output

    def _recomputed(self, kept: InFlight) -> Tensor:
        """Repeat a forward, with the same random numbers and with copies of the buffers."""
        buffers = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        with torch.random.fork_rng(devices=[]):
            if kept.random is not None:
                torch.set_rng_state(kept.random)
            return self._call(kept, buffers)
