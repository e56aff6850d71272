"""Which entries to send: the largest magnitudes, by a threshold estimated from a sample (Lin et al. 2018, sec. 5).

All entries are compared with the threshold in one pass. Too few or too many found move it; what is
still too many is cut to the largest, never to the first. No entry that is 0 is ever sent; NaN and infinity are
larger than all else.
"""

from math import ceil
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedring.compress.dgc import DGC

_FEW = 1 << 12  # entries; to sample fewer saves nothing
_BLOCK = 1 << 18  # entries compared at a time: what a processor's cache holds
_MAGNITUDE = np.uint32(0x7FFFFFFF)  # bits of a float32 without the sign rise as magnitudes do


class Entries(Protocol):
    """The magnitudes of a vector, where they are stored."""

    def floor(self, places: slice | Tensor, rank: int) -> float:
        """The magnitude of the `rank`-th largest entry at `places`."""
        ...

    def find(self, floor: float) -> int:
        """How many entries reach `floor` and are not 0; they become the candidates."""
        ...

    def narrow(self, floor: float, least: int) -> int:
        """How many candidates are left: those that reach `floor`, but all if those are fewer than `least`."""
        ...

    def largest(self, count: int) -> Tensor:
        """Indices, rising, of the `count` largest candidates, int64; all if there are fewer."""
        ...


def select(values: Tensor, count: int, config: DGC, *, step: int = 0) -> Tensor:
    """Indices, rising, of about the `count` largest magnitudes of `values` [n] float32, never more; [<= count] int64.

    The same values and the same `step`, by which the sampled places move, give the same indices.
    """
    entries: Entries = _HostEntries(values) if values.device.type == "cpu" else _DeviceEntries(values)
    floor = _sampled_floor(entries, values.numel(), count, config, step)
    found = entries.find(floor)
    for _ in range(config.max_iterations):
        if found < config.lower_bound * count and floor > 0:
            floor *= config.lower_bound
            found = entries.find(floor)
        elif found > config.upper_bound * count and not config.resample:
            floor *= config.upper_bound
            found = entries.narrow(floor, count)
        else:
            break
    return entries.largest(count)


def _sampled_floor(entries: Entries, numel: int, count: int, config: DGC, step: int) -> float:
    """A magnitude that about `count` of `numel` entries reach."""
    wanted = max(_FEW, ceil(numel * config.sample_ratio), ceil(2 * numel / count))
    if wanted >= numel:
        return entries.floor(slice(None), count)
    places: slice | Tensor
    if config.strided:
        stride = max(1, numel // wanted - 1) | 1  # odd, so that rows of even length are not sampled in one column only
        places = slice(step % stride, None, stride)
        samples = len(range(*places.indices(numel)))
    else:
        places = torch.randint(numel, (wanted,), generator=torch.Generator().manual_seed(step))
        samples = wanted
    expected = samples * count / numel
    # Two deviations more, so that one pass finds enough in most steps; the largest of them are kept.
    rank = ceil(expected + 2 * expected**0.5) if config.resample else ceil(expected)
    return entries.floor(places, min(rank, samples))


class _HostEntries:
    """Entries in this machine's memory."""

    def __init__(self, values: Tensor) -> None:
        self._bits: NDArray[np.uint32] = values.detach().numpy().view(np.uint32)
        self._indices = np.empty(0, np.int64)
        self._magnitudes = np.empty(0, np.uint32)

    def floor(self, places: slice | Tensor, rank: int) -> float:
        """As Entries.floor."""
        bits = self._bits[places if isinstance(places, slice) else places.numpy()] & _MAGNITUDE
        return float(np.partition(bits, bits.size - rank)[bits.size - rank].view(np.float32))

    def find(self, floor: float) -> int:
        """As Entries.find."""
        least = _bits_of(floor)
        indices, magnitudes = [], []
        for start in range(0, self._bits.size, _BLOCK):
            block = self._bits[start : start + _BLOCK] & _MAGNITUDE
            found = np.flatnonzero(block >= least)
            magnitudes.append(block[found])
            indices.append(found + start)
        self._indices, self._magnitudes = np.concatenate(indices), np.concatenate(magnitudes)
        return self._indices.size

    def narrow(self, floor: float, least: int) -> int:
        """As Entries.narrow."""
        which = self._magnitudes >= _bits_of(floor)
        if np.count_nonzero(which) >= least:
            self._keep(which)
        return self._indices.size

    def largest(self, count: int) -> Tensor:
        """As Entries.largest."""
        if self._indices.size > count:
            keep = np.zeros(self._indices.size, np.bool_)
            keep[np.argpartition(self._magnitudes, keep.size - count)[keep.size - count :]] = True
            self._keep(keep)
        return torch.from_numpy(self._indices)

    def _keep(self, which: NDArray[np.bool_]) -> None:
        self._indices, self._magnitudes = self._indices[which], self._magnitudes[which]


class _DeviceEntries:
    """Entries in an accelerator's memory."""

    def __init__(self, values: Tensor) -> None:
        self._all = values.detach().abs()
        self._indices = torch.empty(0, dtype=torch.int64, device=values.device)

    def floor(self, places: slice | Tensor, rank: int) -> float:
        """As Entries.floor."""
        sample = self._all[places if isinstance(places, slice) else places.to(self._all.device)]
        return float(sample.topk(rank, sorted=False).values.min())

    def find(self, floor: float) -> int:
        """As Entries.find."""
        # Not "reach": a comparison with NaN is false, and NaN is to be found.
        self._indices = ((~(self._all < floor)) & (self._all != 0)).nonzero().view(-1)
        return self._indices.numel()

    def narrow(self, floor: float, least: int) -> int:
        """As Entries.narrow."""
        which = ~(self._all[self._indices] < floor)
        if int(which.count_nonzero()) >= least:
            self._indices = self._indices[which]
        return self._indices.numel()

    def largest(self, count: int) -> Tensor:
        """As Entries.largest."""
        if self._indices.numel() <= count:
            return self._indices
        best = self._all[self._indices].topk(count, sorted=False).indices
        return self._indices[best].sort().values


def _bits_of(floor: float) -> np.uint32:
    """What the bits of a magnitude must reach for the magnitude to reach `floor` and not to be 0."""
    with np.errstate(over="ignore"):
        return np.uint32(max(1, int(np.float32(floor).view(np.uint32) & _MAGNITUDE)))
