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
from fedring.ring.torch import rendezvous
from tests.system.ring_scripts.ranks import error_of

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


def rejoin_after_init(rank: int, size: int) -> dict[str, float]:
    """Lose the group that init_process_group has made, form it again, and share rank 0's step."""
    default: Any = dist.group.WORLD
    dist.barrier()
    if rank == 0:
        default.abort()
    fedring.ring.rejoin(step=5 + rank)
    shared = torch.tensor(5.0 + rank)
    dist.broadcast(shared, 0)
    return {"rank": dist.get_rank(), "shared": shared.item()}


def lose_the_store(rank: int, size: int, *, port: int) -> dict[str, Any]:
    """Lose rank 0 and the store that it hosts, and try to form the group again."""
    address = f"tcp://127.0.0.1:{port}"
    dist.init_process_group("fedring", init_method=address, rank=rank, world_size=size)
    dist.barrier()
    dist.destroy_process_group()
    if rank == 0:
        rendezvous._place = None  # and with it the store, as at the end of the process
        return {"kind": ""}
    return error_of(lambda: fedring.ring.rejoin(step=1, timeout=timedelta(seconds=60)))


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
