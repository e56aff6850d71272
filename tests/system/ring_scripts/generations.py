"""Many generations in one process: what they leave behind."""

import gc
import threading
from collections import Counter
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

import fedring.ring

_COUNTED = {"Endpoint", "RingProcessGroup", "World", "Operation", "RingFuture", "DistributedDataParallel", "Reducer"}


def leftovers(rank: int, size: int, *, folder: str, generations: int) -> list[dict[str, int]]:
    """Train in one generation after another. Return what the process holds after each: threads, files and objects."""
    store = FileStore(f"{folder}/meeting", -1)
    network = torch.nn.Linear(100, 100)
    found = []
    for generation in range(generations):
        fedring.ring.rejoin(store, slot=rank, size=size, step=generation, timeout=timedelta(seconds=60))
        _train(network, rank, fail=generation % 2 == 1)
        if generation % 2 == 0:
            dist.barrier()
        gc.collect()
        found.append(_held())
    return found


def _train(network: torch.nn.Module, rank: int, *, fail: bool) -> None:
    """Run a step with DDP and a subgroup, and lose the generation in the middle of the next one."""
    model = DistributedDataParallel(network)
    subgroup: Any = dist.new_group()
    try:
        model(torch.randn(4, 100)).sum().backward()
        dist.all_reduce(torch.ones(3), group=subgroup)
        if fail and rank == 0:
            default: Any = dist.group.WORLD
            default.abort()
        while fail:
            model(torch.randn(4, 100)).sum().backward()
    except RuntimeError:
        assert fail


def _held() -> dict[str, int]:
    counts = Counter(type(one).__name__ for one in gc.get_objects())
    status = Path("/proc/self/status").read_text()
    threads = next(line for line in status.splitlines() if line.startswith("Threads:"))
    return {
        "files": len(list(Path("/proc/self/fd").iterdir())),
        "python_threads": threading.active_count(),
        "threads": int(threads.split()[1]),
        **{name: counts[name] for name in sorted(_COUNTED)},
    }
