"""SCAFFOLD at the client: local steps corrected by control variates.

`fedring.train.scaffold` has the formulas. The client's own control variate, c_i, belongs to its newest accepted update,
and is never sent. Which update has left it goes into the next update's header, so that the server notices if it was
lost or put back.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from fedring.client.transfer.kept import Section
from fedring.client.transforms.interface import (
    Float32,
    RoundStart,
    Sent,
    Transform,
    by_parameter,
    finite_section,
    vector_in,
)
from fedring.train.scaffold import local_steps, next_own
from fedring.v1 import federation_pb2 as pb


@dataclass(frozen=True, slots=True, eq=False)
class OwnControl:
    """A control variate of this client."""

    left_by: str  # the name of an update
    values: Float32  # [num_parameters]


class Scaffold(Transform):
    """The control variates of one round."""

    name: ClassVar[str] = "scaffold"

    def __init__(self, start: RoundStart, kept: Section | None, args: Mapping[str, object]) -> None:
        self._command, self._schema = start.command, start.schema
        wanted = start.command.control
        size = start.schema.num_parameters
        self._control = start.fetch(wanted.digest) if wanted.digest else np.zeros(size, np.float32)
        self._words = {"run": start.command.run_id, "line": wanted.line}
        self._own = self._own_in(kept)

    def corrections(self) -> dict[str, Tensor]:
        """Return c - c_i; nothing without a c_i."""
        return {} if self._own is None else by_parameter(self._control - self._own.values, self._schema)

    def describe(self, header: pb.UpdateHeader) -> None:
        """See Transform.describe."""
        previous = self._own.left_by if self._own else ""
        header.control.CopyFrom(pb.UsedControl(line=self._words["line"], previous=previous))

    def after(self, sent: Sent) -> Section:
        """Return the control variate that an update leaves.

        The server computes its part from the same values.
        """
        command = self._command
        steps = local_steps(sent.samples, epochs=command.epochs, batch_size=command.batch_size)
        own = self._own.values if self._own else None
        with np.errstate(over="ignore"):
            values = next_own(own, self._control, sent.delta, steps=steps, lr=command.lr)
        return finite_section(values, self._words | {"left_by": sent.update.offer.name}, name="the control variate")

    def _own_in(self, kept: Section | None) -> OwnControl | None:
        """Return the client's control variate, or None.

        None if there is none of this line.
        """
        if kept is None or not self._words.items() <= kept.words.items():
            return None
        values = vector_in(kept)
        return OwnControl(kept.words["left_by"], values) if values.shape == self._control.shape else None
