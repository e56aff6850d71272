"""Resuming from checkpoints on the workers' disks.

A group does so after all of its workers were killed.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from blake3 import blake3
from torch import Tensor, nn

from fedring.train.tensors.state import tensors_of
from fedring.workers.optimizer_groups import (
    check_tables,
    group_tensors,
    group_values,
    put_groups,
    put_tensors,
    read_groups,
)
from fedring.workers.replica import Progress, Replica, digest_of, equal_on_all, gather

_NONE = -1


@dataclass(frozen=True, slots=True)
class Resumption:
    """The checkpoint from which a group goes on."""

    step: int
    on_all: bool  # whether all workers have it


def agree(steps: Sequence[int], *, live: int | None, most: int) -> Resumption | None:
    """Choose the checkpoint to resume from, with all workers.

    Every worker of the default group must call this.

    Args:
        steps: The steps of this worker's checkpoints.
        live: The steps of the job's state that this worker has in memory; None if it has none.
        most: The most checkpoints that a worker keeps; equal on all workers.

    Returns:
        The checkpoint, or None if there is none, or if a worker has something as new in memory.
    """
    rows = gather([_NONE if live is None else live, *[*steps, *[_NONE] * most][:most]])
    return choose([(row[0], [step for step in row[1:] if step != _NONE]) for row in rows])


def choose(workers: Sequence[tuple[int, Sequence[int]]]) -> Resumption | None:
    """Return the newest checkpoint that all workers have.

    If there is none, it is the newest that any worker has.

    Args:
        workers: For each worker, the steps of what it has in memory, -1 if it has nothing, and those of its
            checkpoints.

    Returns:
        The checkpoint. None if there is none, or if a worker has something as new in memory, from which the group then
        continues.
    """
    held = [set(steps) for _, steps in workers]
    known = set.intersection(*held) or set.union(*held)
    newest = max(known, default=_NONE)
    if newest <= max(live for live, _ in workers):
        return None
    return Resumption(newest, on_all=all(newest in steps for steps in held))


def is_same_on_all(content: dict[str, Any], model: nn.Module) -> bool:
    """Return whether all workers have read checkpoints of one group.

    The workers are those of the default group.

    A worker that was lost may have one of the same step as the others, which continued without it. Every worker of the
    group must call this.

    Args:
        content: This worker's checkpoint: the number of its round and of its workers, and its replica.
        model: The replica's model. Only its parameters count, since buffers may differ between workers.
    """
    facts = f"{content['round']} {content['workers']} ".encode()
    names = {name for name, _ in model.named_parameters()}
    parameters = (tensor for name, tensor in content["replica"]["model"].items() if name in names)
    return equal_on_all(blake3(facts + digest_of(parameters)).digest())


def replica_content(replica: Replica) -> dict[str, Any]:
    """Return a replica's content for a checkpoint.

    It consists of the replica's own tensors and plain values.
    """
    names = _names(replica)
    states = replica.optimizer.state.items()
    return {
        "progress": asdict(replica.progress),
        "model": dict(tensors_of(replica.model)),
        "optimizer": {names[id(parameter)]: dict(state) for parameter, state in states},
        "groups": group_values(replica.optimizer),
        "group_tensors": group_tensors(replica.optimizer),
    }


@torch.no_grad()
def restore_replica(replica: Replica, content: dict[str, Any], *, same_round: bool) -> None:
    """Bring a replica to the state of a checkpoint.

    Args:
        replica: Holds the model with which its round begins.
        content: The result of replica_content().
        same_round: Whether the checkpoint was taken in the replica's round. In another round, the model stays as the
            server has published it, and only the optimizer's state and the number of steps are restored.

    Raises:
        KeyError: If the checkpoint lacks a tensor.
        ValueError: If the checkpoint is of another model or optimizer.
    """
    progress = Progress(**content["progress"])
    if same_round:
        for name, tensor in tensors_of(replica.model):
            saved: Tensor = content["model"][name]
            if saved.shape != tensor.shape:
                raise ValueError(f"{name} is {list(saved.shape)} in the checkpoint and {list(tensor.shape)} here")
            tensor.copy_(saved)
    replica.progress = progress if same_round else Progress(progress.steps)
    optimizer, names = replica.optimizer, _names(replica)
    # The checkpoint names parameters, and torch's optimizers number them in the order of their groups.
    ordered = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    states = {number: content["optimizer"].get(name) for number, name in enumerate(ordered)}
    found = {number: state for number, state in states.items() if state}
    optimizer.load_state_dict({"state": found, "param_groups": optimizer.state_dict()["param_groups"]})
    if "groups" in content:  # not in those of 1.0.0
        put_groups(optimizer, read_groups(content["groups"], len(optimizer.param_groups)))
    if tensors := content.get("group_tensors"):
        check_tables(tensors, len(optimizer.param_groups), of=Tensor)
        put_tensors(optimizer, tensors)


def _names(replica: Replica) -> dict[int, str]:
    return {id(parameter): name for name, parameter in replica.model.named_parameters()}
