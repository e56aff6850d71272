"""The gradients of a bucket, by the names of their parameters.

Hooks work on them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedring.c10d import GradBucket


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
    """

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]] | None = None) -> None:
        self.bound = named_parameters is not None
        self.parameters = {name: tensor for name, tensor in named_parameters or () if tensor.requires_grad}
        self._names = {id(tensor): name for name, tensor in self.parameters.items()}

    def of(self, bucket: GradBucket) -> Gradients:
        """Return the gradients of a bucket.

        Raises:
            ValueError: If the state is bound, and a parameter of the bucket is not among its named parameters.
        """
        parameters = bucket.parameters()
        if self.bound:
            names = [self.name_of(parameter) for parameter in parameters]
        else:
            names = [f"bucket {bucket.index()}, {place}" for place in range(len(parameters))]
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
