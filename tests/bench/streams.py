"""Compare all-reduce over one, two and four gRPC streams to each peer, by turns in one run.

    python -m tests.bench.streams [--delay 0.05] [--window 4194304] [--rate 10gbit] [--streams 1,2,4] [--bytes 26214400]

Two ranks talk through a proxy that delays by --delay seconds each way and keeps at most --window bytes of a connection
under way (see tests/bench/long_line.py). With --rate each rank has a network namespace behind a link of that rate
instead, which needs root. Prints one JSON line: for each number of streams, the median milliseconds, the MB that a rank
sends in a second, and the ratio to one stream.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore

from fedring.ctl.bench.runner import alternate
from fedring.ring import RingOptions
from tests.bench.daemons import ROOT, print_line
from tests.bench.networks import network
from tests.bench.ranks import add_rank_options, leave_groups, run_ranks
from tests.ports import free_port

_RANKS = 2
_WARM_UP = 2  # turns, in which the windows grow


def main() -> None:
    """Start the ranks, or run as one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,2,4", help="numbers of streams, separated by commas")
    parser.add_argument("--bytes", type=int, default=26214400, help="size of the tensor")
    parser.add_argument("--repeats", type=int, default=10, help="measurements of each number of streams")
    parser.add_argument("--delay", type=float, default=0.05, help="seconds for each way through the proxy")
    parser.add_argument("--window", type=int, default=4 << 20, help="bytes of a connection that are under way at most")
    parser.add_argument("--rate", default="", help="rate of each rank's link, such as 10gbit, instead of the proxy")
    parser.add_argument("--addresses", default="[]", help=argparse.SUPPRESS)
    add_rank_options(parser)
    args = parser.parse_args()
    if args.rank >= 0:
        _measure(args)
        return
    count = 0 if args.rate else _RANKS * len(args.streams.split(","))
    with _proxies(count, args.delay, args.window) as addresses, network(_RANKS, args.rate) as hosts:
        sys.argv.append(f"--addresses={json.dumps(addresses)}")
        run_ranks("tests.bench.streams", hosts, {"FEDRING_RING_LOCAL_TRANSPORT": "false"})


@contextmanager
def _proxies(count: int, delay: float, window: int) -> Iterator[list[list[str]]]:
    """Start proxies, and yield for each of them where a rank listens, and what its peers dial."""
    addresses, started = [], []
    try:
        for _ in range(count):
            listen, dialled = free_port(), free_port()
            command = [sys.executable, "-m", "tests.bench.long_line", f"--port={dialled}"]
            command += [f"--target=127.0.0.1:{listen}", f"--delay={delay}", f"--window={window}"]
            started.append(subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True))
            if started[-1].stdout is None or started[-1].stdout.readline() != "ready\n":
                raise SystemExit("a proxy did not start")
            addresses.append([f"127.0.0.1:{listen}", f"127.0.0.1:{dialled}"])
        yield addresses
    finally:
        for proxy in started:
            proxy.kill()
            proxy.wait()


def _measure(args: argparse.Namespace) -> None:
    import fedring.ring  # noqa: F401  # registers the backend

    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(args.store, _RANKS), rank=args.rank, world_size=_RANKS)
    addresses = json.loads(args.addresses)
    groups = {}
    for place, streams in enumerate(map(int, args.streams.split(","))):
        options = RingOptions(streams=streams)
        if addresses:
            listen, dialled = addresses[place * _RANKS + args.rank]
            options = options.model_copy(update={"listen": listen, "advertise": dialled})
        groups[streams] = dist.new_group(backend="fedring", pg_options=options)
    tensor = torch.empty(args.bytes // 4)
    ways = {str(streams): partial(_seconds, tensor, group) for streams, group in groups.items()}
    medians = {
        name: statistics.median(times) for name, times in alternate(ways, args.repeats, warm_up=_WARM_UP).items()
    }
    if args.rank == 0:
        first = next(iter(medians.values()))
        line = {"rate": args.rate} if args.rate else {"delay_seconds": args.delay, "window_bytes": args.window}
        facts = {
            name: {
                "ms": round(1e3 * seconds, 1),
                "mb_per_second": round(args.bytes / seconds / 1e6, 1),
                "ratio": round(seconds / first, 3),
            }
            for name, seconds in medians.items()
        }
        print_line({"bench": "streams", **line, "bytes": args.bytes, "streams": facts})
    leave_groups()


def _seconds(tensor: Tensor, group: dist.ProcessGroup) -> float:
    """Return the seconds of one all-reduce."""
    tensor.fill_(1e-6)
    dist.barrier()
    began = time.perf_counter()
    dist.all_reduce(tensor, group=group)
    return time.perf_counter() - began


if __name__ == "__main__":
    main()
