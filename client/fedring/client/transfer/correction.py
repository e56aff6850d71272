"""The correction of local steps by SCAFFOLD's control variates, as a client computes it. No I/O."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedring.client.transfer.control import OwnControl
from fedring.client.transfer.download import HeldModel
from fedring.client.transfer.update import Update
from fedring.codec import CodecError, decode
from fedring.codec.schema import Schema
from fedring.train.scaffold import local_steps, next_own
from fedring.v1 import federation_pb2 as pb


def load_correction(
    wanted: pb.Control, schema: Schema, own: OwnControl | None, fetch: Callable[[str, Schema], HeldModel]
) -> "Correction":
    """Return what corrects the steps of a round.

    Args:
        wanted: What the command says of it.
        schema: The shared tensors.
        own: The client's control variate; None = there is none.
        fetch: Fetches the server's control variate, by its digest and the schema of the parameters.
    """
    control = np.zeros(schema.num_parameters, np.float32)
    if wanted.digest:
        control = fetch(wanted.digest, schema.without_buffers).vectors.parameters
    return Correction(schema, wanted.line, control, own)


@dataclass(frozen=True, slots=True, eq=False)
class Correction:
    """What corrects the steps of one round."""

    schema: Schema  # of the shared tensors
    line: str  # of the server's control variate
    control: NDArray[np.float32]  # the server's, c, [num_parameters]
    own: OwnControl | None  # the client's, c_i; None = there is none, and nothing is corrected

    def by_name(self) -> dict[str, Tensor]:
        """Return what to add to the gradient of each parameter, c - c_i, in its shape; none without a c_i."""
        if self.own is None:
            return {}
        difference = torch.from_numpy(self.control - self.own.values)
        return {entry.name: difference[place].view(entry.shape) for entry, place in self.schema.spans("parameter")}

    @property
    def used(self) -> pb.UsedControl:
        """What the update's header says of it."""
        return pb.UsedControl(line=self.line, previous=self.own.left_by if self.own else "")

    def after(self, update: Update, command: pb.TrainCmd, samples: int) -> OwnControl:
        """Return the control variate that an update leaves. The server computes its part from the same values.

        Args:
            update: The update, as it is sent.
            command: The command that it answers.
            samples: How many samples were trained on.

        Raises:
            CodecError: With the reason "non_finite", if a value does not fit into float32.
        """
        packet = pb.UpdateHeader.FromString(update.offer.header).packets[0]
        payload = b"".join(update.parts)[: packet.bytes]
        delta = decode(payload, name=packet.encoding, length=self.schema.num_parameters)
        steps = local_steps(samples, epochs=command.epochs, batch_size=command.batch_size)
        own = self.own.values if self.own else None
        with np.errstate(over="ignore"):
            values = next_own(own, self.control, delta, steps=steps, lr=command.lr)
        if not np.isfinite(values).all():
            raise CodecError("non_finite", "a value of the control variate does not fit into float32")
        return OwnControl(self.line, update.offer.name, values)
