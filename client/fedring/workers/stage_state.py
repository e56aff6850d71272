"""The stages of a model that no worker holds whole.

They are cut without values, and filled with their own values only.
"""

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fedring.codec.schema import Entry
from fedring.train.errors import SeamError, TrainError
from fedring.train.jobs.pipeline_table import Pipeline
from fedring.train.loop import OptimizerFactory
from fedring.train.names.offered import Offered
from fedring.train.plan import Plan
from fedring.train.tensors.skeleton import replace_tensors
from fedring.train.tensors.state import schema_of, tensors_of
from fedring.untrusted import parse_json
from fedring.workers.cutting import cut_model
from fedring.workers.optimizer_groups import (
    Groups,
    GroupTensors,
    check_tables,
    group_tensors,
    group_values,
    is_plain,
    largest_parameter,
    put_groups,
    put_tensors,
    read_groups,
)
from fedring.workers.replica import Progress
from fedring.workers.state_file import TensorFile, write_tensors

Sink = Callable[[Entry, int, NDArray[np.floating]], None]
"""Takes some values of a tensor of the model, as StageState.put() does."""

_MODEL, _OPTIMIZER, _GROUPS = "model/", "optimizer/", "groups/"


@dataclass(frozen=True, slots=True)
class CheckpointFacts:
    """The plain values of a checkpoint, beside its tensors.

    They are the same in the files of all stages.
    """

    round: int  # in which it was made
    base: str  # the name of the model that the round started from
    progress: Progress
    samples: int = 0  # that were trained on in the round
    counts: tuple[int, ...] = ()  # the layers of each stage, as count_layers() returned them


class StagedModel:
    """A model without values that is cut into stages.

    Attributes:
        schema: The schema of the whole model.
        stages: The stages, in order. Their parameters and buffers are on the device "meta".
        stage_of: The stage of each tensor of the model. Tensors that no stage uses belong to stage 0.
    """

    def __init__(self, model: nn.Module, table: Pipeline, counts: Sequence[int], offered: Offered) -> None:
        """Cut a model, as cut_model() does.

        Raises:
            SeamError: With the reason cannot_cut.
        """
        self.schema = schema_of(model)
        self.stages = cut_model(model, table, counts, offered)
        self._tensors = dict(tensors_of(model))
        known = {id(tensor): name for name, tensor in self._tensors.items()}
        self._names: list[dict[str, str]] = []  # for each stage, from a name in the stage to the name in the model
        self.stage_of = dict.fromkeys(self._tensors, 0)
        for number, stage in enumerate(self.stages):
            mine = dict(tensors_of(stage))
            if new := next((name for name, t in mine.items() if t.is_meta and id(t) not in known), ""):
                clause = f"{new} of stage {number} is not a tensor of the model: build stages of its own layers"
                raise SeamError("cannot_cut", f"The model cannot be cut: {clause}.")
            self._names.append({name: known[id(tensor)] for name, tensor in mine.items() if id(tensor) in known})
            self.stage_of |= dict.fromkeys(self._names[-1].values(), number)

    def make(self, number: int, plan: Plan, factory: OptimizerFactory, device: torch.device) -> "StageState":
        """Return one stage on a device, to train it there.

        Its values must be filled in.

        Args:
            number: The stage.
            plan: Gives the learning rate and the momentum.
            factory: Makes the stage's optimizer.
            device: Where to train.
        """
        module = copy.deepcopy(self.stages[number])
        replace_tensors(module, lambda tensor: _empty(tensor, device) if tensor.is_meta else tensor.to(device))
        own = dict(tensors_of(module.train()))
        tensors = {in_model: own[name] for name, in_model in self._names[number].items()}
        for name, stage in self.stage_of.items():
            if stage == number and name not in tensors:
                tensors[name] = _empty(self._tensors[name], torch.device("cpu"))
        trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
        return StageState(module, factory(trained, plan.lr, plan.momentum), tensors)


@dataclass(frozen=True, slots=True, eq=False)
class StageState:
    """A stage as its worker trains it."""

    module: nn.Module
    optimizer: torch.optim.Optimizer
    tensors: Mapping[str, Tensor]  # parameters and buffers, by their names in the model

    @torch.no_grad()
    def put(self, entry: Entry, start: int, values: NDArray[np.floating]) -> None:
        """Write some values of a model into a tensor.

        Values of integer tensors are rounded.

        Args:
            entry: The tensor.
            start: The place of the first value in the flat tensor.
            values: [n] float32 or float64.
        """
        tensor, new = self.tensors[entry.name].detach(), torch.from_numpy(values.copy())
        new = new if tensor.is_floating_point() else new.round()
        tensor.view(-1)[start : start + len(values)].copy_(new)

    def save(self, path: Path, facts: CheckpointFacts) -> None:
        """Write the stage to a file, durably.

        Raises:
            TrainError: With the reason bad_optimizer or bad_checkpoint, if a value cannot be stored.
        """
        stored = {_MODEL + name: tensor for name, tensor in self.tensors.items()}
        for number, tensors in enumerate(group_tensors(self.optimizer)):
            stored |= {f"{_GROUPS}{number}/{key}": tensor for key, tensor in tensors.items()}
        plain: dict[str, dict[str, Any]] = {}
        for name, parameter in self._trained().items():
            for key, value in self.optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    stored[f"{_OPTIMIZER}{key}/{name}"] = value
                elif is_plain(value):
                    plain.setdefault(name, {})[key] = value
                else:
                    raise TrainError(
                        "bad_optimizer",
                        f"The optimizer's state {key!r} is a {type(value).__name__}, which a checkpoint cannot hold: "
                        "use an optimizer whose state holds tensors and plain values.",
                    )
        texts = {"facts": asdict(facts), "plain": plain, "groups": group_values(self.optimizer)}
        write_tensors(path, stored, {key: json.dumps(value) for key, value in texts.items()})

    def load(self, path: Path, *, values: bool = True) -> None:
        """Read the stage from a file.

        Args:
            path: The file.
            values: Whether to take the parameters and the buffers, too, or the optimizer's state only.

        Raises:
            TrainError: With the reason bad_checkpoint, if the file is damaged, or does not fit the stage.
        """
        with TensorFile(path) as file:
            file.check()
            if values:
                for name, tensor in self.tensors.items():
                    file.read_into(_MODEL + name, tensor)
            trained = self._trained()
            states = _plain(file, trained)
            kept, tensors = _groups(file, len(self.optimizer.param_groups)), _group_tensors(file, self.optimizer)
            for stored, place in file.tensors.items():
                if not stored.startswith(_OPTIMIZER):
                    continue
                key, _, name = stored.removeprefix(_OPTIMIZER).partition("/")
                size = int(np.prod(place.shape))
                if name not in trained or size > max(trained[name].numel(), 1):
                    raise TrainError("bad_checkpoint", f"The checkpoint {path} has a state {stored} of {size} values.")
                states[name][key] = torch.empty(place.shape, dtype=place.dtype)
                file.read_into(stored, states[name][key])
        names = {id(parameter): name for name, parameter in trained.items()}
        order = [names[id(parameter)] for group in self.optimizer.param_groups for parameter in group["params"]]
        filled = {number: states[name] for number, name in enumerate(order) if states[name]}
        # load_state_dict knows which entries belong on the device and which stay in the host's memory.
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({"state": filled, "param_groups": groups})
        put_groups(self.optimizer, kept)
        put_tensors(self.optimizer, tensors)

    def _trained(self) -> dict[str, Tensor]:
        """Return the parameters of the optimizer, by name in the model."""
        return {n: t for n, t in self.tensors.items() if isinstance(t, nn.Parameter) and t.requires_grad}


def read_facts(path: Path) -> CheckpointFacts:
    """Return the plain values of a checkpoint's file.

    Raises:
        TrainError: With the reason bad_checkpoint, if it is not the file of a checkpoint.
    """
    with TensorFile(path) as file:
        try:
            told = parse_json(file.metadata["facts"])
            progress = Progress(**{str(key): int(value) for key, value in told["progress"].items()})
            if min(asdict(progress).values()) < 0:
                raise ValueError(f"{progress} is below 0")
            counts = tuple(int(count) for count in told["counts"])
            return CheckpointFacts(int(told["round"]), str(told["base"]), progress, int(told["samples"]), counts)
        except (ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise TrainError("bad_checkpoint", f"The checkpoint {path} cannot be used: {error!r}.") from error


def _plain(file: TensorFile, trained: Mapping[str, Tensor]) -> dict[str, dict[str, Any]]:
    """Return the plain values of the optimizer's state, for every parameter."""
    states: dict[str, dict[str, Any]] = {name: {} for name in trained}
    try:
        for name, values in parse_json(file.metadata["plain"]).items():
            for key, value in values.items():
                if not is_plain(value):
                    raise ValueError(f"{key} is a {type(value).__name__}")
                states[name][key] = value
    except (ValueError, KeyError, AttributeError, TypeError) as error:
        raise TrainError("bad_checkpoint", f"The checkpoint's optimizer cannot be used: {error!r}.") from error
    return states


def _groups(file: TensorFile, count: int) -> Groups:
    """Return the values of the optimizer's groups of parameters.

    There are none in checkpoints of 1.0.0.
    """
    try:
        return read_groups(parse_json(file.metadata["groups"]), count) if "groups" in file.metadata else []
    except ValueError as error:
        raise TrainError("bad_checkpoint", f"The checkpoint's optimizer cannot be used: {error}.") from error


def _group_tensors(file: TensorFile, optimizer: torch.optim.Optimizer) -> GroupTensors:
    """Return the tensors of the optimizer's groups of parameters."""
    found: GroupTensors = [{} for _ in optimizer.param_groups]
    for stored, place in file.tensors.items():
        if not stored.startswith(_GROUPS):
            continue
        number, _, key = stored.removeprefix(_GROUPS).partition("/")
        size = int(np.prod(place.shape))
        if number not in map(str, range(len(found))) or size > largest_parameter(optimizer):
            raise TrainError("bad_checkpoint", f"The checkpoint has {stored!r:.100} of {size} values.")
        found[int(number)][key] = torch.empty(place.shape, dtype=place.dtype)
        file.read_into(stored, found[int(number)][key])
    try:
        check_tables(found, len(found), of=Tensor)
    except ValueError as error:
        raise TrainError("bad_checkpoint", f"The checkpoint's optimizer cannot be used: {error}.") from error
    return found


def _empty(tensor: Tensor, device: torch.device) -> Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=device)
