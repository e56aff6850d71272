"""Gradients as 8-bit levels: a quarter of the bytes of float32.

The share of bytes does not depend on the number of workers.

Each worker is responsible for a share of every tensor. It receives all workers' levels of its share, takes the mean,
and sends it to all as levels again. What this second rounding leaves out counts as not sent by the worker that is
responsible, so that its error feedback makes up for both roundings. Shares and chunks depend on nothing but the size of
a tensor: other buckets give the same bits.

Each chunk of entries has one float32 scale, max|x| / 127. A chunk with NaN or infinity has a scale that is not finite,
and so are the values that are made of it.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.functional import pad

from fedring.c10d import GradBucket
from fedring.compress.correction import Feedback
from fedring.ddp.gradients import Gradients
from fedring.ddp.hooks.corrected import CorrectedState
from fedring.ddp.turns import Steps, started

_SCALE_BYTES = 4
_TOP = 127  # the largest level


class Int8State(CorrectedState):
    """The state of int8_hook: the errors of both roundings.

    Args:
        process_group: The group to exchange with; None is the default group.
        chunk: Entries that share a scale, a multiple of 4.
        feedback: The kind of error feedback (`fedring.compress.correction`).
        named_parameters: As from `model.named_parameters()`; without them the state is kept by the index of buckets.
    """

    kind = "int8"

    def __init__(
        self,
        process_group: dist.ProcessGroup | None,
        *,
        chunk: int = 256,
        feedback: Feedback = "ef",
        named_parameters: Iterable[tuple[str, Tensor]] | None = None,
    ) -> None:
        super().__init__(process_group, feedback=feedback, named_parameters=named_parameters)
        if chunk < 1 or chunk % _SCALE_BYTES:
            raise ValueError(f"chunk must be a multiple of {_SCALE_BYTES}, not {chunk}")
        self.chunk = chunk

    def steps(self, grads: Gradients) -> Steps:
        """See CorrectedState.steps."""
        if not grads.buffer.numel():  # parameters without entries
            return grads.buffer
        group, targets = self.group, self.targets(grads)
        world, rank, sizes = group.size(), group.rank(), grads.sizes()
        levels, scales = quantise(_shares(targets, world, self.chunk))
        sent = dequantise(levels, scales)
        leaving = _pack(levels, scales)
        arriving = torch.empty_like(leaving)
        work = dist.all_to_all_single(arriving, leaving, group=group, async_op=True)
        yield started(work, leaving.nbytes // world * (world - 1))
        mean = dequantise(*_unpack(arriving, self.chunk)).mean(dim=0)
        levels, scales = quantise(mean)
        sent[rank] -= world * (mean - dequantise(levels, scales))
        self.settle(grads.names, targets, _tensors(sent, sizes))
        leaving = _pack(levels.unsqueeze(0), scales.unsqueeze(0))
        everyone = torch.empty(world, leaving.numel(), dtype=torch.uint8, device=leaving.device)
        work = dist.all_gather(list(everyone), leaving.view(-1), group=group, async_op=True)
        yield started(work, leaving.nbytes * (world - 1))
        return self.store(grads, _tensors(dequantise(*_unpack(everyone, self.chunk)), sizes))


def int8_hook(state: Int8State, bucket: GradBucket) -> Future[Tensor]:
    """Send a bucket as 8-bit levels.

    Args:
        state: This worker's state.
        bucket: The bucket that DistributedDataParallel has filled.

    Returns:
        A future of the bucket's buffer, which then holds the mean over all workers to within two roundings.
    """
    return state.turns.start(bucket, state.steps(state.names.of(bucket)))


def quantise(chunks: Tensor) -> tuple[Tensor, Tensor]:
    """Round chunks to levels.

    Args:
        chunks: Values [..., c] float32, on any device.

    Returns:
        Levels [..., c] int8 in ±127, and scales [..., 1] float32.
    """
    scales = chunks.abs().amax(dim=-1, keepdim=True) / _TOP
    levels = (chunks / scales.masked_fill(scales == 0, 1)).round_().clamp_(-_TOP, _TOP)
    return levels.nan_to_num_(_TOP).to(torch.int8), scales


def dequantise(levels: Tensor, scales: Tensor) -> Tensor:
    """Return the float32 values of chunks of levels.

    Args:
        levels: [..., c] int8.
        scales: [..., 1] float32.

    Returns:
        The chunks, [..., c] float32.
    """
    return levels.to(torch.float32).mul_(scales)


def _shares(tensors: Sequence[Tensor], world: int, chunk: int) -> Tensor:
    """Divide all tensors [n] into the workers' shares.

    Returns:
        The shares as chunks [world, chunks, chunk], filled up with zeros.
    """
    rows = [pad(tensor, (0, -tensor.numel() % (world * chunk))).view(world, -1, chunk) for tensor in tensors]
    return torch.cat(rows, dim=1)


def _tensors(shares: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Join shares to the tensors of `sizes`: the inverse of _shares.

    Args:
        shares: [world, chunks, chunk].
        sizes: The entries of each tensor.
    """
    world, _, chunk = shares.shape
    parts = torch.split(shares, [-(-size // (world * chunk)) for size in sizes], dim=1)
    return [part.reshape(-1)[:size] for part, size in zip(parts, sizes, strict=True)]


def _pack(levels: Tensor, scales: Tensor) -> Tensor:
    """Pack levels and scales into bytes: the inverse of _unpack.

    Args:
        levels: [w, chunks, chunk] int8.
        scales: [w, chunks, 1] float32.

    Returns:
        The bytes, [w, b].
    """
    return torch.cat([levels.view(torch.uint8), scales.view(torch.uint8)], dim=2).flatten(1)


def _unpack(packed: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """Unpack levels and scales from bytes [w, b].

    Chunks follow one another. Returns the levels [w, chunks, chunk] int8 and the scales [w, chunks, 1] float32.
    """
    rows = packed.view(packed.shape[0], -1, chunk + _SCALE_BYTES)
    return rows[..., :chunk].view(torch.int8), rows[..., chunk:].contiguous().view(torch.float32)
