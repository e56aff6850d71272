"""Local SGD: many local steps between two exchanges.

DiLoCo is one form of it (Douillard et al. 2023, arXiv 2311.08105, algorithm 1).

    local = LocalSGD(None, model.named_parameters(), every=50)
    for inputs, labels in batches:
        ...
        optimizer.step()  # each worker's own; no DistributedDataParallel
        local.step()

After every so many steps, the outer gradient is the mean over all workers of how far they have moved since they were
equal. An outer optimizer takes one step with it, which all workers follow. With SGD(lr=1) that is the mean of their
parameters.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer

from fedring.ddp.gradients import Gradients
from fedring.ddp.turns import Steps, mean, run

OuterOptimizer = Callable[[list[Tensor]], Optimizer]


class Compression(Protocol):
    """A compression of outer gradients.

    An Int8State or a TopKState is one, with names or without.
    """

    def steps(self, grads: Gradients) -> Steps:
        """Exchange `grads`: their buffer comes to hold the mean over all workers."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint."""
        ...


def diloco(anchors: list[Tensor]) -> Optimizer:
    """Return DiLoCo's outer optimizer for the tensors `anchors`.

    It is SGD with Nesterov's momentum (section 3.1).
    """
    return SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)


class LocalSGD:
    """Makes the workers equal after every `every`-th local step.

    All workers begin with the first worker's parameters.

    Args:
        process_group: The workers; None is the default group.
        named_parameters: As from `model.named_parameters()`.
        every: Local steps between two exchanges, at least 1.
        outer: Makes the outer optimizer, for the tensors that it is to move.
        compression: How outer gradients are sent; None sends them whole.
    """

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        named_parameters: Iterable[tuple[str, Tensor]],
        *,
        every: int,
        outer: OuterOptimizer = diloco,
        compression: Compression | None = None,
    ) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, not {every}")
        group = process_group or dist.group.WORLD
        if group is None:
            raise ValueError("LocalSGD needs a process group: call torch.distributed.init_process_group first")
        self.group = group
        self.every = every
        self.taken = 0  # local steps since the workers were equal
        self.parameters = {name: tensor for name, tensor in named_parameters if tensor.requires_grad}
        self.compression = compression
        first = dist.get_process_group_ranks(group)[0]
        for parameter in self.parameters.values():
            dist.broadcast(parameter.detach(), first, group=group)
        self.anchors = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        self.optimizer = outer(list(self.anchors.values()))

    def step(self) -> bool:
        """Count a local step, and exchange if it is time to.

        Returns:
            Whether the workers are equal now.
        """
        self.taken += 1
        if self.taken < self.every:
            return False
        self.exchange()
        return True

    @torch.no_grad()
    def exchange(self) -> None:
        """Take an outer step, and move all workers to its result."""
        names, anchors = list(self.anchors), list(self.anchors.values())
        moved = [anchor - self.parameters[name] for name, anchor in self.anchors.items()]
        buffer = torch.cat([tensor.reshape(-1) for tensor in moved])
        grads = Gradients(names, [anchor.shape for anchor in anchors], buffer)
        run(self.compression.steps(grads) if self.compression else self._mean(grads))
        for anchor, gradient in zip(anchors, grads.flat(), strict=True):
            anchor.grad = gradient.view(anchor.shape).to(anchor.dtype)  # the buffer has one dtype for all
        self.optimizer.step()
        for name, anchor in self.anchors.items():
            anchor.grad = None
            self.parameters[name].copy_(anchor)
        self.taken = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state for a checkpoint: tensors and plain values.

        With a compression, each worker has its own state.
        """
        return {
            "taken": self.taken,
            "anchors": dict(self.anchors),
            "outer": self.optimizer.state_dict(),
            "compression": self.compression.state_dict() if self.compression else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state from a checkpoint.

        The parameters themselves are restored with the model.

        Raises:
            ValueError: If the checkpoint is of other parameters.
        """
        if _shapes(state["anchors"]) != _shapes(self.anchors):  # copy_ would stretch smaller tensors
            raise ValueError("the state of LocalSGD is of other parameters")
        for name, anchor in self.anchors.items():
            anchor.copy_(state["anchors"][name])
        self.optimizer.load_state_dict(state["outer"])
        if self.compression:
            self.compression.load_state_dict(state["compression"])
        self.taken = state["taken"]

    def _mean(self, grads: Gradients) -> Steps:
        (result,) = yield from mean([grads.buffer], self.group, grads.buffer.dtype)
        return grads.buffer.copy_(result)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}
