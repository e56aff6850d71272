"""Checkpoints of a pipeline: every worker keeps the model, the optimizer and the progress of all stages after one step.

A checkpoint is complete or not made at all. A worker changes its own only after it has received the tensors of all
stages. If workers stop in between, synchronize() gives the newer checkpoint to those that have the older one.
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
class StageTensors:
    """The tensors of a replica that belong to one stage, by their names in the stage."""

    tensors: Mapping[str, Tensor]  # parameters and buffers
    trained: Mapping[str, Tensor]  # the parameters that the optimizer steps


@dataclass(frozen=True, slots=True, eq=False)
class StageCopy:
    """A stage as its worker trains it."""

    module: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def tensors(self) -> StageTensors:
        """The tensors of the copy."""
        return stage_tensors(self.module)


def stage_tensors(stage: nn.Module) -> StageTensors:
    """Return the tensors of a stage; if it was cut from the replica's model, they are the replica's own."""
    trained = {name: parameter for name, parameter in stage.named_parameters() if parameter.requires_grad}
    return StageTensors(dict(tensors_of(stage)), trained)


def copy_stage(
    stage: nn.Module, replica: Replica, plan: Plan, factory: OptimizerFactory, device: torch.device
) -> StageCopy:
    """Copy a stage to a device, to train it there.

    Args:
        stage: A stage that was cut from the replica's model.
        replica: Its optimizer's state is copied, too.
        plan: Gives the learning rate and the momentum.
        factory: Makes the copy's optimizer.
        device: Where to train.
    """
    module = copy.deepcopy(stage).to(device).train()
    kept, own = stage_tensors(stage).trained, stage_tensors(module).trained
    optimizer = factory(list(own.values()), plan.lr, plan.momentum)
    names = {id(parameter): name for name, parameter in own.items()}
    ordered = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    states = [replica.optimizer.state.get(kept[name], {}) for name in ordered]
    filled = {number: _cloned(state) for number, state in enumerate(states) if state}
    # load_state_dict knows which entries belong on the device and which stay in the host's memory.
    optimizer.load_state_dict({"state": filled, "param_groups": optimizer.state_dict()["param_groups"]})
    return StageCopy(module, optimizer)


@torch.no_grad()
def make_checkpoint(
    replica: Replica,
    stages: Sequence[StageTensors],
    owners: Sequence[int],
    copies: Mapping[int, StageCopy],
    progress: Progress,
) -> None:
    """Make a checkpoint: bring the present state of all stages into the replica of every worker.

    Every worker of the default group must call this.

    Args:
        replica: This worker's replica, which is overwritten once all stages have arrived.
        stages: The tensors of the replica that belong to each stage.
        owners: The rank that has the present state of each stage.
        copies: The stages of this worker, by number.
        progress: How far the stages have been trained.
    """
    mine = dist.get_rank()
    received: list[tuple[dict[str, Tensor], list[State]]] = []
    for number, (stage, owner) in enumerate(zip(stages, owners, strict=True)):
        if owner == mine:
            own, optimizer = copies[number].tensors, copies[number].optimizer
            tensors = {name: tensor.detach() for name, tensor in own.tensors.items()}
            states = [_cloned(optimizer.state.get(own.trained[name], {})) for name in stage.trained]
        else:
            tensors, states = {name: torch.empty_like(tensor) for name, tensor in stage.tensors.items()}, []
        for name in stage.tensors:
            broadcast(tensors[name], owner)
        received.append((tensors, share_states(list(stage.trained.values()), states, owner)))
    for stage, (tensors, states) in zip(stages, received, strict=True):
        for name, kept in stage.tensors.items():
            kept.copy_(tensors[name])
        for parameter, state in zip(stage.trained.values(), states, strict=True):
            replica.optimizer.state[parameter] = state
    replica.progress = replace(progress)


def _cloned(state: Mapping[str, Any]) -> State:
    """Return a copy of the state in the host's memory."""
    return {key: value.to("cpu", copy=True) if isinstance(value, Tensor) else value for key, value in state.items()}
