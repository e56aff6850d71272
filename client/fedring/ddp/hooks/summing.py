"""Communication hooks without DistributedDataParallel.

They add up gradients over the replicas of a pipeline stage.

A hook takes a bucket of torch's, for which there is no constructor. `Bucket` has the methods that hooks use of it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fedring.ddp.hooks.by_name import ReadyHook

_BUCKET_BYTES = 25 << 20  # as in DistributedDataParallel


class Bucket:
    """Gradients in one buffer, as `torch.distributed.GradBucket` passes them to a hook."""

    def __init__(self, parameters: Sequence[Tensor], gradients: Sequence[Tensor], index: int, *, last: bool) -> None:
        self._parameters, self._index, self._last = list(parameters), index, last
        self._buffer = torch.cat([gradient.reshape(-1) for gradient in gradients])

    def index(self) -> int:
        """Return the number of the bucket within the step."""
        return self._index

    def buffer(self) -> Tensor:
        """Return all gradients, one after another, [n]."""
        return self._buffer

    def set_buffer(self, buffer: Tensor) -> None:
        """Replace the buffer."""
        self._buffer = buffer

    def gradients(self) -> list[Tensor]:
        """Return each gradient as a view in its parameter's shape."""
        parts = torch.split(self._buffer, [parameter.numel() for parameter in self._parameters])
        return [part.view_as(parameter) for part, parameter in zip(parts, self._parameters, strict=True)]

    def parameters(self) -> list[Tensor]:
        """Return the parameters whose gradients are in the bucket."""
        return self._parameters

    def is_last(self) -> bool:
        """Return whether this is the last bucket of the step."""
        return self._last


class HookedSum:
    """Adds up gradients over a group with a communication hook.

    It serves as the function `average` of a `fedring.pipeline` stage.

    Hooks return means, so the sums are the group's size times the hook's result.

    Args:
        ready: The hook and its state, which has the group.
        parameters: The parameters, in the order in which their gradients are passed.
        bucket_bytes: About the size of a bucket; equal on all workers of the group.
    """

    def __init__(self, ready: ReadyHook, parameters: Sequence[Tensor], *, bucket_bytes: int = _BUCKET_BYTES) -> None:
        self._ready, self._parameters = ready, list(parameters)
        self._ranges = list(_ranges(self._parameters, bucket_bytes))

    @torch.no_grad()
    def __call__(self, gradients: Sequence[Tensor]) -> None:
        """Replace gradients, in place, by their sums over the group.

        Args:
            gradients: One for each parameter, in its shape.
        """
        state, hook = self._ready
        buckets = [
            Bucket(self._parameters[at], gradients[at], index, last=index + 1 == len(self._ranges))
            for index, at in enumerate(self._ranges)
        ]
        futures = [hook(state, bucket) for bucket in buckets]  # type: ignore[arg-type]  # GradBucket has no constructor
        for at, future in zip(self._ranges, futures, strict=True):
            sizes = [parameter.numel() for parameter in self._parameters[at]]
            for gradient, part in zip(gradients[at], torch.split(future.wait(), sizes), strict=True):
                gradient.copy_(part.view_as(gradient)).mul_(state.group.size())
        state.end_step()


def _ranges(parameters: Sequence[Tensor], most_bytes: int) -> Iterator[slice]:
    """Divide the parameters into buckets of about `most_bytes`.

    A bucket has neighbours of one dtype and device.
    """
    start, room = 0, most_bytes
    for at, parameter in enumerate(parameters):
        before = parameters[at - 1]
        alike = (parameter.dtype, parameter.device) == (before.dtype, before.device)
        if at > start and (room < parameter.nbytes or not alike):
            yield slice(start, at)
            start, room = at, most_bytes
        room -= parameter.nbytes
    if len(parameters) > start:
        yield slice(start, len(parameters))
