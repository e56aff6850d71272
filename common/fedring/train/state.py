"""A torch model as the schema and the two flat vectors that travel."""

from collections.abc import Iterator
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from fedring.codec.schema import Entry, Schema, Vectors
from fedring.train.errors import SeamError

_FLOATS = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
_INTEGERS = frozenset({torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64})
_Value = TypeVar("_Value", np.float32, np.float64)


def schema_of(model: nn.Module) -> Schema:
    """What `model` consists of, in the order of its state dict; a tied tensor counts once, by its first name."""
    return Schema(tuple(_entry(name, tensor) for name, tensor in tensors_of(model)))


def tensors_of(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The tensors of the schema, themselves, by name."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if not isinstance(tensor, Tensor):
            raise SeamError("unsupported_state", f"{name} is a {type(tensor).__name__}: keep it out of the state dict.")
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


def read_vectors(model: nn.Module) -> Vectors:
    """Copies of the values of `model`."""
    tensors: dict[str, list[Tensor]] = {"parameter": [], "buffer": []}
    for _, tensor in tensors_of(model):
        tensors[_role(tensor)].append(tensor)
    return Vectors(_flat(tensors["parameter"], np.float32), _flat(tensors["buffer"], np.float64))


def write_vectors(model: nn.Module, schema: Schema, vectors: Vectors) -> None:
    """Afterwards `model`, whose schema is `schema`, holds `vectors`, cast to its dtypes; integers are rounded."""
    if difference := schema.difference(schema_of(model)):
        raise SeamError("wrong_schema", f"The model does not fit the schema: {difference}.")
    fill(model, schema, vectors)


def fill(model: nn.Module, schema: Schema, vectors: Vectors) -> None:
    """As write_vectors, for a `schema` that was just read from this `model`."""
    tensors = dict(tensors_of(model))
    with torch.no_grad():
        for entry, values in values_of(schema, vectors):
            tensors[entry.name].copy_(values)


def values_of(schema: Schema, vectors: Vectors) -> Iterator[tuple[Entry, Tensor]]:
    """Each tensor of `schema` with its values from `vectors`, shaped; integers are rounded, in float64."""
    for role, vector, size in (
        ("parameter", vectors.parameters, schema.num_parameters),
        ("buffer", vectors.buffers, schema.num_buffers),
    ):
        if vector.shape != (size,):
            raise SeamError("wrong_schema", f"The {role} vector has shape {vector.shape} in the place of ({size},).")
        for entry, span in schema.spans(role):
            values = _as_tensor(vector[span]).view(entry.shape)
            yield entry, values.round() if getattr(torch, entry.dtype) in _INTEGERS else values


def _entry(name: str, tensor: Tensor) -> Entry:
    role = _role(tensor)
    if is_lazy(tensor):
        raise SeamError("lazy_parameter", f"The {role} {name} has no shape yet: run the model once where it is built.")
    if tensor.dtype not in (_FLOATS if role == "parameter" else _FLOATS | _INTEGERS):
        raise SeamError("unsupported_dtype", f"The {role} {name} is of {tensor.dtype}: use a real floating-point type.")
    return Entry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), role)


def _role(tensor: Tensor) -> str:
    return "parameter" if isinstance(tensor, nn.Parameter) else "buffer"


def _flat(tensors: list[Tensor], dtype: type[_Value]) -> NDArray[_Value]:
    """The values of `tensors`, one after the other, [sum of their sizes]."""
    sizes = [t.numel() for t in tensors]
    vector = np.empty(sum(sizes), dtype)  # numpy asks for huge pages, torch does not: 100 MB take 20 ms, not 90
    with torch.no_grad():
        for tensor, place in zip(tensors, torch.split(torch.from_numpy(vector), sizes), strict=True):
            place.view(tensor.shape).copy_(tensor)
    return vector


def _as_tensor(values: NDArray[np.float32] | NDArray[np.float64]) -> Tensor:
    # torch has no read-only tensors, and warns: values that came from a file or a message are copied first.
    return torch.from_numpy(values if values.flags.writeable else values.copy())
