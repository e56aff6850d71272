"""Compare all-reduce over one, two and four gRPC streams to each peer, by turns in one run.

    python -m tests.bench.streams [--delay 0.05] [--window 4194304] [--rate 10gbit] [--streams 1,2,4] [--bytes 26214400]

Two ranks talk through a proxy that delays by --delay seconds each way and keeps at most --window bytes of a connection
under way (see tests/bench/long_line.py). With --rate each rank has a network namespace behind a link of that rate
instead, which needs root. Prints one JSON line: for each number of streams, the median milliseconds, the MB that a rank
sends in a second, and the ratio to one stream.
"""

import argparse
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch

from fedring.ctl.local.rank import Rank
from fedring.ctl.local.ranks import run_ranks
from fedring.ring import RingOptions
from tests.bench.lab.daemons import ROOT, print_line
from tests.bench.lab.groups import make_group, time_all_reduce
from tests.bench.lab.networks import network
from tests.bench.lab.turns import alternate
from tests.ports import free_port

_RANKS = 2
_WARM_UP = 2  # turns, in which the windows grow

Addresses = list[list[list[str]]]  # by number of streams and rank: where the rank listens, and what its peer dials


def main() -> None:
    """Measure all numbers of streams, and print the line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--streams", default="1,2,4", help="numbers of streams, separated by commas")
    parser.add_argument("--bytes", type=int, default=26214400, help="size of the tensor")
    parser.add_argument("--repeats", type=int, default=10, help="measurements of each number of streams")
    parser.add_argument("--delay", type=float, default=0.05, help="seconds for each way through the proxy")
    parser.add_argument("--window", type=int, default=4 << 20, help="bytes of a connection that are under way at most")
    parser.add_argument("--rate", default="", help="rate of each rank's link, such as 10gbit, instead of the proxy")
    args = parser.parse_args()
    streams = [int(number) for number in args.streams.split(",")]
    place = {} if args.rate else {"delay_seconds": args.delay, "window_bytes": args.window}
    with (
        _proxies(0 if args.rate else len(streams), args.delay, args.window) as addresses,
        network(_RANKS, args.rate) as net,
    ):
        settings = {"streams": streams, "size": args.bytes, "repeats": args.repeats, "addresses": addresses}
        facts = run_ranks("tests.bench.streams:measure", settings, net.hosts)
    print_line({"bench": "streams", **net.facts(), **place, "bytes": args.bytes, "streams": facts})


@contextmanager
def _proxies(count: int, delay: float, window: int) -> Iterator[Addresses]:
    """Start `count` proxies for each rank, and stop them afterwards."""
    started: list[subprocess.Popen[str]] = []

    def proxy() -> list[str]:
        listen, dialled = free_port(), free_port()
        command = [sys.executable, "-m", "tests.bench.long_line", f"--port={dialled}"]
        command += [f"--target=127.0.0.1:{listen}", f"--delay={delay}", f"--window={window}"]
        process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
        started.append(process)
        if process.stdout is None or process.stdout.readline() != "ready\n":
            raise SystemExit("a proxy did not start")
        return [f"127.0.0.1:{listen}", f"127.0.0.1:{dialled}"]

    try:
        yield [[proxy() for _ in range(_RANKS)] for _ in range(count)]
    finally:
        for process in started:
            process.kill()
            process.wait()


def measure(
    rank: Rank, streams: list[int], size: int, repeats: int, addresses: Addresses
) -> dict[str, dict[str, float]]:
    """Return the facts of each number of streams, for all-reduces of `size` bytes."""
    rank.join("gloo")
    ways = {}
    tensor = torch.empty(size // 4)
    for place, number in enumerate(streams):
        options = RingOptions(streams=number)
        if addresses:
            listen, dialled = addresses[place][rank.number]
            options = options.model_copy(update={"listen": listen, "advertise": dialled})
        ways[str(number)] = partial(time_all_reduce, [tensor], make_group("fedring", options))
    times = alternate(ways, repeats, warm_up=_WARM_UP)
    medians = {name: statistics.median(seconds for seconds, _ in pairs) for name, pairs in times.items()}
    rank.leave()
    first = next(iter(medians.values()))
    return {
        name: {
            "ms": round(1e3 * seconds, 1),
            "mb_per_second": round(size / seconds / 1e6, 1),
            "ratio": round(seconds / first, 3),
        }
        for name, seconds in medians.items()
    }


if __name__ == "__main__":
    main()
