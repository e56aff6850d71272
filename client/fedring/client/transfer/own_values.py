"""Values that never leave a client: private tensors, and its own model.

They belong to its newest accepted update.
"""

import hashlib
import weakref
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedring.client.transfer.kept import Section, Sections
from fedring.codec.errors import CodecError
from fedring.codec.schema import Schema
from fedring.train.tensors.state import read_tensors
from fedring.v1 import federation_pb2 as pb

PRIVATE, PERSONAL = "private", "personal"
"""The sections of private tensors, and of a client's own model."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of models, each made from the one before.

    It begins with a new model. Private values belong to one line.
    """

    run_id: str
    model: bytes  # the hash of the schema of the shared tensors; hashed again, if the job has [sample_dp]
    after: tuple[int, int]  # the epoch and the number of the last round before it: the same in all jobs of the line

    @property
    def key(self) -> str:
        """The name of the line's kept values at a client.

        Jobs that run at once may have the same model, and a line each.
        """
        return f"{self.model.hex()} {self.after[0]} {self.after[1]}"


def line_of(command: pb.TrainCmd | pb.EvaluateCmd) -> Line:
    """Return the line of the model that a command names.

    Jobs with [sample_dp] have lines of their own: values that were trained without the noise must not come into it.
    """
    model = command.schema_hash
    if command.job.sample_dp:
        model = hashlib.sha256(b"sample_dp" + model).digest()
    return Line(command.run_id, model, (command.residual_after_epoch, command.residual_after))


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Check that training did not diverge.

    A client would begin each later round with values that are not finite.

    Raises:
        CodecError: With the reason non_finite, if a value is not finite.
    """
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise CodecError("non_finite", f"a value of the private tensor {name} is not finite")


def own_tensors(own: Mapping[str, Tensor], schema: Schema) -> dict[str, Tensor]:
    """Return copies of the tensors of a client's own model.

    They are on the CPU, by name. A script may go on to train those that it has given, which may lie anywhere, and share
    memory.

    Args:
        own: The tensors. Others than those of the schema are left out.
        schema: The tensors that training may change.

    Raises:
        CodecError: With the reason wrong_schema, if one is missing.
    """
    for entry in schema.entries:
        if entry.name not in own or tuple(own[entry.name].shape) != entry.shape:
            raise CodecError("wrong_schema", f"own has no tensor {entry.name} of the shape {list(entry.shape)}")
    named = ((entry.name, own[entry.name]) for entry in schema.entries)
    return {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in named}


def values_in(kept: Sections, name: str, line: Line, schema: Schema) -> Mapping[str, Tensor] | None:
    """Return the starting values of some tensors, or None.

    A round or an evaluation begins with them. None if there are none of these tensors.

    Args:
        kept: What the newest accepted update has left.
        name: Of the section, PRIVATE or PERSONAL.
        line: The line of the model. Values of another one are not used.
        schema: The tensors. Values of others are not used.
    """
    section = kept.get(name)
    return section.tensors if section is not None and dict(section.words) == _words(line, schema) else None


def section_of(line: Line, schema: Schema, tensors: Mapping[str, Tensor]) -> Section:
    """Return the section of values, which are on the CPU, by name."""
    return Section(tensors, _words(line, schema))


class FirstValues:
    """The private tensors' values when they were first seen.

    They are known as long as their module lives, in this process.
    """

    def __init__(self) -> None:
        self._first: dict[int, dict[str, Tensor]] = {}  # of each module or array that is still alive, by its id

    def of(self, model: nn.Module, schema: Schema, owner: object) -> Mapping[str, Tensor]:
        """Return the first values of private tensors.

        Args:
            model: The module that has them now.
            schema: The private tensors.
            owner: What the user holds, if the module is a view of it.
        """
        if id(owner) not in self._first:
            self._first[id(owner)] = {}
            weakref.finalize(owner, self._first.pop, id(owner))
        first = self._first[id(owner)]
        shapes = {name: tensor.shape for name, tensor in first.items()}
        first |= read_tensors(model, {e.name for e in schema.entries if shapes.get(e.name) != e.shape})
        return {name: first[name] for name in schema.names}


def _words(line: Line, schema: Schema) -> dict[str, str]:
    epoch, round_ = line.after
    return {"run": line.run_id, "epoch": str(epoch), "round": str(round_), "schema": schema.hash.hex()}
