"""Many local steps, then one exchange (local SGD; DiLoCo, Douillard et al. 2023, arXiv 2311.08105, algorithm 1).

    local = LocalSGD(None, model.named_parameters(), every=50)
    for inputs, labels in batches:
        ...
        optimizer.step()  # each worker's own; no DistributedDataParallel
        local.step()

Every so many steps the workers' mean way from where they last were equal, the outer gradient, moves all of them
by one step of an outer optimizer. With SGD(lr=1) that is the mean of their parameters.
"""

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import SGD, Optimizer

from fedring.ddp.hooks.gradients import Gradients
from fedring.ddp.hooks.turns import Steps, mean, run

OuterOptimizer = Callable[[list[Tensor]], Optimizer]


class Compression(Protocol):
    """How outer gradients are sent: an Int8State or a TopKState, bound to the parameters or not."""

    def steps(self, grads: Gradients) -> Steps:
        """The buffer of `grads` comes to hold the mean over all workers."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What it remembers."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """It remembers that."""
        ...


def diloco(anchors: list[Tensor]) -> Optimizer:
    """The outer optimizer of DiLoCo's section 3.1: Nesterov's momentum."""
    return SGD(anchors, lr=0.7, momentum=0.9, nesterov=True)


class LocalSGD:
    """The workers of `process_group` start as the first one is, and are equal after every `every`-th step."""

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
        """One local step more was taken; whether the workers were made equal after it."""
        self.taken += 1
        if self.taken < self.every:
            return False
        self.exchange()
        return True

    @torch.no_grad()
    def exchange(self) -> None:
        """The outer optimizer has taken a step, and all workers' parameters are where it ended."""
        names, anchors = list(self.anchors), list(self.anchors.values())
        ways = [anchor - self.parameters[name] for name, anchor in self.anchors.items()]
        buffer = torch.cat([way.reshape(-1) for way in ways])
        grads = Gradients(names, [anchor.shape for anchor in anchors], buffer)
        run(self.compression.steps(grads) if self.compression else self._mean(grads))
        for anchor, way in zip(anchors, grads.flat(), strict=True):
            anchor.grad = way.view(anchor.shape)
        self.optimizer.step()
        for name, anchor in self.anchors.items():
            anchor.grad = None
            self.parameters[name].copy_(anchor)
        self.taken = 0

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values; with a compression, each worker has another."""
        return {
            "taken": self.taken,
            "anchors": dict(self.anchors),
            "outer": self.optimizer.state_dict(),
            "compression": self.compression.state_dict() if self.compression else None,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """This is the state that `state` was taken from; parameters are restored with the model's own."""
        if state["anchors"].keys() != self.anchors.keys():
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
