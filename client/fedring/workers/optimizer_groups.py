"""The values in an optimizer's groups of parameters.

They are not part of its state. Some optimizers count their steps there, or estimate their step size, as plain values or
as tensors. Learning rates are not among them: they follow from the job and its progress.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

Groups = list[dict[str, Any]]
"""Plain values by name, for each group."""
GroupTensors = list[dict[str, Tensor]]
"""Tensors by name, for each group."""

_LEFT_OUT = ("params", "lr", "initial_lr")
_MOST_VALUES = 256  # of one group


def group_values(optimizer: Optimizer) -> Groups:
    """Return the plain values of each group, which JSON can hold."""
    return [
        {key: value for key, value in group.items() if key not in _LEFT_OUT and is_plain(value)}
        for group in optimizer.param_groups
    ]


def read_groups(told: Any, count: int) -> Groups:
    """Check values that a peer or a file tells.

    Args:
        told: What JSON held.
        count: The number of groups.

    Raises:
        ValueError: If they are not plain values of so many groups.
    """
    if not isinstance(told, list) or len(told) != count or not all(isinstance(group, dict) for group in told):
        raise ValueError(f"the values of {count} groups of parameters are {told!r:.100}")
    for group in told:
        wrong = next((key for key, value in group.items() if key in _LEFT_OUT or not is_plain(value)), None)
        if wrong is not None or len(group) > _MOST_VALUES:
            raise ValueError(f"a group of parameters has {len(group)} values, among them {wrong!r:.100}")
    return told


def put_groups(optimizer: Optimizer, groups: Groups) -> None:
    """Write values into an optimizer's groups, unless there are none."""
    for group, values in zip(optimizer.param_groups, groups, strict=False):
        group.update(values)


def group_tensors(optimizer: Optimizer) -> GroupTensors:
    """Return the tensors of each group, which are the optimizer's own.

    They are [] if there are none in any group.
    """
    tensors = [
        {key: value for key, value in group.items() if key not in _LEFT_OUT and isinstance(value, Tensor)}
        for group in optimizer.param_groups
    ]
    return tensors if any(tensors) else []


def check_tables(told: Any, count: int, *, of: type) -> None:
    """Check tables of tensors that a peer or a file tells.

    Args:
        told: A table for each group, by the names of tensors.
        count: The number of groups.
        of: The type of the values of these tables.

    Raises:
        ValueError: If they are not so many tables, or if one names what no group of parameters takes.
    """
    if not isinstance(told, list) or len(told) != count or not all(isinstance(table, dict) for table in told):
        raise ValueError(f"the tensors of {count} groups of parameters are {told!r:.100}")
    wrong = [key for table in told for key, value in table.items() if key in _LEFT_OUT or not isinstance(value, of)]
    if wrong:
        raise ValueError(f"the tensors of groups of parameters include {wrong[0]!r:.100}")


def put_tensors(optimizer: Optimizer, tensors: Sequence[Mapping[str, Tensor]]) -> None:
    """Write copies of tensors into an optimizer's groups, unless there are none.

    Each goes to the device of the one that it replaces, or else to that of the group's parameters.
    """
    for group, values in zip(optimizer.param_groups, tensors, strict=False):
        for key, value in values.items():
            known = group.get(key, next(iter(group["params"]), None))
            device = known.device if isinstance(known, Tensor) else torch.device("cpu")
            group[key] = value.detach().to(device, copy=True)


def largest_parameter(optimizer: Optimizer) -> int:
    """Return the most values that a tensor of a group may have.

    It is the size of the optimizer's largest parameter, and at least 1.
    """
    return max((parameter.numel() for group in optimizer.param_groups for parameter in group["params"]), default=1) or 1


def is_plain(value: Any) -> bool:
    """Return whether a value is neither a tensor nor nested."""
    return value is None or isinstance(value, bool | int | float | str)
