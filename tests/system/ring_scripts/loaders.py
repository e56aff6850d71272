"""Data loaders with worker processes, beside a group whose threads run. As a program, it runs as one rank."""

import argparse
import gc
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from multiprocessing.synchronize import Semaphore
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore
from torch.utils.data import DataLoader, Dataset

from fedring.ring import RingOptions
from tests.system.ring_scripts.ranks import error_of

ITEMS, WORKERS, EPOCHS = 8, 2, 2


class Numbers(Dataset[Tensor]):
    """The numbers 0 to ITEMS - 1. Each worker first frees what it has taken over and cannot reach."""

    def __len__(self) -> int:
        return ITEMS

    def __getitem__(self, index: int) -> Tensor:
        if index < WORKERS:
            gc.collect()
        return torch.tensor(float(index))


class Stuck(Numbers):
    """Numbers of which none but the first ones ever come; each that does not is counted."""

    def __init__(self, stuck: Semaphore) -> None:
        self._stuck = stuck

    def __getitem__(self, index: int) -> Tensor:
        if index >= WORKERS:
            self._stuck.release()
            threading.Event().wait()
        return super().__getitem__(index)


def loader_of(method: str, *, persistent: bool) -> "DataLoader[Tensor]":
    """Return a loader whose workers start with `method` at each epoch, or, if they are persistent, at the first one."""
    return DataLoader(
        Numbers(), num_workers=WORKERS, multiprocessing_context=method, persistent_workers=persistent, timeout=100
    )


def total(loader: "DataLoader[Tensor]") -> float:
    """Return the sum of all numbers of all ranks and epochs, which are added over the ranks as they are loaded."""
    sums = 0.0
    for _ in range(EPOCHS):
        for numbers in loader:
            dist.all_reduce(numbers)
            sums += numbers.item()
    return sums


def train(rank: int, size: int, *, methods: list[str]) -> list[float]:
    """Load with workers that start with each method, in a second group, since what is left of the first is there."""
    backend = dist.get_backend()
    store = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    dist.barrier()
    dist.destroy_process_group()
    loaders = [loader_of(method, persistent=persistent) for method in methods for persistent in (False, True)]
    early = iter(loaders[-1])  # its workers start before there is a group
    dist.init_process_group(backend, store=PrefixStore("second", store), rank=rank, world_size=size)
    dist.all_reduce(torch.ones(100_000))
    first = next(early)
    dist.all_reduce(first)
    return [first.item(), *(total(loader) for loader in loaders)]


def rank_with_workers_is_killed(rank: int, size: int, *, folder: Path) -> dict[str, Any]:
    """Rank 1 dies and leaves workers behind, which hold copies of all its sockets. Return rank 0's error."""
    options = RingOptions(lost_after_seconds=8.0)  # longer than a busy machine keeps a healthy rank waiting
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("fedring", init_method=meeting, rank=rank, world_size=size, pg_options=options)
    workers = folder / "workers.json"
    if rank == 1:
        stuck = multiprocessing.get_context("fork").Semaphore(0)
        batches: Any = iter(DataLoader(Stuck(stuck), num_workers=WORKERS, multiprocessing_context="fork"))
        next(batches)
        for _ in range(WORKERS):  # one that waits for its next number would notice the end of its rank, and end, too
            stuck.acquire()
        workers.write_text(json.dumps([worker.pid for worker in batches._workers]))
        dist.barrier()
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()
    begin = time.monotonic()
    error = error_of(lambda: dist.all_reduce(torch.ones(3)))
    seconds = time.monotonic() - begin
    left = [pid for pid in json.loads(workers.read_text()) if Path(f"/proc/{pid}").exists()]
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    dist.destroy_process_group()
    return {"seconds": seconds, "workers": len(left), **error}


def main() -> None:
    """Run as one rank of the group that the environment names, and print what `train` returns."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", default="fedring")
    parser.add_argument("--forget", action="store_true", help="end without leaving the group")
    parser.add_argument("methods", nargs="+")
    args = parser.parse_args()
    torch.set_num_threads(1)
    loader = loader_of(args.methods[0], persistent=True)
    early = iter(loader)
    dist.init_process_group(args.backend)
    sums = train(dist.get_rank(), dist.get_world_size(), methods=args.methods)
    sys.stdout.write(json.dumps({"rank": dist.get_rank(), "sums": sums, "first": next(early).item()}) + "\n")
    sys.stdout.flush()
    if not args.forget:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
