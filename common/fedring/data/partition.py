"""The division of one data set among clients.

Its functions are pure, of labels and a seed. Each client computes the whole division and keeps its own part, so all
clients must compute the same division. Random numbers come from numpy's RandomState, whose streams are the same in all
versions of numpy (NEP 19).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset, TensorDataset

from fedring.data.samples import DataError, Samples, Split

Indices = NDArray[np.int64]  # [n], rising
Labels = NDArray[np.int64]  # [n]


def iid(n: int, count: int, seed: int) -> list[Indices]:
    """Divide the indices 0 to n - 1 at random among clients.

    They make `count` parts, whose sizes differ by at most one.
    """
    return [np.sort(part) for part in np.array_split(_random(seed).permutation(n), count)]


def shards(labels: Labels, count: int, seed: int, shards_per_client: int = 2) -> list[Indices]:
    """Give each client several shards of samples sorted by label.

    The shards are equal (McMahan et al. 2017, section 3).

    Args:
        labels: The label of each sample, [n] int64.
        count: The number of clients.
        seed: Decides which samples of a label are in which shard, and which client has which shards.
        shards_per_client: The number of shards of each client; fewer if shards would be empty otherwise.

    Returns:
        The indices of each client's samples.
    """
    random, n = _random(seed), len(labels)
    per_client = max(1, min(shards_per_client, n // count))  # so that no shard is empty, and no client either
    order = random.permutation(n)
    pieces = np.array_split(order[np.argsort(labels[order], kind="stable")], count * per_client)
    deal = random.permutation(len(pieces)).reshape(count, per_client)
    return [np.sort(np.concatenate([pieces[i] for i in hand])) for hand in deal]


def dirichlet(labels: Labels, count: int, alpha: float, seed: int) -> list[Indices]:
    """Divide samples into equal parts with Dirichlet-distributed class shares.

    The class shares of a part are drawn from Dir(alpha p) (Hsu et al. 2019, section 3). Here p is the share of each
    class in `labels`. A class without samples left takes no part in later draws.

    Args:
        labels: The label of each sample, [n] int64.
        count: The number of clients.
        alpha: The concentration, above 0; smaller values make parts more unequal.
        seed: Decides all draws.

    Returns:
        The indices of each client's samples; the sizes of the parts differ by at most one.
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
    # The parts drawn last had to take what was left: the permutation keeps them from always being the same clients'.
    return [parts[i] for i in random.permutation(count)]


def part(name: str, labels: Labels, *, index: int, count: int, alpha: float, seed: int) -> Indices:
    """Return the sample indices of client `index` under one partition.

    Args:
        name: "none" (every client holds all samples), "iid", "shards" or "dirichlet".
        labels: The label of each sample, [n] int64.
        index: The client's number, from 0.
        count: The number of clients.
        alpha: The concentration of "dirichlet".
        seed: Equal on all clients.

    Raises:
        DataError: With the reason bad_part, if `index` is not below `count`, or bad_partition, if there is no partition
            called `name`.
    """
    if name == "none":
        return np.arange(len(labels))
    if not 0 <= index < count:
        raise DataError(
            "bad_part",
            f"partition_index={index} is not below partition_count={count}: give each client an index from 0 to "
            f"{count - 1}.",
        )
    return parts(name, labels, count=count, alpha=alpha, seed=seed)[index]


def parts(name: str, labels: Labels, *, count: int, alpha: float, seed: int) -> list[Indices]:
    """Return the sample indices of each of `count` clients.

    The arguments are those of `part`.

    Raises:
        DataError: With the reason bad_partition, if there is no partition called `name`.
    """
    match name:
        case "none":
            return [np.arange(len(labels))] * count
        case "iid":
            return iid(len(labels), count, seed)
        case "shards":
            return shards(labels, count, seed)
        case "dirichlet":
            return dirichlet(labels, count, alpha, seed)
    raise DataError("bad_partition", f"There is no partition {name!r}: use none, iid, shards or dirichlet.")


def parts_alike(held: Sequence[Indices], labels: Labels, others: Labels, *, seed: int) -> list[Indices]:
    """Divide other samples by each client's shares of the classes.

    Each client gets the same share of each class of the others as it holds of these samples.

    Args:
        held: The indices of the samples that each client holds.
        labels: The label of each of these samples, [n] int64.
        others: The label of each sample to divide, [m] int64. Classes that nobody holds are divided evenly.
        seed: Decides which samples of a class go to which client.

    Returns:
        The indices of each client's share of the others; together, they are all of them.
    """
    random, found = _random(seed), [[np.empty(0, np.int64)] for _ in held]
    for label in np.unique(others):
        pool = random.permutation(np.flatnonzero(others == label))
        counts = np.array([np.count_nonzero(labels[part] == label) for part in held])
        ends = np.cumsum(counts if counts.any() else np.ones_like(counts))
        # Round the cumulative ends, not the shares: then the parts always add up to the whole pool.
        cuts = np.rint(ends[:-1] * (len(pool) / ends[-1])).astype(np.int64)
        for mine, share in zip(found, np.split(pool, cuts), strict=True):
            mine.append(share)
    return [np.sort(np.concatenate(shares)) for shares in found]


def held_out_parts(
    name: str, held: Sequence[Indices], labels: Labels, samples: Dataset[Any], *, seed: int
) -> list[Indices]:
    """Divide test samples by the labels of each client's training samples.

    Args:
        name: As for `part`.
        held: The indices of the training samples that each client holds.
        labels: The label of each training sample, [n] int64.
        samples: The test samples.
        seed: As for `part`.

    Raises:
        DataError: With the reason no_labels, as for labels_of().
    """
    if name == "none":
        return [np.arange(_size(samples))] * len(held)
    if name == "iid":
        return iid(_size(samples), len(held), seed)
    return parts_alike(held, labels, labels_of(samples, name), seed=seed)


def load_part(
    split: Split, partition: str, *, index: int, count: int, alpha: float, seed: int, alike: bool = False
) -> Split:
    """Return the part of `split` that client `index` of `count` holds.

    Test samples are divided under every partition but "none", so that the counts of all clients add up to the counts of
    the whole test set: evenly and at random, or alike.

    Args:
        split: All samples.
        partition: As `name` of `part`, which also explains the other arguments.
        alike: Whether a client's test samples have the labels of its training samples, as parts_alike() divides them.

    Raises:
        DataError: As in `part`, and with the reason no_labels, if the partition needs labels that the data set does
            not show.
    """
    # Each test sample must be with one client only, or the clients' counts would not add up.
    for_test = partition if partition == "none" else "iid"
    labels = labels_of(split.train, partition)
    train = part(partition, labels, index=index, count=count, alpha=alpha, seed=seed)
    if alike:
        held = parts(partition, labels, count=count, alpha=alpha, seed=seed)
        test = held_out_parts(partition, held, labels, split.test, seed=seed)[index]
        return Split(subset(split.train, train), subset(split.test, test), split.classes)
    test = part(for_test, labels_of(split.test, for_test), index=index, count=count, alpha=alpha, seed=seed)
    return Split(subset(split.train, train), subset(split.test, test), split.classes)


def labels_of(dataset: Dataset[Any], partition: str) -> Labels:
    """Return the label of every sample, [n] int64.

    They are zeros if the partition does not use labels. Those of a TensorDataset are its last tensor, those of others
    their attribute `labels` or `targets`.

    Raises:
        DataError: With the reason no_labels, if the partition needs labels that the data set does not show.
    """
    if partition in ("none", "iid"):
        return np.zeros(_size(dataset), np.int64)
    if isinstance(dataset, TensorDataset):
        last = dataset.tensors[-1]
        if last.dim() != 1 or last.is_floating_point() or last.is_complex():
            kind = f"{list(last.shape)} of {str(last.dtype).removeprefix('torch.')}"
            raise DataError(
                "no_labels",
                f"The partition {partition!r} needs labels: let the last tensor of the TensorDataset be whole numbers, "
                f"one for each sample, not {kind}.",
            )
        return last.cpu().numpy().astype(np.int64)
    labels = getattr(dataset, "labels", getattr(dataset, "targets", None))
    if labels is None:
        raise DataError(
            "no_labels",
            f"The partition {partition!r} needs labels: give {type(dataset).__name__} an attribute labels or targets.",
        )
    return np.asarray(labels, np.int64)


def subset(dataset: Dataset[Any], indices: Indices) -> Dataset[Any]:
    """Return the samples at `indices`.

    They are Samples if the data set is in memory.
    """
    return dataset.subset(indices) if isinstance(dataset, Samples) else Subset(dataset, _ints(indices))


def _random(seed: int) -> np.random.RandomState:
    return np.random.RandomState([seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF])


def _draw_counts(
    random: np.random.RandomState, concentration: NDArray[np.float64], quota: int, left: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the number of samples to take of each class.

    They are `quota` in all, by drawn shares, and at most `left` of each.
    """
    taken = np.zeros_like(left)
    shares = np.zeros_like(concentration)
    while (missing := quota - int(taken.sum())) > 0:
        shares[left == taken] = 0
        if shares.sum() < 1e-12:  # at first, and whenever all classes that have a share are used up
            shares[left > taken] = _draw_shares(random, concentration[left > taken])
        taken = np.minimum(taken + random.multinomial(missing, shares / shares.sum()), left)
    return taken


def _draw_shares(random: np.random.RandomState, concentration: NDArray[np.float64]) -> NDArray[np.float64]:
    shares = random.dirichlet(concentration)
    if np.isfinite(shares).all():
        return shares
    # All gamma variates fell below the smallest float. In the limit of small concentrations, one class has all samples.
    return random.multinomial(1, concentration / concentration.sum()).astype(np.float64)


def _size(dataset: Any) -> int:
    return len(dataset)


def _ints(indices: Indices) -> Sequence[int]:
    return [int(i) for i in indices]
