"""The private tensors of a client: their values, which belong to its newest accepted update and are never sent.

    private.safetensors     the values of the newest accepted update, or the first ones, in the tensors' own dtypes
    update.private          the values that belong to the update in the spool

The metadata of both files name the run, the hash of the private tensors' schema, and the round. `Spool` decides when
the second file replaces the first, namely when the server has accepted the update.
"""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fedring.codec.errors import CodecError
from fedring.codec.schema import Schema
from fedring.daemon.durable import sync
from fedring.train.state import tensors_of

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class PrivateValues:
    """Copies of the values of private tensors."""

    schema: Schema
    tensors: Mapping[str, Tensor]  # on the CPU, by name


def read_private(model: nn.Module, schema: Schema) -> PrivateValues:
    """Return copies of the values of a model's private tensors."""
    own = dict(tensors_of(model))
    names = (entry.name for entry in schema.entries)
    return PrivateValues(schema, {name: own[name].detach().to("cpu", copy=True).contiguous() for name in names})


def check_finite(values: PrivateValues) -> None:
    """Check that training did not diverge: a client would begin each later round with values that are not finite.

    Raises:
        CodecError: With the reason non_finite, if a value is not finite.
    """
    for name, tensor in values.tensors.items():
        if not torch.isfinite(tensor).all():
            raise CodecError("non_finite", f"a value of the private tensor {name} is not finite")


def write_private(model: nn.Module, values: PrivateValues) -> None:
    """Write values into the private tensors of a model, which must have their shapes."""
    own = dict(tensors_of(model))
    with torch.no_grad():
        for name, tensor in values.tensors.items():
            own[name].copy_(tensor)


class PrivateState:
    """The files of private values in one state folder, which the caller has locked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / "private.safetensors"
        self._update_file = folder / "update.private"

    def load(self, run_id: str, schema: Schema, *, after: int) -> PrivateValues | None:
        """Return the values that a round or an evaluation begins with; None if the model keeps those that it has.

        Args:
            run_id: The run.
            schema: The private tensors. Values of others are not used.
            after: Values that were noted in this round, or in an earlier one, belong to models that the job does not
                continue, and are not used.
        """
        try:
            with safe_open(self._file, framework="pt") as file:
                metadata = file.metadata() or {}
                if (metadata.get("run"), metadata.get("schema")) != (run_id, schema.hash.hex()):
                    return None
                if int(metadata["round"]) <= after:
                    return None
                return PrivateValues(schema, {entry.name: file.get_tensor(entry.name) for entry in schema.entries})
        except FileNotFoundError:
            return None
        except (SafetensorError, KeyError, ValueError) as error:
            log.warning("the private values in %s are damaged and not used: %s", self._file, error)
            return None

    def begin(self, values: PrivateValues, run_id: str, round_: int) -> None:
        """Note the first values, so that they are found again if the update of the round does not count."""
        self.spool(values, run_id, round_)
        self._update_file.rename(self._file)

    def spool(self, values: PrivateValues, run_id: str, round_: int) -> None:
        """Write the values that belong to the update that is about to be spooled. They are not synced."""
        metadata = {"run": run_id, "schema": values.schema.hash.hex(), "round": str(round_)}
        save_file(dict(values.tensors), self._update_file, metadata)

    def accept(self) -> None:
        """Make the values of the spooled update those of the client, durably, unless they became that before."""
        if self._update_file.exists():
            sync(self._update_file)
            self._update_file.rename(self._file)
            sync(self._folder)

    def drop(self) -> None:
        """Drop the values of the spooled update."""
        self._update_file.unlink(missing_ok=True)
