"""One rank of a measurement, in a process of its own.

fedring.ctl.bench.ranks starts it.
"""

import importlib
import json
import sys
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

import fedring.ring  # noqa: F401  # registers the backend


class Groups(NamedTuple):
    """The same ranks, connected by two backends."""

    gloo: dist.ProcessGroup
    fedring: dist.ProcessGroup


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

    def join_groups(self) -> Groups:
        """Join all ranks in two groups: over Gloo and the ring.

        The group over Gloo is the default one.
        """
        self.join("gloo")
        return Groups(self.group("gloo"), self.group("fedring"))

    def group(self, backend: str, options: Any = None) -> dist.ProcessGroup:
        """Make a group of all ranks over a backend.

        `options` are the backend's own.
        """
        group = dist.new_group(backend=backend, pg_options=options)
        if not isinstance(group, dist.ProcessGroup):
            raise RuntimeError(f"rank {self.number} of {self.count} is not in its own group")
        return group

    def leave(self) -> None:
        """Wait for the other ranks, and leave all groups."""
        dist.barrier()
        dist.destroy_process_group()

    def mean(self, value: float) -> float:
        """Return the mean of a value over all ranks.

        All of them call this.
        """
        return self._all_reduce(value, dist.ReduceOp.SUM) / self.count

    def largest(self, value: float) -> float:
        """Return the largest of a value over all ranks.

        All of them call this.
        """
        return self._all_reduce(value, dist.ReduceOp.MAX)

    def _all_reduce(self, value: float, operator: Any) -> float:
        tensor = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(tensor, operator)
        return tensor.item()


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
