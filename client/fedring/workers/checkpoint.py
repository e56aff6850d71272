"""What every worker of a pipeline keeps of all its stages: model, optimizer and progress, as they were after one step.

The law: a checkpoint is taken whole or not at all. A worker changes its own only once it holds the last stage's
tensors; of workers that stopped in between, synchronize() makes those behind equal to those ahead.
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fedring.train.loop import OptimizerFactory
from fedring.train.plan import Plan
from fedring.train.state import tensors_of
from fedring.workers.replica import Progress, Replica, State, broadcast, share_states


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """What of a replica belongs to one stage, under the stage's names."""

    tensors: Mapping[str, Tensor]
    trained: Mapping[str, Tensor]  # those of them that the optimizer steps


@dataclass(frozen=True, slots=True, eq=False)
class Copy:
    """A stage as its worker trains it."""

    module: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def place(self) -> Place:
        """Its own tensors."""
        return place_of(self.module)


def place_of(stage: nn.Module) -> Place:
    """The tensors of a stage; those of one that was cut from the replica's model are the replica's."""
    trained = {name: parameter for name, parameter in stage.named_parameters() if parameter.requires_grad}
    return Place(dict(tensors_of(stage)), trained)


def copy_out(stage: nn.Module, replica: Replica, plan: Plan, factory: OptimizerFactory, device: torch.device) -> Copy:
    """A copy of the stage on the device, with the optimizer's state as the replica has it."""
    module = copy.deepcopy(stage).to(device).train()
    kept, own = place_of(stage).trained, place_of(module).trained
    optimizer = factory(list(own.values()), plan.lr, plan.momentum)
    names = {id(parameter): name for name, parameter in own.items()}
    ordered = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    states = [replica.optimizer.state.get(kept[name], {}) for name in ordered]
    filled = {number: _cloned(state) for number, state in enumerate(states) if state}
    # load_state_dict knows which entries belong on the device, and which do not.
    optimizer.load_state_dict({"state": filled, "param_groups": optimizer.state_dict()["param_groups"]})
    return Copy(module, optimizer)


@torch.no_grad()
def gather(
    replica: Replica, places: Sequence[Place], owners: Sequence[int], copies: Mapping[int, Copy], progress: Progress
) -> None:
    """Every worker's replica is what the stages are now; `owners` are ranks, and `copies` this worker's own stages."""
    mine = dist.get_rank()
    news: list[tuple[dict[str, Tensor], list[State]]] = []
    for stage, (place, owner) in enumerate(zip(places, owners, strict=True)):
        if owner == mine:
            own, optimizer = copies[stage].place, copies[stage].optimizer
            tensors = {name: tensor.detach() for name, tensor in own.tensors.items()}
            states = [_cloned(optimizer.state.get(own.trained[name], {})) for name in place.trained]
        else:
            tensors, states = {name: torch.empty_like(tensor) for name, tensor in place.tensors.items()}, []
        for name in place.tensors:
            broadcast(tensors[name], owner)
        news.append((tensors, share_states(list(place.trained.values()), states, owner)))
    for place, (tensors, states) in zip(places, news, strict=True):
        for name, kept in place.tensors.items():
            kept.copy_(tensors[name])
        for parameter, state in zip(place.trained.values(), states, strict=True):
            replica.optimizer.state[parameter] = state
    replica.progress = replace(progress)


def _cloned(state: Mapping[str, Any]) -> State:
    """The state, apart from what may change, in the host's memory."""
    return {key: value.to("cpu", copy=True) if isinstance(value, Tensor) else value for key, value in state.items()}
