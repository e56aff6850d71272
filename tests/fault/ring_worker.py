"""A rank of a ring in its own process: it runs allreduces until one fails, and prints what happens as JSON lines.

    python -m tests.fault.ring_worker RANK OPTIONS COUNT

It reads the addresses of all members from stdin, as one line of JSON, and then commands; see `loop`.
"""

import ctypes
import faulthandler
import json
import sys
import time
from typing import Any

import torch

from fedring.ring.engine import collectives
from fedring.ring.engine.endpoint import Endpoint
from fedring.ring.engine.group import Group
from fedring.ring.engine.reduction import Reduction
from fedring.ring.errors import RingError
from fedring.ring.options import RingOptions

TIMEOUT = 120.0


def report(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    rank, options, count = int(sys.argv[1]), RingOptions.model_validate_json(sys.argv[2]), int(sys.argv[3])
    faulthandler.dump_traceback_later(2 * TIMEOUT, exit=True)
    endpoint = Endpoint(options)
    report(address=endpoint.address)
    members = json.loads(sys.stdin.readline())
    group = endpoint.group("world", rank=rank, members=members)
    try:
        endpoint.wait_until_matched(group, timeout=TIMEOUT)
        settle(endpoint, group)
        loop(group, count)
    except RingError as error:
        report(error=type(error).__name__, rank=error.rank, detail=str(error), at=time.time())
    endpoint.close()
    report(closed=True)


def settle(endpoint: Endpoint, group: Group) -> None:
    """With shared memory, run allreduces until every rank has sent frames over its local socket."""
    while (
        endpoint.options.local_transport and allreduce(group, 1, float(endpoint.traffic.socket_frames > 0)) < group.size
    ):
        pass


def loop(group: Group, count: int) -> None:
    """Run allreduces until one fails, and obey the commands on stdin after each.

    "stop" returns; "run" does not read commands any more; "idle" waits to receive from the next rank; "hold N" holds
    the interpreter's lock for N seconds; any other line runs the next allreduce.
    """
    while True:
        report(sum=allreduce(group, count))
        word, _, seconds = sys.stdin.readline().strip().partition(" ")
        if word == "stop":
            return
        if word == "run":
            while True:
                allreduce(group, count)
        if word == "idle":
            receive = group.start(
                "idle", collectives.receive((group.rank + 1) % group.size, memoryview(bytearray(8))), timeout=TIMEOUT
            )
            receive.wait()
        if word == "hold":
            ctypes.PyDLL(None).sleep(int(seconds))  # unlike time.sleep, with the interpreter's lock


def allreduce(group: Group, count: int, value: float = 1.0) -> float:
    """Sum `count` values, each of them `value`, over all ranks; return the mean of the sums."""
    values = torch.full((count,), value)
    program = collectives.allreduce(
        group.rank, group.size, values.view(torch.uint8).numpy().data, Reduction("sum", torch.float32)
    )
    group.start(f"allreduce of {count}", program, timeout=TIMEOUT).wait()
    return float(values.mean())


if __name__ == "__main__":
    main()
