"""The stages of a job's model, cut as the table [pipeline] says.

Every stage has parameters to train, and all parameters of stages are the model's own.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from fedring.job_code import job_code
from fedring.pipeline.cut import as_cut, balanced, cut_at, cut_by_counts
from fedring.pipeline.errors import CutError
from fedring.pipeline.layers import Layers, Stages
from fedring.train.errors import SeamError
from fedring.train.jobs.pipeline_table import Pipeline
from fedring.train.names.offered import Offered


def count_layers(model: nn.Module, table: Pipeline, sample: Callable[[], Tensor | Mapping[str, Tensor]]) -> list[int]:
    """Count the layers of each stage for a balanced cut.

    The cut balances parameters or time.

    Args:
        model: Is put into training mode.
        table: Says where to cut.
        sample: Returns the inputs of a micro-batch; called only if layers are to be timed.

    Returns:
        The number of layers of each stage; empty if the table names layers, numbers or a callable.

    Raises:
        SeamError: With the reason cannot_cut.
    """
    if table.cut not in ("parameters", "time"):
        return []
    try:
        layers = Layers(model.train(), stages=table.stages)
        sizes = layers.costs()
        costs = sizes
        if table.cut == "time":
            # Only one worker measures. Its random numbers must stay the same as those of its peers.
            with torch.random.fork_rng(devices=[]):
                costs = layers.measured(sample())
        return _even(sizes, costs, table.stages)
    except CutError as error:
        raise SeamError("cannot_cut", f"The model cannot be cut: {error}.") from error


def cut_model(model: nn.Module, table: Pipeline, counts: Sequence[int], offered: Offered) -> Stages:
    """Cut a model into the stages that the table asks for.

    Args:
        model: Is put into training mode; the stages share its tensors.
        table: Says where to cut, and into how many stages.
        counts: The result of count_layers().
        offered: The code that jobs may name here.

    Returns:
        The stages, in order, with their routes.

    Raises:
        SeamError: With the reason cannot_cut, or as Offered.get() raises it for a callable.
    """
    model.train()
    try:
        stages = _stages(model, table, counts, offered)
        if len(stages) != table.stages:
            raise CutError(f"{table.cut} returned {len(stages)} stages, but the job's table has stages={table.stages}")
        # A user's own cut is checked, too: a lost or doubled parameter would train a wrong model.
        _check_parameters(model, stages)
    except CutError as error:
        raise SeamError("cannot_cut", f"The model cannot be cut: {error}.") from error
    return stages


def _stages(model: nn.Module, table: Pipeline, counts: Sequence[int], offered: Offered) -> Stages:
    if counts:
        return cut_by_counts(model, counts)
    if isinstance(table.cut, str):
        return as_cut(_made_by(table.cut, model, offered))
    numbers = [one for one in table.cut if isinstance(one, int)]
    return cut_by_counts(model, numbers) if numbers else cut_at(model, [str(one) for one in table.cut])


def _made_by(name: str, model: nn.Module, offered: Offered) -> object:
    made = offered.get("cut", name)
    try:
        with job_code():
            return made(model)
    except Exception as error:  # the user's code may raise anything
        raise CutError(f"{name} raised {type(error).__name__}: {error}") from error


def _even(sizes: Sequence[float], costs: Sequence[float], stages: int) -> list[int]:
    """Return the number of layers of each balanced stage.

    A layer without parameters stays with the one before, as each stage needs some.
    """
    starts = [index for index, size in enumerate(sizes) if size]
    if len(starts) < stages:
        raise CutError(
            f"{len(starts)} layers with parameters cannot make {stages} stages: use fewer stages, or "
            "name the modules that begin them"
        )
    spans = list(pairwise([0, *starts[1:], len(sizes)]))
    ends, counts = 0, []
    for part in balanced([sum(costs[first:end]) for first, end in spans], stages):
        counts.append(sum(end - first for first, end in spans[ends : ends + part]))
        ends += part
    return counts


def _check_parameters(model: nn.Module, stages: Sequence[nn.Module]) -> None:
    known = {id(parameter) for parameter in model.parameters()}
    for number, stage in enumerate(stages):
        if not any(parameter.requires_grad for parameter in stage.parameters()):
            raise CutError(f"stage {number} has no parameters to train: cut at other layers")
        for name, parameter in stage.named_parameters():
            if id(parameter) not in known:
                raise CutError(
                    f"{name} of stage {number} is not a parameter of the model: build stages of its own layers"
                )
