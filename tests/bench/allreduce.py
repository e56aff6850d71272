"""All-reduce over our ring beside Gloo, alternating in one run.

    python -m tests.bench.allreduce [--ranks 2] [--rate 1gbit] [--sizes 4096,65536,...] [--tls] [--streams-only]

Prints one JSON line a size: the median milliseconds on rank 0 of both, their ratio, and the processor time of one
operation. Without --rate all ranks share one host; with it each has a namespace behind a link of it (needs root).
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from tests.bench.certificates import write_certificates
from tests.bench.fleets import ROOT, print_line
from tests.bench.networks import network

_SIZES = "4096,65536,1048576,26214400,104857600"
_TOTAL = 500_000_000  # bytes that a size moves in all, roughly


def main() -> None:
    """Start the ranks, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rate", default="")
    parser.add_argument("--sizes", default=_SIZES)
    parser.add_argument("--repeats", type=int, default=200, help="at most this many of a size")
    parser.add_argument("--tls", action="store_true", help="mutual TLS")
    parser.add_argument("--streams-only", action="store_true", help="gRPC streams alone; always so with --rate")
    parser.add_argument("--rank", type=int, default=-1, help=argparse.SUPPRESS)
    parser.add_argument("--store", default="", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank >= 0:
        _measure(args)
        return
    with tempfile.TemporaryDirectory() as folder, network(args.ranks, args.rate) as hosts:
        security = write_certificates(Path(folder)) if args.tls else {}
        processes = [
            host.start(
                [
                    sys.executable,
                    "-m",
                    "tests.bench.allreduce",
                    *sys.argv[1:],
                    f"--rank={rank}",
                    f"--store={folder}/store",
                ],
                cwd=ROOT,
                env={
                    **os.environ,
                    **security,
                    "GLOO_SOCKET_IFNAME": host.interface,
                    "FEDRING_RING_LISTEN": f"{host.address}:0",
                    "FEDRING_RING_LOCAL_TRANSPORT": str(not (args.streams_only or args.rate)).lower(),
                },
            )
            for rank, host in enumerate(hosts)
        ]
        if any(process.wait() for process in processes):
            raise SystemExit(1)


def _measure(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    store = FileStore(args.store, args.ranks)
    dist.init_process_group("gloo", store=store, rank=args.rank, world_size=args.ranks)
    import fedring.ring  # noqa: F401  # registers the backend

    ring = dist.new_group(backend="fedring")
    if ring is None:
        raise RuntimeError("this rank is in every group")
    ways: dict[str, Callable[[Tensor], object]] = {
        "gloo": dist.all_reduce,
        "fedring": lambda tensor: dist.all_reduce(tensor, group=ring),
    }
    for size in map(int, args.sizes.split(",")):
        repeats = max(5, min(args.repeats, _TOTAL // size // args.ranks))
        facts = _alternate(ways, torch.empty(size // 4), repeats)
        if args.rank == 0:
            network_name = args.rate or "loopback"
            if not args.rate and not args.streams_only:
                network_name += " and shared memory"
            facts["ratio"] = round(facts["fedring_ms"] / facts["gloo_ms"], 3)
            print_line(
                {
                    "bench": "allreduce",
                    "ranks": args.ranks,
                    "network": network_name,
                    "tls": args.tls,
                    "bytes": size,
                    **facts,
                }
            )
    dist.barrier()
    dist.destroy_process_group()


def _alternate(ways: dict[str, Callable[[Tensor], object]], tensor: Tensor, repeats: int) -> dict[str, float]:
    """Median milliseconds and mean processor milliseconds of each way; the first two rounds warm up."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    work = dict.fromkeys(ways, 0.0)
    for turn in range(repeats + 2):
        for name, run in ways.items():
            tensor.fill_(1e-6)
            dist.barrier()
            used, began = time.process_time(), time.perf_counter()
            run(tensor)
            if turn >= 2:
                times[name].append(1e3 * (time.perf_counter() - began))
                work[name] += 1e3 * (time.process_time() - used) / repeats
    medians = {f"{name}_ms": round(statistics.median(spent), 3) for name, spent in times.items()}
    return medians | {f"{name}_cpu_ms": round(spent, 3) for name, spent in work.items()}


if __name__ == "__main__":
    main()
