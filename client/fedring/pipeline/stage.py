"""One stage of a model: forwards and backwards of micro-batches.

They come in any order that a schedule asks for.

A stage's inputs and outputs are tensors by name. A module whose forward has arguments of these names gets the inputs as
keywords, and any other module gets its only input as its only argument. A module returns a dict of tensors, or one
tensor, which is then called `Stage.output`. A module must not change its inputs in place, because other stages may have
the same tensors.

BatchNorm normalises each micro-batch separately, and its running averages use every micro-batch once, in the order of
the forwards. A recomputed forward draws the same random numbers again, on all devices of the stage, begins with the
same values of the buffers that forwards change, and does not change them again.
"""

import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedring.pipeline.errors import PipelineError
from fedring.pipeline.stash import WeightStashing

Loss = Callable[[Tensor, Tensor], Tensor]
"""Takes outputs [batch, ...] and targets [batch, ...] of a micro-batch, and returns its mean loss, a scalar."""

Average = Callable[[Sequence[Tensor]], None]
"""Takes the gradients of a stage, and replaces them, in place, by what all replicas of the stage step with."""

LOSS = "loss"
"""The name of the last stage's only output."""


@dataclass(slots=True, eq=False)
class InFlight:
    """A micro-batch between its forward and its backward."""

    inputs: Mapping[str, Tensor]  # leaves of the autograd graph, [batch, ...] each
    version: int  # of the weights
    weights: Sequence[Tensor]
    target: Tensor | None  # of the last stage
    share: float  # of the loss
    random: Mapping[torch.device, Tensor]  # the generators' states before the forward, if that is recomputed
    buffers: Mapping[str, Tensor] | None = None  # before the forward, if that is recomputed
    outputs: Mapping[str, Tensor] | None = None  # with their graph, unless the forward is recomputed


class Stage:
    """A part of a model with its optimizer.

    The last part has the loss.

    Attributes:
        module: The layers.
        stash: The optimizer, and the versions of the weights.
        output: The name of the output of a module that returns one tensor instead of a dict.
        average: Combines gradients over replicas of the stage before each update; None means that there are none.
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
            loss: The loss, of the last stage only; its module must return one tensor, or a dict of one.
            recompute: Whether to keep inputs instead of activations, and repeat each forward before its backward.
            average: Combines gradients over replicas of the stage before each update.
        """
        self.module, self.stash = module, stash
        self.output = "output"
        self._loss, self._recompute, self.average = loss, recompute, average
        self._first = next(
            module.parameters(), None
        )  # looked for once: a search of all modules takes as long as a layer
        self._arguments = set(inspect.signature(module.forward).parameters)
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        unknown = sum(id(parameter) not in names for parameter in stash.parameters)
        if unknown:
            raise ValueError(f"{unknown} of the optimizer's parameters are not in the stage's module")
        self._names = [names[id(parameter)] for parameter in stash.parameters]
        self._in_flight: dict[int, InFlight] = {}
        self._changing: set[str] = set()  # the buffers that forwards change, if these are recomputed
        self.most_in_flight = 0

    @property
    def device(self) -> torch.device:
        """The device that inputs are moved to, that of the first parameter."""
        return torch.device("cpu") if self._first is None else self._first.device

    def forward(
        self,
        micro_batch: int,
        inputs: Mapping[str, Tensor],
        *,
        version: int | None = None,
        target: Tensor | None = None,
        share: float = 1.0,
    ) -> dict[str, Tensor]:
        """Compute the forward of a micro-batch.

        The tensors for its backward are kept.

        Args:
            micro_batch: Its number within the run.
            inputs: The tensors [batch, ...] by name, of any dtype; backward() returns the gradients of those that
                require one.
            version: The version of the weights to use; None means the newest.
            target: The targets [batch, ...] of the micro-batch, for the last stage only.
            share: The share of the micro-batch's mean loss in the loss of its update, for the last stage only.

        Returns:
            The outputs [batch, ...] by name, for later stages; of the last stage, `share` times the loss, a scalar, as
            LOSS.

        Raises:
            PipelineError: If the micro-batch is in flight already, the module returns anything but tensors, or it
                changes an input in place.
        """
        if micro_batch in self._in_flight:
            raise PipelineError(f"micro-batch {micro_batch} had its forward already, and not its backward")
        leaves = {name: self._leaf(tensor).requires_grad_(tensor.requires_grad) for name, tensor in inputs.items()}
        target = None if target is None else target.to(self.device)
        random = generator_states(self._devices(leaves)) if self._recompute else {}
        number = self.stash.version if version is None else version
        kept = InFlight(leaves, number, self.stash.weights(number), target, share, random)
        if self._recompute:
            # The backward repeats this forward, which must then find the buffers as they were. Only those that a
            # forward changes, as tensor versions tell, are kept.
            before = {name: (buffer, buffer._version, buffer.clone()) for name, buffer in self.module.named_buffers()}
            with torch.no_grad():
                outputs = self._call(kept)
            for name, buffer in self.module.named_buffers():
                if name in before and (before[name][0] is not buffer or before[name][1] != buffer._version):
                    self._changing.add(name)
            kept.buffers = {name: copy for name, (_, _, copy) in before.items() if name in self._changing}
        else:
            outputs = kept.outputs = self._call(kept)
        self._in_flight[micro_batch] = kept
        self.most_in_flight = max(self.most_in_flight, len(self._in_flight))
        scale = self.stash.loss_scale if self._loss else 1.0
        return {name: tensor.detach() / scale if scale != 1 else tensor.detach() for name, tensor in outputs.items()}

    def evaluate(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute a forward in evaluation mode, without graph or loss.

        It uses the newest weights.

        Args:
            inputs: The tensors [batch, ...] by name.

        Returns:
            The outputs of the module [batch, ...] by name, also of the last stage.

        Raises:
            PipelineError: If the module returns anything but tensors, or changes an input in place.
        """
        training = self.module.training
        self.module.eval()
        try:
            with torch.no_grad():
                leaves = {name: self._leaf(tensor) for name, tensor in inputs.items()}
                return self._outputs(self.stash.weights(), leaves)
        finally:
            self.module.train(training)

    def weights_of(self, micro_batch: int) -> Sequence[Tensor]:
        """Return the weights of a micro-batch in flight.

        Its forward used them, and its backward will use them.
        """
        return self._in_flight[micro_batch].weights

    def backward(self, micro_batch: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Compute the backward of a micro-batch.

        The gradients of the weights are added to those of the next update.

        Args:
            micro_batch: Its number within the run.
            gradients: The gradients of the outputs, each of its output's shape; an output that no later stage uses has
                none. Empty for the last stage.

        Returns:
            The gradients [batch, ...] of the inputs that require one and that the given outputs depend on, by name.

        Raises:
            PipelineError: If the micro-batch is not in flight, there is no such output, or a gradient has another shape
                than its output.
        """
        if micro_batch not in self._in_flight:
            raise PipelineError(f"micro-batch {micro_batch} cannot have a backward before its forward")
        kept = self._in_flight.pop(micro_batch)
        outputs = kept.outputs if kept.outputs is not None else self._recomputed(kept)
        given = {LOSS: None} if self._loss else {name: _fitted(g, name, outputs) for name, g in gradients.items()}
        roots = [name for name in given if outputs[name].requires_grad]
        if not roots:
            return {}
        differentiable = {name: leaf for name, leaf in kept.inputs.items() if leaf.requires_grad}
        # The stash takes each gradient of a weight as soon as it is complete, so that only one is there twice.
        torch.autograd.backward(
            [outputs[name] for name in roots],
            [given[name] for name in roots],
            inputs=[*filter(_has_gradient, kept.weights), *differentiable.values()],
        )
        return {name: leaf.grad for name, leaf in differentiable.items() if leaf.grad is not None}

    def update(self, *, keep: Collection[int] = ()) -> int:
        """Step the optimizer, and return the version of the new weights.

        Args:
            keep: Older versions that stay, besides those of micro-batches in flight.
        """
        if self.average is not None:
            for parameter in self.stash.parameters:
                if parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
            self.average([parameter.grad for parameter in self.stash.parameters if parameter.grad is not None])
            for parameter in self.stash.parameters:
                if not parameter.requires_grad:  # the optimizer must leave it as it is, also one with weight decay
                    parameter.grad = None
        return self.stash.step(keep={*keep, *(kept.version for kept in self._in_flight.values())})

    def forget(self) -> None:
        """Drop all micro-batches in flight and all gradients.

        To be called after a run that failed.
        """
        self._in_flight.clear()
        self.stash.optimizer.zero_grad()

    def _leaf(self, tensor: Tensor) -> Tensor:
        """Return the tensor on the stage's device, without a graph.

        A floating one is in the dtype that the stage computes in.
        """
        leaf = tensor.detach().to(self.device)
        return leaf.to(self.stash.compute_dtype or leaf.dtype) if leaf.is_floating_point() else leaf

    def _devices(self, inputs: Mapping[str, Tensor]) -> set[torch.device]:
        """Return the devices on which the stage has tensors."""
        tensors = (*inputs.values(), *self.module.parameters(), *self.module.buffers())
        return {tensor.device for tensor in tensors}

    def _call(self, kept: InFlight, buffers: Mapping[str, Tensor] | None = None) -> Mapping[str, Tensor]:
        """Return the outputs of a micro-batch, or its scaled loss.

        `buffers` replace the module's.
        """
        outputs = self._outputs(kept.weights, kept.inputs, buffers)
        if self._loss is None:
            return outputs
        if kept.target is None:
            raise PipelineError("the last stage needs the targets of each micro-batch: pass target to forward()")
        if len(outputs) != 1:
            raise PipelineError(
                f"the last stage returned {', '.join(outputs)}: it must return one tensor, for the loss"
            )
        (output,) = outputs.values()
        exact = output if self.stash.compute_dtype is None else output.float()
        # A loss without weight may be no number, such as the mean over no tokens, and must not reach the gradients.
        loss = self._loss(exact, kept.target) if kept.share else exact.reshape(-1)[:0].sum()
        return {LOSS: loss * (kept.share * self.stash.loss_scale)}

    def _outputs(
        self, weights: Sequence[Tensor], inputs: Mapping[str, Tensor], buffers: Mapping[str, Tensor] | None = None
    ) -> dict[str, Tensor]:
        named = inputs.keys() <= self._arguments
        if not named and len(inputs) != 1:
            raise PipelineError(
                f"the forward of {type(self.module).__name__} must have the arguments {', '.join(sorted(inputs))}"
            )
        changes = [tensor._version for tensor in inputs.values()]  # how often autograd saw it changed
        positional, keywords = (() if named else tuple(inputs.values())), (dict(inputs) if named else {})
        output: object
        if self.stash.is_plain and buffers is None:  # the module has these weights
            output = self.module(*positional, **keywords)
        else:
            tensors = dict(zip(self._names, weights, strict=True)) | dict(buffers or {})
            output = functional_call(self.module, tensors, positional, keywords)
        for (name, tensor), before in zip(inputs.items(), changes, strict=True):
            if tensor._version != before:
                raise PipelineError(f"the stage changed its input {name!r} in place: use operations that return copies")
        outputs = {self.output: output} if isinstance(output, Tensor) else output
        if not isinstance(outputs, dict):
            raise PipelineError(
                f"a stage returned a {type(output).__name__}: it must return a tensor or a dict of them"
            )
        for name, tensor in outputs.items():
            if not isinstance(tensor, Tensor):
                raise PipelineError(f"a stage returned a {type(tensor).__name__} as {name!r}: only tensors can be sent")
        return outputs

    def _recomputed(self, kept: InFlight) -> Mapping[str, Tensor]:
        """Repeat a forward with the same random numbers and buffers.

        The buffers are copies, as they were before the forward.
        """
        now = {name: buffer.clone() for name, buffer in self.module.named_buffers() if name not in self._changing}
        buffers = {**now, **(kept.buffers or {})}
        with repeating(kept.random):
            return self._call(kept, buffers)


def generator_states(devices: Iterable[torch.device]) -> dict[torch.device, Tensor]:
    """Return the states of the default generators.

    They are those of the CPU and of these devices.
    """
    states = {torch.device("cpu"): torch.get_rng_state()}
    for device in devices:
        if device.type not in ("cpu", "meta"):
            states[device] = torch.get_device_module(device).get_rng_state(device)
    return states


@contextmanager
def repeating(states: Mapping[torch.device, Tensor]) -> Iterator[None]:
    """Set the default generators to these states inside the context.

    Afterwards their present states are restored.
    """
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[]))
        for device, state in states.items():
            if device.type == "cpu":
                torch.set_rng_state(state)
            else:
                stack.enter_context(torch.random.fork_rng([device], device_type=device.type))
                torch.get_device_module(device).set_rng_state(state, device)
        yield


def _has_gradient(weight: Tensor) -> bool:
    return weight.requires_grad  # unless it was frozen since the stage was made


def _fitted(gradient: Tensor, name: str, outputs: Mapping[str, Tensor]) -> Tensor:
    """Return the gradient on its output's device, in its dtype."""
    if name not in outputs:
        raise PipelineError(f"there is a gradient for {name!r}, but the stage made {', '.join(outputs)}")
    output = outputs[name]
    if gradient.shape != output.shape:
        raise PipelineError(
            f"the gradient of {name!r} has the shape {list(gradient.shape)}, but the output has {list(output.shape)}"
        )
    return gradient.to(output.device, output.dtype)
