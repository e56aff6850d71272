"""The client half of an algorithm that changes updates.

docs/algorithms.md shows how to add one. The server half is in `fedring.server.model`. In each round, a client makes a
new object of each transform of the job.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict
from torch import Tensor

from fedring.client.transfer.kept import Section
from fedring.client.transfer.update import Update
from fedring.codec import CodecError, decode
from fedring.codec.schema import Schema
from fedring.train.plan import Plan
from fedring.train.tensors.download import HeldModel
from fedring.v1 import federation_pb2 as pb

Float32 = NDArray[np.float32]

_VALUES = "values"


class Arguments(BaseModel):
    """The arguments of a transform that a client needs.

    The server checks all of them when it queues the job.
    """

    model_config = ConfigDict(extra="ignore", frozen=True)


@dataclass(frozen=True, slots=True, eq=False)
class RoundStart:
    """The state of a client at the start of a round."""

    command: pb.TrainCmd
    base: HeldModel  # the shared tensors of the model that the server has sent
    fetch: Callable[[str], Float32]  # fetches a vector like the parameters, [num_parameters], by its digest

    @property
    def schema(self) -> Schema:
        """The shared tensors."""
        return self.base.schema


@dataclass(frozen=True, eq=False)
class Sent:
    """An update that is about to be sent."""

    update: Update
    samples: int  # that were trained on
    schema: Schema  # of the shared tensors

    @cached_property
    def delta(self) -> NDArray[np.floating]:
        """The change of the parameters, as the server decodes it, [num_parameters]."""
        packet = self.update.header.packets[0]
        payload = b"".join(self.update.parts)[: packet.bytes]
        return decode(payload, name=packet.encoding, length=self.schema.num_parameters)


class Transform:
    """The client half of one algorithm, in one round.

    The hooks of this class change nothing.

    Args:
        start: What the round begins with.
        kept: What the newest accepted update of this line of models has left; None = nothing.
        args: The arguments that the job gives.

    Attributes:
        name: By which jobs name it, and under which it keeps its section.
    """

    name: ClassVar[str] = ""

    def __init__(self, start: RoundStart, kept: Section | None, args: Mapping[str, object]) -> None:
        raise NotImplementedError

    def plan(self, plan: Plan) -> Plan:
        """Return how the client trains."""
        return plan

    def corrections(self) -> Mapping[str, Tensor] | None:
        """Return the corrections to each step's gradients, by parameter name.

        None if it corrects nothing.
        """
        return None

    def describe(self, header: pb.UpdateHeader) -> None:
        """Write the server's fields into an update's header."""

    def after(self, sent: Sent) -> Section | None:
        """Return the section that the update leaves.

        None = the section that was kept stays.

        Raises:
            CodecError: With the reason "non_finite", if a value does not fit into float32.
        """
        return None


def finite_section(values: Float32, words: Mapping[str, str], *, name: str) -> Section:
    """Return the section of a vector, [num_parameters], as `vector_in` reads it.

    Args:
        values: The vector.
        words: By which it is known.
        name: For the error.

    Raises:
        CodecError: With the reason "non_finite", if a value does not fit into float32.
    """
    if not np.isfinite(values).all():
        raise CodecError("non_finite", f"a value of {name} does not fit into float32")
    return Section({_VALUES: torch.from_numpy(values)}, words)


def vector_in(section: Section) -> Float32:
    """Return the vector of a section that `finite_section` has made."""
    values: Float32 = section.tensors[_VALUES].numpy()
    return values


def by_parameter(values: Float32, schema: Schema) -> dict[str, Tensor]:
    """Return values, [num_parameters], as a tensor for each parameter, in its shape."""
    whole = torch.from_numpy(values)
    return {entry.name: whole[place].view(entry.shape) for entry, place in schema.spans("parameter")}
