"""A torch model as a schema and two flat vectors.

This is how models travel.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedring.codec.digest import Digest
from fedring.codec.schema import Entry, Schema, Vectors
from fedring.train.errors import SeamError
from fedring.train.tensors.sharing import Sharing

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_DTYPES = {str(each).removeprefix("torch."): each for each in vars(torch).values() if isinstance(each, torch.dtype)}

_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_SHOWN = 20  # the most names in an error
_Value = TypeVar("_Value", np.float32, np.float64)


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of a model: shared, private and frozen."""

    shared: Schema  # what travels: the server's model, and all updates, consist of these
    private: Schema  # each client has its own values
    frozen: Schema  # all sides have the same values, which nobody changes

    @property
    def not_frozen(self) -> Schema:
        """The tensors that training may change: shared and private ones."""
        return Schema(self.shared.entries + self.private.entries)


class SharedTensors:
    """The shared tensors of one model, found again without a walk.

    It is for models that are filled and read thousands of times a second, and whose modules stay the same meanwhile.
    What a forward pass puts in the place of a parameter or a buffer is found all the same.

    Args:
        model: The model.
        schema: Its shared tensors, as split() has returned them.
    """

    def __init__(self, model: nn.Module, schema: Schema) -> None:
        self._model, self._schema = model, schema
        self._filled: tuple[Vectors, list[Tensor]] | None = None  # the vectors of the last fill(), divided
        found = dict(tensors_of(model))
        places = {entry.name: _place_of(model, entry.name) for entry in schema.entries}
        # A state dict may have hooks, or names that are no places: such a model is walked each time.
        self._known = all(name in found and found[name] is at.get(key) for name, (at, key) in places.items())
        by_role = [[places[entry.name] for entry, _ in schema.spans(role)] for role in ("parameter", "buffer")]
        self._parameters, self._buffers = by_role

    def fill(self, vectors: Vectors) -> None:
        """Do as fill()."""
        tensors = self._tensors()
        if tensors is None:
            return fill(self._model, self._schema, vectors)
        if self._filled is None or self._filled[0] is not vectors:
            self._filled = vectors, [values for _, values in values_of(self._schema, vectors)]
        with torch.no_grad():
            for tensor, values in zip([*tensors[0], *tensors[1]], self._filled[1], strict=True):
                tensor.copy_(values)

    def read(self) -> Vectors:
        """Do as read_vectors()."""
        tensors = self._tensors()
        if tensors is None:
            return read_vectors(self._model, self._schema.names)
        parameters, buffers = tensors
        return Vectors(_flat(parameters, np.float32), _flat(buffers, np.float64))

    def _tensors(self) -> tuple[list[Tensor], list[Tensor]] | None:
        """Return the parameters and the buffers, in their order.

        None if their places are not known.
        """
        if not self._known:
            return None
        try:
            return [at[key] for at, key in self._parameters], [at[key] for at, key in self._buffers]
        except KeyError:  # A module has lost a tensor: the walk finds out what that means.
            return None


def _place_of(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Return the dict and the key of a tensor.

    The dict is empty if the name is no place.
    """
    path, _, key = name.rpartition(".")
    try:
        module = model.get_submodule(path)
    except AttributeError:
        return {}, key
    return module._parameters if key in module._parameters else module._buffers, key


def schema_of(model: nn.Module, names: Collection[str] | None = None) -> Schema:
    """Return the schema of a model.

    It has the model's tensors in the order of its state dict; a tied tensor counts once.

    Args:
        model: The model.
        names: The tensors that count; None = all.

    Raises:
        SeamError: With the reason unsupported_state, unsupported_dtype or lazy_parameter, if the state dict holds
            something that cannot travel.
    """
    return Schema(tuple(_entry(name, t) for name, t in tensors_of(model) if names is None or name in names))


def split(model: nn.Module, sharing: Sharing) -> Parts:
    """Divide a model's tensors into shared, private and frozen ones.

    Each part keeps the model's order.

    Raises:
        SeamError: As schema_of() raises it. Frozen tensors may be of any dtype.
    """
    shared: list[Entry] = []
    private: list[Entry] = []
    frozen: list[Entry] = []
    for name, tensor in tensors_of(model):
        if sharing.frozen_stay and isinstance(tensor, nn.Parameter) and not tensor.requires_grad:
            frozen.append(_entry(name, tensor, stays=True))
        else:
            (shared if sharing.shares(name) else private).append(_entry(name, tensor))
    return Parts(Schema(tuple(shared)), Schema(tuple(private)), Schema(tuple(frozen)))


def check_sharing(model: nn.Module, sharing: Sharing) -> Parts:
    """Return the result of split(), if it fits a job.

    Raises:
        SeamError: As split() raises it, or with the reason bad_sharing, if a glob matches no tensor, or if no parameter
            would be shared. The text begins with the key.
    """
    names = [name for name, _ in tensors_of(model)]
    if (found := sharing.unmatched(names)) is not None:
        key, glob = found
        near = get_close_matches(glob, names, n=1)
        hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(names[:_SHOWN])}"
        raise SeamError("bad_sharing", f"{key}: {glob!r} matches no tensor of the model: {hint}")
    parts = split(model, sharing)
    if names and not parts.shared.num_parameters:
        what = "shared, private and frozen parameters" if parts.frozen.entries else "shared and private"
        raise SeamError("bad_sharing", f"shared: {what} leave no parameter of the model to share: let some travel")
    return parts


def frozen_digest(model: nn.Module, frozen: Schema) -> str:
    """Return the name of the values of frozen tensors, or "".

    It is "" without any (FORMATS.md, "Digest of frozen tensors").
    """
    if not frozen.entries:
        return ""
    digest, tensors = Digest(), dict(tensors_of(model))
    digest.update(frozen.json)
    for entry in frozen.entries:
        values = tensors[entry.name].detach().cpu().contiguous().reshape(-1)
        digest.update(values.view(torch.uint8).numpy().data)
    return digest.name


def has_frozen(model: nn.Module, frozen: Schema, digest: str) -> bool:
    """Return whether a model has frozen tensors with these values.

    `digest` is the result of frozen_digest() for the values.
    """
    names = {name for name, _ in tensors_of(model)}
    return names >= frozen.names and frozen_digest(model, frozen) == digest


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the model's own tensors with their names in the schema.

    A tied tensor comes once, under its first name.

    Raises:
        SeamError: With the reason unsupported_state, if the state dict holds something that is no tensor.
    """
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise SeamError("unsupported_state", f"{name} is a {type(tensor).__name__}: keep it out of the state dict.")
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def read_vectors(model: nn.Module, names: Collection[str] | None = None) -> Vectors:
    """Return copies of a model's values.

    They are parameters [n] as float32, and buffers [m] as float64.

    Args:
        model: The model.
        names: The tensors to read, as for schema_of().
    """
    tensors: dict[str, list[Tensor]] = {"parameter": [], "buffer": []}
    for name, tensor in tensors_of(model):
        if names is None or name in names:
            tensors[_role(tensor)].append(tensor)
    return Vectors(_flat(tensors["parameter"], np.float32), _flat(tensors["buffer"], np.float64))


def read_tensors(model: nn.Module, names: Collection[str]) -> dict[str, Tensor]:
    """Return copies of some of a model's tensors, by name.

    They are on the CPU and in their own dtypes.
    """
    own = dict(tensors_of(model))
    return {name: own[name].detach().to("cpu", copy=True).contiguous() for name in names}


def write_tensors(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write values into the tensors of a model by name.

    Their shapes must be those of the model's tensors.
    """
    own = dict(tensors_of(model))
    with torch.no_grad():
        for name, tensor in tensors.items():
            own[name].copy_(tensor)


def write_vectors(model: nn.Module, schema: Schema, vectors: Vectors, *, partial: bool = False) -> None:
    """Write values into a model, cast to its dtypes.

    Values of integer tensors are rounded.

    Args:
        model: The model to change.
        schema: The schema of the vectors, which must be that of the model.
        vectors: The values.
        partial: The model may have further tensors, which keep their values.

    Raises:
        SeamError: With the reason wrong_schema, if the model or a vector does not fit the schema.
    """
    if difference := schema.difference(schema_of(model, schema.names if partial else None)):
        raise SeamError("wrong_schema", f"The model does not fit the schema: {difference}.")
    fill(model, schema, vectors)


def fill(model: nn.Module, schema: Schema, vectors: Vectors) -> None:
    """Write values like write_vectors(), without comparing the schema.

    The schema was just read from this model.
    """
    tensors = dict(tensors_of(model))
    with torch.no_grad():
        for entry, values in values_of(schema, vectors):
            tensors[entry.name].copy_(values)


def values_of(schema: Schema, vectors: Vectors) -> Iterator[tuple[Entry, Tensor]]:
    """Yield each entry of a schema with its shaped values.

    The values of parameters are float32 and those of buffers float64, whatever the entry's dtype is. Values of integer
    entries are rounded.

    Raises:
        SeamError: With the reason wrong_schema, if the size of a vector is not that of the schema.
    """
    # Both lengths follow from the schema, and a vector may come from a peer: compare before any slice.
    for role, vector, size in (
        ("parameter", vectors.parameters, schema.num_parameters),
        ("buffer", vectors.buffers, schema.num_buffers),
    ):
        if vector.shape != (size,):
            raise SeamError(
                "wrong_schema", f"The {role} vector has shape {vector.shape}, but the schema needs ({size},)."
            )
        for entry, span in schema.spans(role):
            values = _as_tensor(vector[span]).view(entry.shape)
            yield entry, values.round() if dtype_of(entry.dtype) in _INTEGERS else values


def dtype_of(name: str) -> torch.dtype:
    """Return torch's dtype of this name.

    The name may come from elsewhere, so it is looked up in a list.

    Raises:
        SeamError: With the reason wrong_schema, if there is none.
    """
    if name not in _DTYPES:
        raise SeamError("wrong_schema", f"torch has no dtype {name[:40]!a}.")
    return _DTYPES[name]


def _entry(name: str, tensor: Tensor, *, stays: bool = False) -> Entry:
    """Return the entry of a tensor.

    A tensor that stays where it is may have any dtype, because it is not sent.
    """
    role = _role(tensor)
    if is_lazy(tensor):
        raise SeamError("lazy_parameter", f"The {role} {name} has no shape yet: run the model once where it is built.")
    if not stays and tensor.dtype not in (_FLOATS if role == "parameter" else _FLOATS | _INTEGERS):
        raise SeamError("unsupported_dtype", f"The {role} {name} is of {tensor.dtype}: use a real floating-point type.")
    return Entry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), role)


def _role(tensor: Tensor) -> str:
    return "parameter" if isinstance(tensor, nn.Parameter) else "buffer"


def _flat(tensors: list[Tensor], dtype: type[_Value]) -> NDArray[_Value]:
    """Return the concatenated values of `tensors`, [sum of their sizes]."""
    if not tensors:
        return np.empty(0, dtype)
    sizes = [t.numel() for t in tensors]
    vector = np.empty(sum(sizes), dtype)  # numpy uses huge pages, torch does not: 100 MB take 20 ms instead of 90 ms
    whole = torch.from_numpy(vector)
    with torch.no_grad():
        if all(tensor.dtype == whole.dtype and tensor.device == whole.device for tensor in tensors):
            torch.cat([tensor.reshape(-1) for tensor in tensors], out=whole)
        else:
            for tensor, place in zip(tensors, torch.split(whole, sizes), strict=True):
                place.view(tensor.shape).copy_(tensor)
    return vector


def _as_tensor(values: NDArray[np.float32] | NDArray[np.float64]) -> Tensor:
    # torch has no read-only tensors and warns of read-only memory, so values from a file or a message are copied first.
    return torch.from_numpy(values if values.flags.writeable else values.copy())
