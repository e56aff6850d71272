"""A rank of its own process: allreduces in a loop until one fails; says what happens as JSON lines.

ring_worker RANK OPTIONS COUNT        members come on stdin, as one line of JSON
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


def say(**what: Any) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    rank, options, count = int(sys.argv[1]), RingOptions.model_validate_json(sys.argv[2]), int(sys.argv[3])
    faulthandler.dump_traceback_later(2 * TIMEOUT, exit=True)
    endpoint = Endpoint(options)
    say(address=endpoint.address)
    members = json.loads(sys.stdin.readline())
    group = endpoint.group("world", rank=rank, members=members)
    try:
        endpoint.wait_until_matched(group, timeout=TIMEOUT)
        settle(endpoint, group)
        loop(group, count)
    except RingError as error:
        say(error=type(error).__name__, rank=error.rank, detail=str(error), at=time.time())
    endpoint.close()
    say(closed=True)


def settle(endpoint: Endpoint, group: Group) -> None:
    """All ranks send over their sockets, if they may."""
    while (
        endpoint.options.local_transport and allreduce(group, 1, float(endpoint.traffic.socket_frames > 0)) < group.size
    ):
        pass


def loop(group: Group, count: int) -> None:
    """Until an operation fails, or a line says "stop"; "idle" waits for one, "hold N" holds the lock of Python."""
    while True:
        say(sum=allreduce(group, count))
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
    """The sum over all ranks of `value`; of ones, their number."""
    values = torch.full((count,), value)
    program = collectives.allreduce(
        group.rank, group.size, values.view(torch.uint8).numpy().data, Reduction("sum", torch.float32)
    )
    group.start(f"allreduce of {count}", program, timeout=TIMEOUT).wait()
    return float(values.mean())


if __name__ == "__main__":
    main()
