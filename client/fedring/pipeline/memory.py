"""How much the stages of a model keep, in bytes: parameters and their versions, optimizer state, and activations."""

import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from fedring.pipeline.stage import Loss, Stage
from fedring.pipeline.stash import WeightStashing
from fedring.pipeline.worker import LocalPipeline
from fedring.schedules.schedule import Schedule
from fedring.schedules.simulation import check


class Kept(NamedTuple):
    """The most bytes that one worker's stages keep in a run; `in_flight` micro-batches are in them at a time."""

    parameters: int
    stashed: int  # older versions of them
    optimizer: int
    activations: int
    in_flight: int


class Saved:
    """A tensor that autograd keeps until its backward."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Ledger:
    """The bytes of what the micro-batches in a worker's stages keep, the weights apart."""

    def __init__(self) -> None:
        self.peak = self.most_flying = 0
        self.inputs: dict[tuple[int, int], Saved] = {}  # by stage and micro-batch
        self._sizes: Counter[int] = Counter()  # bytes, by their address
        self._uses: Counter[int] = Counter()

    def keep(self, saved: Saved) -> None:
        """The tensor's bytes count, once, for as long as one of those that saved them lives."""
        place = saved.tensor.data_ptr()
        nbytes = min(saved.tensor.nbytes, saved.tensor.untyped_storage().nbytes())  # a broadcast one has fewer
        self._sizes[place] = max(self._sizes[place], nbytes)
        self._uses[place] += 1
        self.peak = max(self.peak, self._sizes.total())
        self.most_flying = max(self.most_flying, len(self.inputs))
        weakref.finalize(saved, self._release, place)

    def _release(self, place: int) -> None:
        self._uses[place] -= 1
        if not self._uses[place]:
            del self._uses[place], self._sizes[place]


class Measured(Stage):
    """A stage that tells its worker's ledger what its micro-batches keep, and knows what its weights do."""

    def __init__(
        self, module: nn.Module, stash: WeightStashing, ledger: Ledger, *, loss: Loss | None, recompute: bool
    ) -> None:
        super().__init__(module, stash, loss=loss, recompute=recompute)
        self.stashed = 0
        self._ledger = ledger

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
        saved = self._ledger.inputs[id(self), micro_batch] = Saved(self._flights[micro_batch].inputs)
        self._ledger.keep(saved)
        return output

    def backward(self, micro_batch: int, gradient: Tensor | None) -> Tensor | None:
        """What Stage.backward does; a repeated forward is measured, too."""
        with saved_tensors_hooks(self._pack, _unpack):
            result = super().backward(micro_batch, gradient)
        del self._ledger.inputs[id(self), micro_batch]
        return result

    def update(self, *, keep: Collection[int] = ()) -> int:
        """What Stage.update does; the versions are as many now as they ever are."""
        version = super().update(keep=keep)
        sizes = {w.data_ptr(): w.nbytes for w in self._weights()}
        self.stashed = max(self.stashed, sum(sizes.values()) - sum(w.nbytes for w in self.stash.weights()))
        return version

    def _weights(self) -> list[Tensor]:
        """Those of all versions."""
        return [weight for number in self.stash.versions for weight in self.stash.weights(number)]

    def _pack(self, tensor: Tensor) -> Saved:
        saved = Saved(tensor)
        if tensor.untyped_storage().data_ptr() not in {w.untyped_storage().data_ptr() for w in self._weights()}:
            self._ledger.keep(saved)
        return saved


def measure(
    modules: Sequence[nn.Module],
    schedule: Schedule,
    batch: tuple[Tensor, Tensor],
    *,
    loss: Loss,
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = torch.optim.Adam,
    recompute: bool = False,
) -> list[Kept]:
    """What each worker keeps in a run of the schedule on the batch, which is cut into its micro-batches."""
    needs, last = check(schedule), len(modules) - 1
    ledgers = [Ledger() for _ in schedule.workers]
    stages = [
        Measured(
            module,
            WeightStashing(optimizer(module.parameters()), bound=need.versions),
            ledgers[schedule.owner(number)],
            loss=loss if number == last else None,
            recompute=recompute,
        )
        for number, (module, need) in enumerate(zip(modules, needs, strict=True))
    ]
    inputs, targets = (tensor.tensor_split(schedule.micro_batches) for tensor in batch)
    LocalPipeline(stages, schedule).run(inputs, targets)
    return [_kept(stages[worker :: len(ledgers)], ledger) for worker, ledger in enumerate(ledgers)]


def _kept(stages: Sequence[Measured], ledger: Ledger) -> Kept:
    states = [state for stage in stages for state in stage.stash.optimizer.state.values()]
    entries = [value for state in states for value in state.values() if isinstance(value, Tensor)]
    return Kept(
        sum(parameter.nbytes for stage in stages for parameter in stage.module.parameters()),
        sum(stage.stashed for stage in stages),
        sum(entry.nbytes for entry in entries),
        ledger.peak,
        ledger.most_flying,
    )


def _unpack(saved: Saved) -> Tensor:
    return saved.tensor
