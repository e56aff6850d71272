"""The values in an optimizer's groups of parameters.

They are not part of its state. Some optimizers count their steps there, or estimate their step size. Learning rates
are not among them: they follow from the job and its progress.
"""

from typing import Any

from torch.optim import Optimizer

Groups = list[dict[str, Any]]
"""Plain values by name, for each group."""

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


def is_plain(value: Any) -> bool:
    """Return whether a value is neither a tensor nor nested."""
    return value is None or isinstance(value, bool | int | float | str)
