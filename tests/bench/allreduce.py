"""Compare all-reduce over fedring's ring with Gloo, by turns in one run.

    python -m tests.bench.allreduce [--ranks 2] [--rate 1gbit] [--sizes 4096,65536,...] [--tls] [--streams-only]
                                    [--outstanding 8]

Prints one JSON line for each size: the median milliseconds of both on rank 0, their ratio, the processor time of one
operation, and the bytes that the ring's counters add for it on rank 0. With --outstanding, one operation is so many
all-reduces, all of which are started before the first is waited for. Without --rate all ranks share one host. With it
each rank has a network namespace behind a link of that rate, which needs root.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fedring.ctl.admin.authority import host_name, make_authority, write_pair
from fedring.ctl.local.rank import Rank
from fedring.ctl.local.ranks import run_ranks
from fedring.rpc.identity import Identity, Role
from tests.bench.lab.daemons import print_line
from tests.bench.lab.groups import join_groups, sent_bytes, time_all_reduce
from tests.bench.lab.networks import network
from tests.bench.lab.turns import alternate

_SIZES = "4096,65536,1048576,26214400,104857600"
_TOTAL = 500_000_000  # bytes that all repeats of one size move together, roughly
_WARM_UP = 2  # turns


def main() -> None:
    """Measure every size, and print its line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2, help="processes that reduce together")
    parser.add_argument("--rate", default="", help="rate of each rank's link, such as 100mbit or 1gbit")
    parser.add_argument("--sizes", default=_SIZES, help="bytes of the tensors, separated by commas")
    parser.add_argument("--repeats", type=int, default=200, help="most operations of one size")
    parser.add_argument("--outstanding", type=int, default=1, help="all-reduces that are started at once")
    parser.add_argument("--tls", action="store_true", help="use mutual TLS")
    parser.add_argument("--streams-only", action="store_true", help="use gRPC streams only; always so with --rate")
    args = parser.parse_args()
    sizes = [int(size) for size in args.sizes.split(",")]
    settings = {"sizes": sizes, "most": args.repeats, "outstanding": args.outstanding}
    with (
        tempfile.TemporaryDirectory() as folder,
        network(args.ranks, args.rate, shared_memory=not args.streams_only) as net,
    ):
        tls = _write_certificates(Path(folder)) if args.tls else {}
        hosts = [replace(host, env={**host.env, **tls}) for host in net.hosts]
        place = {"ranks": args.ranks, **net.facts(), "shared_memory": not (args.rate or args.streams_only)}
        for facts in run_ranks("tests.bench.allreduce:measure", settings, hosts):
            print_line({"bench": "allreduce", **place, "tls": args.tls, **facts})


def measure(rank: Rank, sizes: list[int], most: int, outstanding: int) -> list[dict[str, float]]:
    """Return the facts of each size in bytes, measured at most so many times with so many all-reduces at once."""
    groups = join_groups(rank)
    lines = []
    for size in sizes:
        repeats = max(5, min(most, _TOTAL // size // rank.count // outstanding))
        before = sent_bytes(groups.fedring)
        facts = _compare(groups._asdict(), [torch.empty(size // 4) for _ in range(outstanding)], repeats)
        sent = (sent_bytes(groups.fedring) - before) / (_WARM_UP + repeats)
        ratio = round(facts["fedring_ms"] / facts["gloo_ms"], 3)
        lines.append(
            {"bytes": size, "outstanding": outstanding, **facts, "ratio": ratio, "fedring_sent_bytes": round(sent)}
        )
    rank.leave()
    return lines


def _write_certificates(folder: Path) -> dict[str, str]:
    """Write an authority and one certificate for all ranks; return the environment of a rank that uses them."""
    authority = make_authority(1)
    write_pair(folder, "ca", authority.certificate, authority.key)
    names = [host_name(host) for host in ("peer", "localhost", "127.0.0.1")]
    write_pair(folder, "peer", *authority.sign(Identity(Role.CLIENT, "peer"), names, 1))
    files = {"CA": "ca.crt", "CERT": "peer.crt", "KEY": "peer.key"}
    return {f"FEDRING_RING_TLS_{name}": str(folder / file) for name, file in files.items()} | {
        "FEDRING_RING_TLS_NAME": "peer"
    }


def _compare(groups: dict[str, dist.ProcessGroup], tensors: list[Tensor], repeats: int) -> dict[str, float]:
    """Return the median milliseconds and the mean processor milliseconds of all-reduces at once in each group."""
    ways: dict[str, Callable[[], tuple[float, float]]] = {
        name: partial(time_all_reduce, tensors, group) for name, group in groups.items()
    }
    times = alternate(ways, repeats, warm_up=_WARM_UP)
    medians = {
        f"{name}_ms": round(1e3 * statistics.median(seconds for seconds, _ in pairs), 3)
        for name, pairs in times.items()
    }
    return medians | {f"{name}_cpu_ms": round(1e3 * statistics.fmean(used for _, used in pairs), 3)
                      for name, pairs in times.items()}  # fmt: skip


if __name__ == "__main__":
    main()
