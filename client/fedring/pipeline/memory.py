"""The memory of stages, in bytes.

It consists of parameters and their older versions, optimizer state, and activations.
"""

import copy
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fedring.pipeline.stage import Loss, Stage
from fedring.pipeline.stash import WeightStashing
from fedring.pipeline.worker import LocalPipeline
from fedring.schedules.routes import Routes
from fedring.schedules.schedule import Schedule
from fedring.schedules.simulation import check


class Kept(NamedTuple):
    """The most that one worker's stages keep in a run, in bytes."""

    parameters: int
    stashed: int  # older versions of the parameters
    optimizer: int  # state of the optimizer
    activations: int
    in_flight: int  # micro-batches, not bytes: the most that were between a forward and its backward


class Saved:
    """A handle for a tensor that autograd keeps for the backward.

    Its end shows that the tensor is released.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class MemoryMeter:
    """The bytes that the micro-batches in a worker's stages keep, without weights.

    Attributes:
        peak: The most bytes at a time.
        most_in_flight: The most micro-batches at a time.
        inputs: The inputs of the micro-batches in flight, by the id of the stage and the micro-batch.
    """

    def __init__(self) -> None:
        self.peak = self.most_in_flight = 0
        self.inputs: dict[tuple[int, int], list[Saved]] = {}
        self._sizes: Counter[int] = Counter()  # bytes, by the address of the memory
        self._uses: Counter[int] = Counter()  # handles, by the address of the memory

    def keep(self, saved: Saved) -> None:
        """Count the tensor's bytes as long as a handle of it exists.

        Several handles of one memory count once.
        """
        place = saved.tensor.data_ptr()
        nbytes = min(saved.tensor.nbytes, saved.tensor.untyped_storage().nbytes())  # the latter is less if expanded
        self._sizes[place] = max(self._sizes[place], nbytes)
        self._uses[place] += 1
        self.peak = max(self.peak, self._sizes.total())
        self.most_in_flight = max(self.most_in_flight, len(self.inputs))
        weakref.finalize(saved, self._release, place)

    def _release(self, place: int) -> None:
        self._uses[place] -= 1
        if not self._uses[place]:
            del self._uses[place], self._sizes[place]


class MeasuredStage(Stage):
    """A stage that measures its activations and stashed weights.

    It enters the tensors of its micro-batches with its worker's meter.

    Attributes:
        stashed: The most bytes that older versions of the weights took.
    """

    def __init__(
        self, module: nn.Module, stash: WeightStashing, meter: MemoryMeter, *, loss: Loss | None, recompute: bool
    ) -> None:
        super().__init__(module, stash, loss=loss, recompute=recompute)
        self.stashed = 0
        self._meter = meter

    def forward(
        self,
        micro_batch: int,
        inputs: Mapping[str, Tensor],
        *,
        version: int | None = None,
        target: Tensor | None = None,
        share: float = 1.0,
    ) -> dict[str, Tensor]:
        """See Stage.forward; inputs count even if autograd saves none."""
        with saved_tensors_hooks(self._pack, _unpack):
            outputs = super().forward(micro_batch, inputs, version=version, target=target, share=share)
        saved = [Saved(leaf) for leaf in self._in_flight[micro_batch].inputs.values()]
        self._meter.inputs[id(self), micro_batch] = saved
        for one in saved:
            self._meter.keep(one)
        return outputs

    def backward(self, micro_batch: int, gradients: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """See Stage.backward; a recomputed forward is measured, too."""
        with saved_tensors_hooks(self._pack, _unpack):
            result = super().backward(micro_batch, gradients)
        del self._meter.inputs[id(self), micro_batch]
        return result

    def update(self, *, keep: Collection[int] = ()) -> int:
        """See Stage.update; afterwards, measure the stashed versions.

        There are as many versions as ever then.
        """
        version = super().update(keep=keep)
        sizes = {w.data_ptr(): w.nbytes for w in self._weights()}
        self.stashed = max(self.stashed, sum(sizes.values()) - sum(w.nbytes for w in self.stash.weights()))
        return version

    def _weights(self) -> list[Tensor]:
        """Return the weights of all versions."""
        return [weight for number in self.stash.versions for weight in self.stash.weights(number)]

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        if tensor.untyped_storage().data_ptr() not in {w.untyped_storage().data_ptr() for w in self._weights()}:
            self._meter.keep(saved)
        return saved


def measure(
    modules: Sequence[nn.Module],
    schedule: Schedule,
    batch: tuple[Tensor | Mapping[str, Tensor], Tensor],
    *,
    loss: Loss,
    routes: Routes | None = None,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.Adam,
    recompute: bool = False,
) -> list[Kept]:
    """Run a schedule in one process, and measure each worker's memory.

    Args:
        modules: The stages, in order.
        schedule: The schedule to run once.
        batch: Inputs [batch, ...], several of them by name, and targets [batch, ...], which are cut into the schedule's
            micro-batches.
        loss: Returns the mean loss of a micro-batch.
        routes: Which stage uses which tensors of which other one; None means a chain.
        optimizer: Makes the optimizer of a stage.
        recompute: Whether stages keep inputs instead of activations.

    Returns:
        The most that each worker keeps.
    """
    needs, last = check(schedule, routes=routes), len(modules) - 1
    meters = [MemoryMeter() for _ in schedule.workers]
    places = [(number, worker) for number in range(schedule.stages) for worker in schedule.owners(number)]
    copies = [modules[number] if worker == schedule.owners(number)[0] else copy.deepcopy(modules[number])
              for number, worker in places]  # fmt: skip
    stages = [
        MeasuredStage(
            module,
            WeightStashing(optimizer(module.parameters()), bound=needs[number].versions),
            meters[worker],
            loss=loss if number == last else None,
            recompute=recompute,
        )
        for module, (number, worker) in zip(copies, places, strict=True)
    ]
    named = batch[0] if isinstance(batch[0], Mapping) else {"inputs": batch[0]}
    inputs = {name: tensor.tensor_split(schedule.micro_batches) for name, tensor in named.items()}
    targets = batch[1].tensor_split(schedule.micro_batches)
    LocalPipeline(stages, schedule, routes=routes).run(inputs, targets)
    owned = [[stage for stage, (_, owner) in zip(stages, places, strict=True) if owner == worker]
             for worker in range(len(meters))]  # fmt: skip
    return [_kept(mine, meter) for mine, meter in zip(owned, meters, strict=True)]


def _kept(stages: Sequence[MeasuredStage], meter: MemoryMeter) -> Kept:
    states = [state for stage in stages for state in stage.stash.optimizer.state.values()]
    entries = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return Kept(
        sum(parameter.nbytes for stage in stages for parameter in stage.module.parameters()),
        sum(stage.stashed for stage in stages),
        sum(entry.nbytes for entry in entries),
        meter.peak,
        meter.most_in_flight,
    )


def _unpack(saved: Saved) -> Tensor:
    return saved.tensor
