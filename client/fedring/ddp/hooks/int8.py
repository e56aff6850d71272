"""Gradients as 8-bit levels: a quarter of the bytes, whatever the number of workers.

Each worker is responsible for a share of every tensor. It receives all workers' levels of its share, takes the
mean, and sends that to all as levels again. What this second rounding leaves out counts as not sent by the worker
responsible, so that its error feedback makes up for both. Shares and chunks depend on nothing but a tensor's size:
other buckets give the same bits.
"""

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket
from torch.futures import Future
from torch.nn.functional import pad

from fedring.compress.correction import Feedback
from fedring.compress.levels import dequantise, quantise
from fedring.ddp.hooks.corrected import CorrectedState
from fedring.ddp.hooks.gradients import Gradients
from fedring.ddp.hooks.turns import Steps, started

_SCALE_BYTES = 4


class Int8State(CorrectedState):
    """The state of int8_hook: a scale for each `chunk` entries, and what both roundings left out."""

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
        """As CorrectedState.steps."""
        group, targets = self.group, self.targets(grads)
        world, rank, sizes = group.size(), group.rank(), grads.sizes()
        levels, scales = quantise(_shares(targets, world, self.chunk))
        sent = dequantise(levels, scales)
        leaving = _pack(levels, scales)
        arriving = torch.empty_like(leaving)
        yield started(dist.all_to_all_single(arriving, leaving, group=group, async_op=True))
        mean = dequantise(*_unpack(arriving, self.chunk)).mean(dim=0)
        levels, scales = quantise(mean)
        sent[rank] -= world * (mean - dequantise(levels, scales))
        self.settle(grads, targets, _tensors(sent, sizes))
        leaving = _pack(levels.unsqueeze(0), scales.unsqueeze(0))
        everyone = torch.empty(world, leaving.numel(), dtype=torch.uint8, device=leaving.device)
        yield started(dist.all_gather(list(everyone), leaving.view(-1), group=group, async_op=True))
        return self.store(grads, _tensors(dequantise(*_unpack(everyone, self.chunk)), sizes))


def int8_hook(state: Int8State, bucket: GradBucket) -> Future[Tensor]:
    """A future of the bucket's buffer, which then holds the mean over all workers to within two roundings."""
    return state.turns.start(bucket, state.steps(state.names.of(bucket)))


def _shares(tensors: Sequence[Tensor], world: int, chunk: int) -> Tensor:
    """Each worker's shares of all `tensors` [n] as chunks [world, chunks, chunk], filled up with zeros."""
    rows = [pad(tensor, (0, -tensor.numel() % (world * chunk))).view(world, -1, chunk) for tensor in tensors]
    return torch.cat(rows, dim=1)


def _tensors(shares: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """The tensors of `sizes` of which `shares` [world, chunks, chunk] are the shares."""
    world, _, chunk = shares.shape
    parts = torch.split(shares, [-(-size // (world * chunk)) for size in sizes], dim=1)
    return [part.reshape(-1)[:size] for part, size in zip(parts, sizes, strict=True)]


def _pack(levels: Tensor, scales: Tensor) -> Tensor:
    """Bytes [w, b] of `levels` [w, chunks, chunk] and `scales` [w, chunks, 1]: each chunk's levels, then its scale."""
    return torch.cat([levels.view(torch.uint8), scales.view(torch.uint8)], dim=2).flatten(1)


def _unpack(packed: Tensor, chunk: int) -> tuple[Tensor, Tensor]:
    """The levels [w, chunks, chunk] and scales [w, chunks, 1] of `packed` [w, b]."""
    rows = packed.view(packed.shape[0], -1, chunk + _SCALE_BYTES)
    return rows[..., :chunk].view(torch.int8), rows[..., chunk:].contiguous().view(torch.float32)
