"""Common parts of data-parallel and pipeline training.

They are callbacks, seeds, one error, and means over all workers.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist

from fedring.train.tally import Tally

_MAX_SEED = (1 << 62) - 1


class Diverged(Exception):
    """The parameters of the workers differ, or are not finite.

    The cause is a fault of a worker or its machine, or a training that diverges.
    """


@dataclass(slots=True, eq=False)
class Watcher:
    """The callbacks of a group's training to its client."""

    progress: Callable[[float], None] = lambda share: None  # takes the share of the round that is done, 0 to 1
    check: Callable[[], None] = lambda: None  # raises an exception if training must end
    bytes_sent: Callable[[], int] = lambda: 0  # returns the bytes that this worker has sent to its peers so far


def worker_seed(seed: int, steps: int) -> int:
    """Return this worker's seed for the rest of a round.

    Args:
        seed: The round's seed.
        steps: The steps of the job that were done before.

    Returns:
        A number that differs between ranks and between starts of training, from 0 to 2^62 - 1.
    """
    return hash((seed, steps, dist.get_rank())) >> 1 & _MAX_SEED


def means_over_workers(tally: Tally) -> dict[str, float]:
    """Return the mean loss and the accuracy over all workers.

    They cover the samples that all workers of the default group counted.

    Every worker of the group must call this, also one that counted no samples.

    Returns:
        The means by name. "loss" is missing if no worker counted a sample, and "accuracy" if labels were not classes.
    """
    sums = torch.tensor([tally.loss_sum, tally.correct, tally.total, tally.classified], dtype=torch.float64)
    dist.all_reduce(sums)
    loss, correct, total, classified = sums.tolist()
    means = {"loss": loss / total} if total else {}
    return means | ({"accuracy": correct / total} if classified else {})
