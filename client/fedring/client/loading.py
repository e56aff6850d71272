"""Loads a command's model into the user's module.

The module has shared, private and frozen tensors.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase

import numpy as np
import torch
from torch import Tensor, nn

from fedring.client.errors import WrongModel
from fedring.client.session.link import ServerLink
from fedring.client.transfer.fetch import ModelFetcher
from fedring.client.transfer.kept import KeptFiles
from fedring.client.transfer.own_values import PRIVATE, FirstValues, line_of, section_of, values_in
from fedring.client.transfer.residual import Residual
from fedring.codec.schema import Schema, Vectors
from fedring.train.tensors.arrays import Arrays, as_module, copy_back
from fedring.train.tensors.download import HeldModel
from fedring.train.tensors.sharing import Sharing
from fedring.train.tensors.state import (
    Parts,
    fill,
    has_frozen,
    read_vectors,
    split,
    tensors_of,
    values_of,
    write_tensors,
)
from fedring.v1 import federation_pb2 as pb

_KEPT = "private_tensors"  # the reason to refuse a job that would share what this client keeps to itself
_SHOWN = 20  # the most names in an error
_FAR = 1000  # What updates leave out is a part of what was learned, which is not so much larger than the model.


@dataclass(frozen=True, slots=True, eq=False)
class Loaded:
    """The values and the tensors of a loaded model."""

    base: HeldModel  # the values of the shared tensors
    start: HeldModel  # those that the training begins with
    parts: Parts  # the tensors of the module
    frozen_digest: str  # of the frozen ones; empty without any


class ModelLoader:
    """Loads models; it belongs to the user's thread.

    Args:
        link: The session to the server.
        models: What fetches and holds models.
        kept: What accepted updates have left, with the values of this client's private tensors.
        private: Globs over the tensors that never leave this client, whatever a job says.
    """

    def __init__(self, link: ServerLink, models: ModelFetcher, kept: KeptFiles, private: Collection[str]) -> None:
        self.models = models
        self._link, self._kept, self._private = link, kept, tuple(private)
        self._first = FirstValues()

    def load(
        self,
        command: pb.TrainCmd | pb.EvaluateCmd,
        target: nn.Module | Arrays,
        *,
        ended: Callable[[], str],
        left_out: Residual | None = None,
    ) -> Loaded:
        """Fetch the model that a command names, and fill a module.

        Shared tensors get the server's values, and private tensors those of this client's newest accepted update.
        Before there is one in the line of models, private tensors get the values that they had when a model was loaded
        into this module for the first time.

        Args:
            command: The command.
            target: The module, or the arrays, to fill.
            ended: Returns why the model is no longer wanted; empty while it is.
            left_out: What the training begins with, in addition to the model, [num_parameters]; None = nothing.

        Raises:
            WrongModel: If other tensors are shared, or frozen tensors have other values than on the server, or a tensor
                that this client keeps to itself would be shared.
            RoundOver: If the model is no longer wanted, or cannot be fetched.
        """
        model = as_module(target)
        parts = split(model, sharing_of(command.job, self._private))
        _check_kept(model, parts.shared, self._private)
        self._link.session.begin(pb.ACTIVITY_FETCHING)
        fetched = self.models.at_hand(command, parts.shared)
        if fetched is None:
            fetched = self._link.call(lambda: self.models.fetch(command.model_digest, parts.shared, ended))
        if command.job.frozen_digest and not has_frozen(model, parts.frozen, command.job.frozen_digest):
            raise WrongModel(
                f"the {len(parts.frozen.entries)} frozen tensors of this model have other values than on the server: "
                "let its callable load the same ones everywhere, or set send_frozen = true in the job",
                reason="wrong_base",
            )
        fill(model, parts.shared, fetched.vectors)
        start = fetched if left_out is None else add_left_out(model, fetched, left_out)
        if parts.private.entries:
            self._fill_private(command, model, parts, target)
        copy_back(model, target)
        return Loaded(fetched, start, parts, command.job.frozen_digest)

    def _fill_private(
        self, command: pb.TrainCmd | pb.EvaluateCmd, model: nn.Module, parts: Parts, target: nn.Module | Arrays
    ) -> None:
        owner = target if isinstance(target, nn.Module) else next(iter(target.values()))  # no mapping is kept alive
        first, line = self._first.of(model, parts.private, owner), line_of(command)
        kept = self._kept.load(line.key)
        values = values_in(kept, PRIVATE, line, parts.private)
        if values is None:  # noted, so that the same are found again if the update of the round does not count
            values = first
            self._kept.put(line.key, {**kept, PRIVATE: section_of(line, parts.private, first)})
        write_tensors(model, values)


def add_left_out(model: nn.Module, base: HeldModel, left_out: Residual) -> HeldModel:
    """Fill a module with a model plus the client's residual.

    Training begins so if the round's protection says so (`Protection.trains_on_residual`).

    Args:
        model: The module.
        base: The model.
        left_out: What the client keeps for its next update, [num_parameters].

    Returns:
        The values that the module has then.
    """
    fill(model, base.schema, Vectors(base.vectors.parameters + left_out, base.vectors.buffers))
    return HeldModel(base.digest, base.schema, read_vectors(model, base.schema.names))  # rounded to the tensors' dtypes


def is_spoiled(loaded: Loaded) -> bool:
    """Return whether training would begin far from its model.

    Only a damaged residual causes that.
    """
    if loaded.start is loaded.base:
        return False
    sizes = [float(np.abs(held.vectors.parameters).max(initial=1)) for held in (loaded.base, loaded.start)]
    return not sizes[1] <= _FAR * sizes[0]  # nor if it is not finite


def differs_from(first: Mapping[str, Tensor], base: HeldModel) -> str:
    """Return the first shared tensor with other values than the model has.

    Empty if all are the same. Processors round differently, so values need not be equal to the last bit.

    Args:
        first: The values of a model as it was built, by the tensors' names.
        base: The model that a round starts from.
    """
    for entry, values in values_of(base.schema, base.vectors):
        found = first.get(entry.name)
        if found is None or not torch.allclose(found.double().cpu(), values.double(), rtol=1e-3, atol=1e-5):
            return entry.name
    return ""


def _check_kept(model: nn.Module, shared: Schema, private: Collection[str]) -> None:
    """Check the client's own globs over private tensors.

    Each must match a tensor, and no private tensor may be shared under another name.

    Raises:
        WrongModel: With the reason private_tensors: a glob with a typing error would let everything travel.
    """
    firsts = {id(tensor): name for name, tensor in tensors_of(model)}
    names = {alias: firsts[id(tensor)] for alias, tensor in model.state_dict(keep_vars=True).items()}
    for glob in private:
        matched = [name for name in names if fnmatchcase(name, glob)]
        if not matched:
            has = ", ".join(list(firsts.values())[:_SHOWN])
            raise WrongModel(f"private: {glob!r} of this client matches no tensor of the model: it has {has}", _KEPT)
        for name in matched:
            if names[name] in shared.names:
                detail = f"private: {glob!r} of this client matches {name}, which is the same tensor as {names[name]}"
                raise WrongModel(f"{detail}: give that name, too, because it would be shared", _KEPT)


def check_frozen(model: nn.Module, loaded: Loaded) -> None:
    """Check that a user's code has not changed frozen tensors.

    Raises:
        WrongModel: With the reason frozen_changed, if it has.
    """
    if loaded.frozen_digest and not has_frozen(model, loaded.parts.frozen, loaded.frozen_digest):
        raise WrongModel(
            "the values of frozen tensors were changed here, which no other client would know of: let trainers and "
            "evaluators change only what requires a gradient, or set send_frozen = true in the job",
            reason="frozen_changed",
        )


def sharing_of(job: pb.JobSpec, private: Collection[str]) -> Sharing:
    """Return the client's sharing of the tensors of a job's model.

    Args:
        job: The job. One of an older server shares all tensors.
        private: Globs over further tensors that are private.
    """
    return Sharing(tuple(job.shared) or ("*",), (*job.private, *private), frozen_stay=bool(job.frozen_digest))
