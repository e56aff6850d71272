"""The gradients of a bucket, by the names of their parameters.

Hooks work on them.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedring.c10d import GradBucket
from fedring.train.errors import SeamError


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """Tensors that are sent together, one after another in one buffer."""

    names: Sequence[str]
    shapes: Sequence[torch.Size]
    buffer: Tensor  # [n] of any float dtype

    def flat(self) -> list[Tensor]:
        """Return each tensor as a view [numel] of the buffer."""
        return list(torch.split(self.buffer, self.sizes()))

    def sizes(self) -> list[int]:
        """Return the number of entries of each tensor."""
        return [shape.numel() for shape in self.shapes]


class Names:
    """The names by which a state knows the parameters of a bucket.

    A bound state uses the names that the model gives its parameters. An unbound one, as in torch, uses the index of the
    bucket and the place in it.

    Raises:
        SeamError: With the reason unsupported_dtype, if a parameter that needs a gradient is complex.
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]] | None = None) -> None:
        self.bound = named_parameters is not None
        self.parameters = {name: tensor for name, tensor in named_parameters or () if tensor.requires_grad}
        self._names = {id(tensor): name for name, tensor in self.parameters.items()}
        _check_real(self.parameters)

    def of(self, bucket: GradBucket) -> Gradients:
        """Return the gradients of a bucket.

        Raises:
            ValueError: If the state is bound, and a parameter of the bucket is not among its named parameters.
            SeamError: With the reason unsupported_dtype, if a parameter is complex.
        """
        parameters = bucket.parameters()
        if self.bound:
            names = [self.name_of(parameter) for parameter in parameters]
        else:
            names = [f"bucket {bucket.index()}, {place}" for place in range(len(parameters))]
            _check_real(dict(zip(names, parameters, strict=True)))
        return Gradients(names, [parameter.shape for parameter in parameters], bucket.buffer())

    def name_of(self, parameter: Tensor) -> str:
        """Return the name of a parameter, which is found by its identity.

        Raises:
            ValueError: If it is not among the named parameters.
        """
        try:
            return self._names[id(parameter)]
        except KeyError:
            shape = tuple(parameter.shape)
            raise ValueError(
                f"a parameter of shape {shape} is not among the named_parameters of the hook's state; "
                "after loading a state as an object, call bind(model.named_parameters())"
            ) from None


def _check_real(parameters: Mapping[str, Tensor]) -> None:
    """Raise SeamError if a parameter is complex.

    A bucket has two values for each of its entries.
    """
    for name, tensor in parameters.items():
        if tensor.is_complex():
            dtype = f"The parameter {name} is of {tensor.dtype}, whose gradients this hook cannot send"
            raise SeamError("unsupported_dtype", f"{dtype}: use a real floating-point type, or another hook.")
