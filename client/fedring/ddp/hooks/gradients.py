"""What a hook works on: a bucket's gradients, by names."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._distributed_c10d import GradBucket


@dataclass(frozen=True, slots=True, eq=False)
class Gradients:
    """Tensors that are sent together, one after another in one buffer."""

    names: Sequence[str]
    shapes: Sequence[torch.Size]
    buffer: Tensor  # [n] of any float dtype

    def flat(self) -> list[Tensor]:
        """Each tensor as a view [numel] of the buffer."""
        return list(torch.split(self.buffer, self.sizes()))

    def sizes(self) -> list[int]:
        """The number of entries of each tensor."""
        return [shape.numel() for shape in self.shapes]


class Names:
    """What a state calls the parameters of a bucket: by their names, or, unbound, by the bucket's index and place."""

    def __init__(self, named_parameters: Iterable[tuple[str, Tensor]] | None = None) -> None:
        self.bound = named_parameters is not None
        self.parameters = {name: tensor for name, tensor in named_parameters or () if tensor.requires_grad}
        self._names = {id(tensor): name for name, tensor in self.parameters.items()}

    def of(self, bucket: GradBucket) -> Gradients:
        """The gradients of `bucket`."""
        parameters = bucket.parameters()
        names = [self._name(parameter, bucket.index(), place) for place, parameter in enumerate(parameters)]
        return Gradients(names, [parameter.shape for parameter in parameters], bucket.buffer())

    def _name(self, parameter: Tensor, index: int, place: int) -> str:
        if not self.bound:
            return f"bucket {index}, {place}"
        try:
            return self._names[id(parameter)]
        except KeyError:
            shape = tuple(parameter.shape)
            raise ValueError(
                f"a parameter of shape {shape} is not among the named_parameters of the hook's state; "
                "a state that was loaded whole is bound anew with bind(model.named_parameters())"
            ) from None
