"""Collectives between workers over gRPC, with a torch.distributed backend.

The backend is called "fedring":

    import fedring.ring
    torch.distributed.init_process_group("fedring")

Three rooms, each of which imports only those below it: `torch` (the backend), `engine` (collectives, operations,
groups), `transport` (links between two workers). Beside them stand `options` and `errors`.

Errors are RingErrors, on every rank; torch's C++ code (DistributedDataParallel's backward) turns them into
RuntimeErrors with the same text. The package may import `fedring.daemon` and `fedring.rpc`.
"""

import os
from datetime import timedelta

from fedring.requirements import check_grpcio, check_torch

check_torch()
check_grpcio()
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before grpc is imported, which logs each peer that leaves

import torch.distributed as dist  # noqa: E402

import fedring.rpc  # noqa: E402, F401  # before grpc is imported, too
from fedring.ring.engine.endpoint import Endpoint  # noqa: E402
from fedring.ring.errors import CollectiveTimeout, Forked, Mismatch, NotSupported, PeerLost, RingError  # noqa: E402
from fedring.ring.options import RingOptions  # noqa: E402
from fedring.ring.torch.messages import BytesGather  # noqa: E402
from fedring.ring.torch.private_names import refuse_beside_others  # noqa: E402
from fedring.ring.torch.process_group import RingProcessGroup  # noqa: E402
from fedring.ring.torch.rendezvous import create, failure, join, leave, rejoin, waiting  # noqa: E402
from fedring.ring.torch.world import total_traffic, traffic  # noqa: E402
from fedring.ring.transport.interface import Traffic  # noqa: E402

__all__ = [
    "BytesGather",
    "CollectiveTimeout",
    "Endpoint",
    "Forked",
    "Mismatch",
    "NotSupported",
    "PeerLost",
    "RingError",
    "RingOptions",
    "RingProcessGroup",
    "Traffic",
    "allgather_bytes",
    "failure",
    "join",
    "leave",
    "monitored_barrier",
    "rejoin",
    "total_traffic",
    "traffic",
    "waiting",
]


def allgather_bytes(
    payload: bytes | memoryview, group: dist.ProcessGroup | None = None, *, limit: int = 1 << 30
) -> BytesGather:
    """Start an allgather of bytes over the ranks of a group.

    Args:
        payload: This rank's message.
        group: A group of the backend fedring; None = the default group.
        limit: The most bytes of a message, equal on all ranks.

    Raises:
        NotSupported: The group is of another backend.
        ValueError: The message is larger than the limit.
    """
    return _ring_group(group).allgather_bytes(payload, limit=limit)


def monitored_barrier(
    group: dist.ProcessGroup | int | None = None, timeout: timedelta | None = None, wait_all_ranks: bool = False
) -> None:
    """Wait until all ranks of a group have come.

    Rank 0's error names those that have not.

    It is `torch.distributed.monitored_barrier`, which refuses every backend but Gloo.

    Args:
        group: A group of the backend fedring; None = the default group. A rank that is not in it returns at once.
        timeout: How long rank 0 waits for the others; None = the group's timeout.
        wait_all_ranks: Whether rank 0 waits for all ranks and names all that are missing, and not only the first.

    Raises:
        CollectiveTimeout: A rank has not come in time. As every RingError it ends the generation, on every rank.
        NotSupported: The group is of another backend.
    """
    if not isinstance(group, int):  # torch gives an int to ranks that are not in a group
        _ring_group(group).monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)


def _ring_group(group: dist.ProcessGroup | None) -> RingProcessGroup:
    chosen = group or dist.group.WORLD
    if not isinstance(chosen, RingProcessGroup):
        raise NotSupported(f"{chosen} is not a group of the backend fedring")
    return chosen


dist.Backend.register_backend("fedring", create, extended_api=True, devices=["cpu", "cuda"])
refuse_beside_others("fedring")
