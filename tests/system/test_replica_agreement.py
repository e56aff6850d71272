"""What a worker of a data-parallel group tells the others of itself, and what they believe."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from fedring.train.errors import TrainError
from fedring.workers.replica import Progress, Replica, gather, synchronize
from tests.system.ring_scripts import ranks


def listen(told: list[tuple[int, list[int]]], rank: int, size: int) -> list[str]:
    """Tell rank 1 one progress after the other, as rank 0; return how it answered each."""
    answers = []
    for steps, progress in told:
        if rank == 0:
            gather([steps, 0, 0, 0, 0])
            dist.broadcast(torch.tensor(progress), 0)
            continue
        net = nn.Linear(2, 1)
        replica = Replica(net, torch.optim.SGD(net.parameters(), 0.1), Progress(3))
        with pytest.raises(TrainError) as refused:
            synchronize(replica)
        answers.append(f"{refused.value.reason}: {refused.value}")
        assert replica.progress == Progress(3)
    return answers


def test_a_progress_that_cannot_be_is_refused_before_use(tmp_path: Path) -> None:
    rows = [
        (5, [4, 0, 0, 0]),
        (5, [5, -1, 0, 0]),
        (5, [5, 0, -1, 0]),
        (5, [5, 0, 0, -1]),
        (1 << 62, [1 << 62, 0, 0, 0]),
    ]
    _, answers = ranks.run(partial(listen, rows), 2, tmp_path)
    assert answers == [
        f"bad_peer: The worker of rank 0 tells {told} as its progress after {steps} steps." for steps, told in rows
    ]
