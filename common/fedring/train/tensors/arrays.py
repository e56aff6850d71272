"""Models that are numpy arrays by name, not torch modules.

Examples are the coefficients of a classifier of scikit-learn. On the way and on the server, they are a model as any
other, whose tensors have these names and shapes, in this order, and are float32 parameters. In the client's memory, the
arrays may be of any type of floats.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

Arrays = Mapping[str, NDArray[Any]]
"""Arrays of floats by name, at least one. A name may have dots, as those of torch modules."""


def module_of_shapes(shapes: Mapping[str, Sequence[int]]) -> nn.Module:
    """Return a module of named parameters of zeros, without forward.

    Raises:
        ValueError: If there are no names, or a name or a shape cannot be that of a parameter.
    """
    return _module({name: torch.zeros(tuple(shape)) for name, shape in shapes.items()})


def as_module(model: nn.Module | Arrays) -> nn.Module:
    """Return a module with the values of `model`.

    It is the module itself, or a new one with a parameter for each array. An array of float32 shares its memory with
    its parameter, if it is contiguous and may be written to.

    Raises:
        ValueError: If there are no arrays, or one of them is not an array of floats.
    """
    if isinstance(model, nn.Module):
        return model
    return _module({name: _tensor(name, array) for name, array in model.items()})


def copy_back(module: nn.Module, model: nn.Module | Arrays) -> None:
    """Copy the values of as_module(model) into the arrays of `model`.

    Arrays that share memory with the module have them already.

    Raises:
        ValueError: If an array may not be written to.
    """
    if isinstance(model, nn.Module):
        return
    for name, array in model.items():
        values = module.get_parameter(name).detach().numpy()
        if not np.shares_memory(values, array):
            np.copyto(array, values, casting="same_kind")


def _tensor(name: str, array: object) -> Tensor:
    if not isinstance(array, np.ndarray) or array.dtype.kind != "f":
        kind = f"array of {array.dtype}" if isinstance(array, np.ndarray) else type(array).__name__
        raise ValueError(f"{name} is of the kind {kind}: give a numpy array of floats")
    with np.errstate(over="ignore"):  # what becomes infinite is refused when it is to be sent
        values = np.asarray(array, np.float32, order="C")
    return torch.from_numpy(values if values.flags.writeable else values.copy())


def _module(tensors: Mapping[str, Tensor]) -> nn.Module:
    if not tensors:
        raise ValueError("there are no arrays: give at least one")
    model = nn.Module()
    for name, tensor in tensors.items():
        if not isinstance(name, str):  # a user's mapping may have any keys
            raise ValueError(f"{name!r} cannot name an array: give text")
        *path, last = name.split(".")
        owner = model
        try:
            for part in path:
                if part not in dict(owner.named_children()):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            owner.register_parameter(last, nn.Parameter(tensor))
        except (KeyError, AttributeError) as error:
            raise ValueError(f"{name!r} cannot name an array: {error.args[0]}") from None
    return model
