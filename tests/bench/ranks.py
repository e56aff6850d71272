"""What the benchmarks of process groups share: a benchmark starts itself once for each rank, and the ranks meet."""

import argparse
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore

from tests.bench.daemons import ROOT
from tests.bench.networks import Host


def add_rank_options(parser: argparse.ArgumentParser) -> None:
    """Add the options with which a benchmark tells its own processes which rank they are."""
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)


def run_ranks(module: str, hosts: Sequence[Host], env: Mapping[str, str]) -> None:
    """Start the benchmark once on each host, with the options of this process, and wait until all ranks have ended.

    Args:
        module: Name of the benchmark's module.
        hosts: Where the ranks run, in their order.
        env: Environment variables of every rank.

    Raises:
        SystemExit: A rank failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", module, *sys.argv[1:], f"--store={folder}/store"]
        ranks = [
            host.start(
                [*command, f"--rank={rank}"],
                cwd=ROOT,
                env={
                    **os.environ,
                    "GLOO_SOCKET_IFNAME": host.interface,
                    "FEDRING_RING_LISTEN": f"{host.address}:0",
                    **env,
                },
            )
            for rank, host in enumerate(hosts)
        ]
        try:
            if any(rank.wait() for rank in ranks):
                raise SystemExit(1)
        finally:
            for rank in ranks:
                rank.kill()


def join_groups(args: argparse.Namespace, ranks: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Meet the other ranks, with one thread for each, and return a group over Gloo and one over fedring's ring."""
    import fedring.ring  # noqa: F401  # registers the backend

    torch.set_num_threads(1)
    store = FileStore(args.store, ranks)
    dist.init_process_group("gloo", store=store, rank=args.rank, world_size=ranks)
    gloo, ring = dist.group.WORLD, dist.new_group(backend="fedring")
    if not (isinstance(gloo, dist.ProcessGroup) and isinstance(ring, dist.ProcessGroup)):
        raise RuntimeError(f"rank {args.rank} of {ranks} is not in its own groups")
    return gloo, ring


def leave_groups() -> None:
    """Wait for the other ranks, and leave all groups."""
    dist.barrier()
    dist.destroy_process_group()
