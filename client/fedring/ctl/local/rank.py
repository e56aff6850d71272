"""One rank of a measurement, in a process of its own.

fedring.ctl.local.ranks starts it.
"""

import importlib
import json
import sys
from dataclasses import dataclass

import torch
import torch.distributed as dist

import fedring.ring  # noqa: F401  # registers the backend
from fedring.c10d import FileStore


@dataclass(frozen=True, slots=True)
class Rank:
    """The rank of this process, and the group's meeting file."""

    number: int
    count: int
    store: str

    def report(self, done: float, of: float = 1.0) -> None:
        """Report the finished share of the measurement.

        Only rank 0 does so.
        """
        if self.number == 0:
            print(json.dumps({"done": done / of}), flush=True)

    def join(self, backend: str) -> None:
        """Meet the other ranks in a default group of the backend."""
        store = FileStore(self.store, self.count)
        dist.init_process_group(backend, store=store, rank=self.number, world_size=self.count)

    def leave(self) -> None:
        """Wait for the other ranks, and leave all groups."""
        dist.barrier()
        dist.destroy_process_group()

    def mean(self, value: float) -> float:
        """Return the mean of a value over all ranks.

        All of them call this.
        """
        total = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total)
        return total.item() / self.count


def main() -> None:
    """Run the function that the command line names, with one thread.

    Rank 0 prints its result.
    """
    number, task, settings, count, store = sys.argv[1:]
    torch.set_num_threads(1)
    module, _, name = task.partition(":")
    rank = Rank(int(number), int(count), store)
    result = getattr(importlib.import_module(module), name)(rank, **json.loads(settings))
    if rank.number == 0:
        print(json.dumps({"result": result}), flush=True)
