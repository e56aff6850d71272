"""Selection of the largest magnitudes by a sampled threshold.

The method is that of Lin et al. 2018, sec. 5.

All entries are compared with the threshold in one pass. If too few or too many reach it, it is changed. Of what is
still too many, the largest are taken, not the first. Entries that are 0 are never sent; NaN and infinity are larger
than all others.
"""

from math import ceil
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedring.compress.dgc import DGC

_FEW = 1 << 12  # entries; sampling fewer saves nothing
_BLOCK = 1 << 18  # entries that are compared at a time: they fit into a processor's cache
_MAGNITUDE = np.uint32(0x7FFFFFFF)  # the bits of a float32 without the sign are ordered as the magnitudes are


class Entries(Protocol):
    """The magnitudes of a vector, on the device where they are."""

    def floor(self, places: slice | Tensor, rank: int) -> float:
        """Return the magnitude of the `rank`-th largest of the entries at `places`."""
        ...

    def find(self, floor: float) -> int:
        """Make all entries of at least `floor` the candidates.

        Entries that are 0 are left out. Returns the number of candidates.
        """
        ...

    def narrow(self, floor: float, least: int) -> int:
        """Keep the candidates of at least `floor`.

        If these are fewer than `least`, all are kept. Returns the number of candidates.
        """
        ...

    def largest(self, count: int) -> Tensor:
        """Return the indices of the `count` largest candidates.

        They are rising, int64; all candidates if there are fewer.
        """
        ...


def select(values: Tensor, count: int, config: DGC, *, step: int = 0) -> Tensor:
    """Find about the largest magnitudes.

    Args:
        values: The values [n] float32.
        count: How many to find at most.
        config: How the threshold is found.
        step: A number that changes which places are sampled. The same values and step give the same indices.

    Returns:
        Indices, rising, [at most count] int64, on the device of `values`.
    """
    entries: Entries = _HostEntries(values) if values.device.type == "cpu" else _DeviceEntries(values)
    floor = _sampled_floor(entries, values.numel(), count, config, step)
    found = entries.find(floor)
    for _ in range(config.max_iterations):
        if found < config.lower_bound * count and floor > 0:
            floor *= config.lower_bound
            found = entries.find(floor)
        # With `resample`, `largest` chooses among all candidates instead.
        elif found > config.upper_bound * count and not config.resample:
            floor *= config.upper_bound
            found = entries.narrow(floor, count)
        else:
            break
    return entries.largest(count)


def _sampled_floor(entries: Entries, numel: int, count: int, config: DGC, step: int) -> float:
    """Return a magnitude that about `count` entries reach.

    It is found from a sample of the `numel` entries.
    """
    wanted = max(_FEW, ceil(numel * config.sample_ratio), ceil(2 * numel / count))
    if wanted >= numel:
        return entries.floor(slice(None), count)
    places: slice | Tensor
    if config.strided:
        stride = max(1, numel // wanted - 1) | 1  # odd: rows of even length are sampled in all columns
        places = slice(step % stride, None, stride)
        samples = len(range(*places.indices(numel)))
    else:
        places = torch.randint(numel, (wanted,), generator=torch.Generator().manual_seed(step), device="cpu")
        samples = wanted
    expected = samples * count / numel
    # Two standard deviations more, so that one pass finds enough in most steps; the largest of them are kept.
    rank = ceil(expected + 2 * expected**0.5) if config.resample else ceil(expected)
    return entries.floor(places, min(rank, samples))


class _HostEntries:
    """Entries in the host's memory."""

    def __init__(self, values: Tensor) -> None:
        self._bits: NDArray[np.uint32] = values.detach().numpy().view(np.uint32)
        self._indices = np.empty(0, np.int64)
        self._magnitudes = np.empty(0, np.uint32)

    def floor(self, places: slice | Tensor, rank: int) -> float:
        """See Entries.floor."""
        bits = self._bits[places if isinstance(places, slice) else places.numpy()] & _MAGNITUDE
        return float(np.partition(bits, bits.size - rank)[bits.size - rank].view(np.float32))

    def find(self, floor: float) -> int:
        """See Entries.find."""
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
        """See Entries.narrow."""
        which = self._magnitudes >= _bits_of(floor)
        if np.count_nonzero(which) >= least:
            self._keep(which)
        return self._indices.size

    def largest(self, count: int) -> Tensor:
        """See Entries.largest."""
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
        """See Entries.floor."""
        sample = self._all[places if isinstance(places, slice) else places.to(self._all.device)]
        return float(sample.topk(rank, sorted=False).values.min())

    def find(self, floor: float) -> int:
        """See Entries.find."""
        # Not ">=": comparisons with NaN are false, and NaN must be found.
        self._indices = ((~(self._all < floor)) & (self._all != 0)).nonzero().view(-1)
        return self._indices.numel()

    def narrow(self, floor: float, least: int) -> int:
        """See Entries.narrow."""
        which = ~(self._all[self._indices] < floor)
        if int(which.count_nonzero()) >= least:
            self._indices = self._indices[which]
        return self._indices.numel()

    def largest(self, count: int) -> Tensor:
        """See Entries.largest."""
        if self._indices.numel() <= count:
            return self._indices
        best = self._all[self._indices].topk(count, sorted=False).indices
        return self._indices[best].sort().values


def _bits_of(floor: float) -> np.uint32:
    """Return the least bits of a magnitude that reaches `floor`.

    They are at least 1, so that 0 does not reach it.
    """
    with np.errstate(over="ignore"):
        return np.uint32(max(1, int(np.float32(floor).view(np.uint32) & _MAGNITUDE)))
