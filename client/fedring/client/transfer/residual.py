"""The residual of lossy encodings, as pure functions.

It is the sum of what they have left out so far, and goes into the next update.
"""

import logging

import numpy as np
import torch
from numpy.typing import NDArray

from fedring.client.transfer.kept import Section, Sections
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

RESIDUAL = "residual"
"""The name of its section."""

Residual = NDArray[np.float32]  # [num_parameters]

_LARGEST = 1e30  # No server takes an update with a larger value.


def residual_in(
    kept: Sections, run_id: str, schema: bytes, last: pb.LastAccepted, *, after: tuple[int, int] = (0, 0)
) -> tuple[Residual | None, str]:
    """Return the residual for the next update, and why it is missing.

    The reason is a sentence if a residual is kept that cannot be used; else it is empty.

    Args:
        kept: What past updates have left.
        run_id: The run of the next update.
        schema: The schema name by which residuals for the next update are known.
        last: The newest update of this client that the server has accepted. If the residual was left by an older one,
            it was sent in the meantime. If it was left by a newer one, the server has been restored.
        after: An epoch and a round. The residuals of this round, and of earlier ones, belong to models that the job
            does not continue.
    """
    section = kept.get(RESIDUAL)
    if section is None:
        return None, ""
    words = section.words
    if (words["run"], words["schema"]) != (run_id, schema.hex()):
        return None, "it belongs to another run, or to updates of another kind"
    epoch, round_, name = int(words["epoch"]), int(words["round"]), words["name"]
    if last.name not in ("", name) and (epoch, round_) <= (last.epoch, last.round):
        return None, f"an update of round {last.round} was accepted since round {round_}, which has left it"
    if (epoch if after[0] else 0, round_) <= after:  # An older server names no epoch: the numbers of rounds decide.
        return None, f"this job does not continue the model of round {round_}, which has left it"
    values: Residual = section.tensors[RESIDUAL].numpy()
    return values, ""


def with_residual(
    kept: Sections, residual: Residual | None, header: pb.UpdateHeader, update: str, *, schema: bytes
) -> Sections:
    """Return the kept sections after an update with a residual is accepted.

    Args:
        kept: What past updates have left.
        residual: What the update leaves out, [num_parameters]; None = nothing.
        header: Of the update.
        update: Its name.
        schema: The schema name by which the residual is known.
    """
    others = {name: section for name, section in kept.items() if name != RESIDUAL}
    if residual is None:
        return others
    # A server that chose enormous steps has done this: no later update with such a residual could be sent. With a NaN,
    # both comparisons are false.
    if not (residual.max(initial=0) <= _LARGEST and residual.min(initial=0) >= -_LARGEST):
        log.warning("dropped the residual of past updates: a value is not finite, or beyond 1e30")
        return others
    words = {"run": header.run_id, "schema": schema.hex()}
    words |= {"epoch": str(header.epoch), "round": str(header.round), "name": update}
    return others | {RESIDUAL: Section({RESIDUAL: torch.from_numpy(residual)}, words)}
