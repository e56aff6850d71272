"""Cuts a model into stages.

A cut is by names or numbers of layers, balanced by costs, or the work of the user's own code.

Cuts by numbers and costs prefer places that a single tensor passes, so that stages are a chain. A cut at a named module
may be anywhere. What passes there goes straight to the stages that use it, and each stage's own worker reads what the
stage uses of the batch. See `fedring.pipeline.layers`.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise

from torch import Tensor, nn

from fedring.pipeline.errors import CutError
from fedring.pipeline.layers import Layers, Stages
from fedring.schedules.routes import Routes, chain


def cut_at(model: nn.Module, names: Sequence[str]) -> Stages:
    """Cut a model before the modules with these names.

    The names are in the model's order. Several tensors may pass at a cut.

    Raises:
        CutError: If the model cannot be cut there.
    """
    return check_apart(Layers(model).stages_at(names))


def cut_by_counts(model: nn.Module, counts: Sequence[int]) -> Stages:
    """Cut a model into stages with these numbers of layers.

    Raises:
        CutError: If the counts do not add up to the model's layers, or the model cannot be cut there.
    """
    layers = Layers(model, stages=len(counts))
    if min(counts, default=0) < 1 or sum(counts) != len(layers):
        raise CutError(f"counts {list(counts)} must be positive and add up to the model's {len(layers)} layers")
    return check_apart(layers.stages(counts))


def cut_evenly(model: nn.Module, stages: int, *, sample: Tensor | Mapping[str, Tensor] | None = None) -> Stages:
    """Cut a model into stages of balanced cost.

    The most expensive stage is as cheap as possible.

    Args:
        model: The model.
        stages: The number of stages.
        sample: A micro-batch [batch, ...] to measure layers with: of the only argument of the model's forward, or of
            all its arguments by name. None balances parameters instead of time.

    Raises:
        CutError: If the model cannot be cut into this number of stages.
    """
    layers = Layers(model, stages=stages)
    costs = layers.costs() if sample is None else layers.measured(sample)
    return check_apart(layers.stages(balanced(costs, stages)))


def as_cut(stages: object) -> Stages:
    """Check the stages that a user's own code returned.

    Args:
        stages: A list of modules, each of which takes one tensor and returns one; or a pair of such a list and its
            Routes, whose modules take their tensors as keywords and return a dict of tensors.

    Raises:
        CutError: If they are no list of modules, share tensors, or do not fit their routes.
    """
    modules, routes = stages if isinstance(stages, tuple) and len(stages) == 2 else (stages, None)
    if not isinstance(routes, Routes):
        modules, routes = stages, None
    if not isinstance(modules, Sequence | nn.ModuleList) or not all(isinstance(s, nn.Module) for s in modules):
        raise CutError(
            "the callable that cuts the model must return a list of torch.nn.Modules, in order, or a pair of such a "
            "list and its Routes"
        )
    return check_apart(Stages(modules, routes or chain(len(modules))))


def balanced(costs: Sequence[float], parts: int) -> list[int]:
    """Divide costs into neighbouring parts with the smallest possible maximum.

    Args:
        costs: The cost of each layer.
        parts: The number of parts.

    Returns:
        How many costs each part takes, at least one.

    Raises:
        CutError: If there are fewer costs than parts.
    """
    count = len(costs)
    if not 1 <= parts <= count:
        raise CutError(f"{count} layers cannot make {parts} stages: give from 1 to {count} stages")
    sums = [0.0, *accumulate(costs)]
    # best[end, part]: for the first `end` costs in `part` parts, the largest sum, and where the last part begins.
    best = {(end, 1): (sums[end], 0) for end in range(1, count + 1)}
    for part in range(2, parts + 1):
        for end in range(part, count + 1):
            options = ((max(best[at, part - 1][0], sums[end] - sums[at]), at) for at in range(part - 1, end))
            best[end, part] = min(options)
    cuts = [count]
    for part in range(parts, 0, -1):
        cuts.append(best[cuts[-1], part][1])
    return [end - start for start, end in pairwise(reversed(cuts))]


def check_apart(stages: Stages) -> Stages:
    """Check that no two stages share a parameter or a buffer.

    Returns the stages.

    Raises:
        CutError: If two stages share a tensor.
    """
    owners: dict[int, tuple[int, str]] = {}
    for number, stage in enumerate(stages):
        for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
            other, known = owners.setdefault(id(tensor), (number, name))
            if other != number:
                raise CutError(
                    f"{known} of stage {other} and {name} of stage {number} are one tensor: tied weights must be in "
                    "one stage; cut at other layers, or untie them"
                )
    return stages
