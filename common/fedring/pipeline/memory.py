"""How much the stages of a model keep: parameters, optimizer state, and activations at their peak, in bytes."""

import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fedring.pipeline.schedules import Schedule
from fedring.pipeline.simulation import check
from fedring.pipeline.stage import Loss, Stage
from fedring.pipeline.stash import WeightStashing
from fedring.pipeline.worker import LocalPipeline


class Kept(NamedTuple):
    """The bytes of one stage in a step; `in_flight` micro-batches are kept at the most."""

    parameters: int
    optimizer: int
    activations: int
    in_flight: int


class Saved:
    """A tensor that autograd keeps until its backward."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Measured(Stage):
    """A stage that knows the bytes of what its micro-batches keep, the weights apart."""

    def __init__(self, module: nn.Module, stash: WeightStashing, *, loss: Loss | None, recompute: bool) -> None:
        super().__init__(module, stash, loss=loss, recompute=recompute)
        self.peak = 0
        self._sizes: Counter[int] = Counter()  # bytes, by their address
        self._uses: Counter[int] = Counter()
        self._inputs: dict[int, Saved] = {}

    def forward(
        self,
        micro_batch: int,
        inputs: Tensor,
        *,
        version: int | None = None,
        target: Tensor | None = None,
        share: float = 1.0,
    ) -> Tensor:
        """What Stage.forward does; its inputs are kept, too, whether or not autograd asks for them."""
        with saved_tensors_hooks(self._pack, _unpack):
            output = super().forward(micro_batch, inputs, version=version, target=target, share=share)
        self._inputs[micro_batch] = Saved(self._flights[micro_batch].inputs)
        self._keep(self._inputs[micro_batch])
        return output

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """What Stage.backward does; a repeated forward is measured, too."""
        with saved_tensors_hooks(self._pack, _unpack):
            result = super().backward(micro_batch, gradient)
        del self._inputs[micro_batch]
        return result

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        weights = {w.untyped_storage().data_ptr() for n in self.stash.versions for w in self.stash.weights(n)}
        if tensor.untyped_storage().data_ptr() not in weights:
            self._keep(saved)
        return saved

    def _keep(self, saved: Saved) -> None:
        """The tensor's bytes count, once, for as long as one of those that saved them lives."""
        place = saved.tensor.data_ptr()
        nbytes = min(saved.tensor.nbytes, saved.tensor.untyped_storage().nbytes())  # a broadcast one has fewer
        self._sizes[place] = max(self._sizes[place], nbytes)
        self._uses[place] += 1
        self.peak = max(self.peak, self._sizes.total())
        weakref.finalize(saved, self._release, place)

    def _release(self, place: int) -> None:
        self._uses[place] -= 1
        if not self._uses[place]:
            del self._uses[place], self._sizes[place]


def measure(
    modules: Sequence[nn.Module],
    schedule: Schedule,
    batch: tuple[Tensor, Tensor],
    *,
    loss: Loss,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.Adam,
    recompute: bool = False,
) -> list[Kept]:
    """What each stage keeps in a step of the schedule on the batch, which is cut into its micro-batches."""
    needs, last = check(schedule), len(modules) - 1
    stages = [
        Measured(
            module,
            WeightStashing(optimizer(module.parameters()), bound=need.versions),
            loss=loss if number == last else None,
            recompute=recompute,
        )
        for number, (module, need) in enumerate(zip(modules, needs, strict=True))
    ]
    inputs, targets = (tensor.tensor_split(schedule.micro_batches) for tensor in batch)
    LocalPipeline(stages, schedule).run(inputs, targets)
    return [_kept(stage) for stage in stages]


def _kept(stage: Measured) -> Kept:
    states = stage.stash.optimizer.state.values()
    entries = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    parameters = sum(parameter.nbytes for parameter in stage.module.parameters())
    return Kept(parameters, sum(entry.nbytes for entry in entries), stage.peak, stage.most_flying)


def _unpack(saved: Saved) -> Tensor:
    return saved.tensor
