"""The private tensors of a client: their values, which belong to its newest accepted update and are never sent.

    private-….safetensors   for one model, which the name is a digest of: the values of the newest accepted update, or
                            the first ones, in the tensors' own dtypes
    update.private          the values that belong to the update in the spool
    private.part            the first values, while they are written

The metadata of all files say whose values they are, as `Line` does, and name the update that they belong to. `Spool`
decides when the second file replaces the first, namely when the server has accepted the update. The files of the
`KEEP_MODELS` newest models are kept.
"""

import hashlib
import logging
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from fedring.client.transfer.tensor_files import save_private
from fedring.codec.errors import CodecError
from fedring.codec.schema import Schema
from fedring.daemon.durable import sync
from fedring.train.state import read_tensors
from fedring.v1 import federation_pb2 as pb

log = logging.getLogger(__name__)

_UPDATE = "update"

KEEP_MODELS = 16
"""For how many models a client keeps private values: for those of which it has written values last."""


@dataclass(frozen=True, slots=True)
class Line:
    """The models that jobs have made one from another, beginning with a new one. Private values belong to one line."""

    run_id: str
    model: bytes  # the hash of the schema of the shared tensors; hashed again, if the job has [sample_dp]
    after: tuple[int, int]  # the epoch and the number of the last round before it: the same in all jobs of the line


@dataclass(frozen=True, slots=True, eq=False)
class PrivateValues:
    """Copies of the values of private tensors."""

    line: Line
    schema: Schema
    tensors: Mapping[str, Tensor]  # on the CPU, by name


def line_of(command: pb.TrainCmd | pb.EvaluateCmd) -> Line:
    """Return the line of the model that a command names.

    Jobs with [sample_dp] have lines of their own: values that were trained without the noise must not come into it.
    """
    model = command.schema_hash
    if command.job.sample_dp:
        model = hashlib.sha256(b"sample_dp" + model).digest()
    return Line(command.run_id, model, (command.residual_after_epoch, command.residual_after))


def check_finite(tensors: Mapping[str, Tensor]) -> None:
    """Check that training did not diverge: a client would begin each later round with values that are not finite.

    Raises:
        CodecError: With the reason non_finite, if a value is not finite.
    """
    for name, tensor in tensors.items():
        if not torch.isfinite(tensor).all():
            raise CodecError("non_finite", f"a value of the private tensor {name} is not finite")


def check_own(own: Mapping[str, Tensor], schema: Schema) -> None:
    """Check that the tensors of a client's own model are those that training may change.

    Raises:
        CodecError: With the reason wrong_schema, if they are not.
    """
    for entry in schema.entries:
        if entry.name not in own or tuple(own[entry.name].shape) != entry.shape:
            raise CodecError("wrong_schema", f"own has no tensor {entry.name} of the shape {list(entry.shape)}")


class PrivateState:
    """The files of private values in one state folder, which the caller has locked.

    Args:
        folder: The folder.
        kind: What the names of the files begin with, or end in: the values may be those of a client's own model, too.
    """

    def __init__(self, folder: Path, kind: str = "private") -> None:
        self._folder, self._kind = folder, kind
        self._update_file = folder / f"update.{kind}"
        self._part = folder / f"{kind}.part"
        self._part.unlink(missing_ok=True)  # It was being written when the process was killed.
        self._first: dict[int, dict[str, Tensor]] = {}  # of each module or array that is still alive, by its id

    def first_of(self, model: nn.Module, schema: Schema, owner: object) -> Mapping[str, Tensor]:
        """Return the values that private tensors had when they were seen first in this process.

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

    def load(self, line: Line, schema: Schema) -> PrivateValues | None:
        """Return the values that a round or an evaluation begins with; None if the model keeps those that it has.

        Args:
            line: The line of the model. Values of another one are not used.
            schema: The private tensors. Values of others are not used.
        """
        wanted = _metadata(line, schema)
        file = self._folder / self._name(wanted)
        try:
            with safe_open(file, framework="pt") as opened:
                if not wanted.items() <= (opened.metadata() or {}).items():
                    return None
                tensors = {entry.name: opened.get_tensor(entry.name) for entry in schema.entries}
            os.utime(file)  # those that are used are kept
            return PrivateValues(line, schema, tensors)
        except FileNotFoundError:
            return None
        except SafetensorError as error:
            log.warning("the private values in %s are damaged and not used: %s", file, error)
            return None

    def begin(self, values: PrivateValues) -> None:
        """Note the first values, so that they are found again if the update of the round does not count."""
        _write(self._part, values, "")  # The other file may hold the values of an update that is still to be delivered.
        self._place(self._part, self._name(_metadata(values.line, values.schema)))

    def spool(self, values: PrivateValues, update: str) -> None:
        """Write the values that belong to the update that is about to be spooled, durably.

        Args:
            values: The values.
            update: The name of the update.
        """
        _write(self._update_file, values, update)

    def accept(self, update: str) -> None:
        """Make the values of the spooled update those of the client, durably, unless they became that before.

        After a power loss, the file may be damaged, or belong to another update than the one that is in the spool. Then
        the client goes on with the values that it has.

        Args:
            update: The name of the update.
        """
        try:
            with safe_open(self._update_file, framework="pt") as opened:
                metadata = opened.metadata() or {}
            if metadata.get(_UPDATE) != update:
                raise ValueError(f"they belong to the update {metadata.get(_UPDATE)!r:.80}")
        except FileNotFoundError:
            return
        except (SafetensorError, ValueError) as error:
            log.warning("the %s values of an accepted update are lost, and those before it stay: %s", self._kind, error)
            self._update_file.unlink()
            return
        self._place(self._update_file, self._name(metadata))
        sync(self._folder)

    def drop(self) -> None:
        """Drop the values of the spooled update."""
        self._update_file.unlink(missing_ok=True)

    def _place(self, written: Path, name: str) -> None:
        """Give a file its name, and delete the oldest files of other models."""
        placed = written.rename(self._folder / name)
        others = [path for path in self._folder.glob(f"{self._kind}-*.safetensors") if path != placed]
        for path in sorted(others, key=lambda path: path.stat().st_mtime_ns, reverse=True)[KEEP_MODELS - 1 :]:
            path.unlink()

    def _name(self, metadata: Mapping[str, str]) -> str:
        """Return the name of the file for one model: for one schema of shared tensors, and one of private tensors."""
        model = f"{metadata['model']} {metadata['schema']}"
        return f"{self._kind}-{hashlib.sha256(model.encode()).hexdigest()[:16]}.safetensors"


def _write(path: Path, values: PrivateValues, update: str) -> None:
    save_private(save_file, path, values.tensors, _metadata(values.line, values.schema) | {_UPDATE: update})
    sync(path)


def _metadata(line: Line, schema: Schema) -> dict[str, str]:
    epoch, round_ = line.after
    own = {"run": line.run_id, "model": line.model.hex(), "epoch": str(epoch), "round": str(round_)}
    return own | {"schema": schema.hash.hex()}
