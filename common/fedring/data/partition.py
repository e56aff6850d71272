"""How the samples of one data set are divided among clients: pure functions of labels and a seed.

Each client computes the whole division and keeps its own part, so all must compute the same one. The drawings come
from numpy's RandomState, whose streams never change from one version to the next (NEP 19).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset

from fedring.data.errors import DataError
from fedring.data.samples import Samples, Split

Indices = NDArray[np.int64]  # [n] rising
Labels = NDArray[np.int64]  # [n]


def iid(n: int, count: int, seed: int) -> list[Indices]:
    """`count` parts of 0 to n - 1, drawn at random, whose sizes differ by at most one."""
    return [np.sort(part) for part in np.array_split(_random(seed).permutation(n), count)]


def shards(labels: Labels, count: int, seed: int, shards_per_client: int = 2) -> list[Indices]:
    """`count` parts, each of a few runs of the samples sorted by label (McMahan et al. 2017, section 3)."""
    random, n = _random(seed), len(labels)
    per_client = max(1, min(shards_per_client, n // count))  # no shard is empty, so that no client is
    order = random.permutation(n)
    pieces = np.array_split(order[np.argsort(labels[order], kind="stable")], count * per_client)
    deal = random.permutation(len(pieces)).reshape(count, per_client)
    return [np.sort(np.concatenate([pieces[i] for i in hand])) for hand in deal]


def dirichlet(labels: Labels, count: int, alpha: float, seed: int) -> list[Indices]:
    """`count` parts of equal size, whose class shares are drawn from Dir(alpha p) (Hsu et al. 2019, section 3.2).

    p is the share of each class in `labels`. A class that runs out is left out of the later drawings.
    """
    random, n = _random(seed), len(labels)
    if n == 0:
        return iid(0, count, seed)
    _, classes, sizes = np.unique(labels, return_inverse=True, return_counts=True)
    pools = [random.permutation(np.flatnonzero(classes == c)) for c in range(len(sizes))]
    left = sizes.copy()
    parts: list[Indices] = []
    for quota in [len(part) for part in np.array_split(np.arange(n), count)]:
        taken = _draw_counts(random, alpha * sizes / n, quota, left)
        part = [pool[rest - k : rest] for pool, rest, k in zip(pools, left, taken, strict=True)]
        parts.append(np.sort(np.concatenate(part)))
        left -= taken
    return [parts[i] for i in random.permutation(count)]  # those drawn last took what was left: nobody is always last


def part(name: str, labels: Labels, *, index: int, count: int, alpha: float, seed: int) -> Indices:
    """The indices that client `index` of `count` holds under the partition called `name`."""
    if name == "none":
        return np.arange(len(labels))
    if not 0 <= index < count:
        raise DataError("bad_part", f"There is no part {index} of {count}: give each client an index below the count.")
    match name:
        case "iid":
            return iid(len(labels), count, seed)[index]
        case "shards":
            return shards(labels, count, seed)[index]
        case "dirichlet":
            return dirichlet(labels, count, alpha, seed)[index]
    raise DataError("bad_partition", f"There is no partition {name!r}: use none, iid, shards or dirichlet.")


def load_part(split: Split, partition: str, *, index: int, count: int, alpha: float, seed: int) -> Split:
    """What client `index` of `count` holds of `split`.

    Test samples are divided evenly at random under every partition but "none", so that the counts of all clients
    add up to those of the whole test set.
    """
    for_test = partition if partition == "none" else "iid"
    train = part(partition, _labels(split.train, partition), index=index, count=count, alpha=alpha, seed=seed)
    test = part(for_test, _labels(split.test, for_test), index=index, count=count, alpha=alpha, seed=seed)
    return Split(_subset(split.train, train), _subset(split.test, test), split.classes)


def _random(seed: int) -> np.random.RandomState:
    return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF])


def _draw_counts(
    random: np.random.RandomState, concentration: NDArray[np.float64], quota: int, left: NDArray[np.int64]
) -> NDArray[np.int64]:
    """How many samples of each class to take: `quota` in all, by drawn shares, no more than are `left`."""
    taken = np.zeros_like(left)
    shares = np.zeros_like(concentration)
    while (missing := quota - int(taken.sum())) > 0:
        shares[left == taken] = 0
        if shares.sum() < 1e-12:  # at first, and when its classes have all run out
            shares[left > taken] = _draw_shares(random, concentration[left > taken])
        taken = np.minimum(taken + random.multinomial(missing, shares / shares.sum()), left)
    return taken


def _draw_shares(random: np.random.RandomState, concentration: NDArray[np.float64]) -> NDArray[np.float64]:
    shares = random.dirichlet(concentration)
    if np.isfinite(shares).all():
        return shares
    # All gamma variates fell below the smallest float: in the limit, one class has everything.
    return random.multinomial(1, concentration / concentration.sum()).astype(np.float64)


def _labels(dataset: Dataset[Any], partition: str) -> Labels:
    """The label of every sample; zeros where `partition` does not look at them."""
    if partition in ("none", "iid"):
        return np.zeros(_size(dataset), np.int64)
    labels = getattr(dataset, "labels", getattr(dataset, "targets", None))
    if labels is None:
        raise DataError("no_labels", f"The partition {partition!r} needs the data set to have an attribute labels.")
    return np.asarray(labels, np.int64)


def _size(dataset: Any) -> int:
    return len(dataset)


def _subset(dataset: Dataset[Any], indices: Indices) -> Dataset[Any]:
    return dataset.subset(indices) if isinstance(dataset, Samples) else Subset(dataset, _ints(indices))


def _ints(indices: Indices) -> Sequence[int]:
    return [int(i) for i in indices]
