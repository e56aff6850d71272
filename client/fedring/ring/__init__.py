"""A ring of workers over gRPC, and the torch.distributed backend "fedring" on top of it.

    import fedring.ring
    torch.distributed.init_process_group("fedring")

Errors are RingErrors, on every rank; torch's C++ code (DistributedDataParallel's backward) turns them into
RuntimeErrors with the same text.
"""

import os

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before grpc is imported: a peer that leaves is no news

import torch.distributed as dist

from fedring.ring.endpoint import Endpoint
from fedring.ring.errors import CollectiveTimeout, Mismatch, NotSupported, PeerLost, RingError
from fedring.ring.gathering import BytesGather
from fedring.ring.link import Traffic
from fedring.ring.options import RingOptions
from fedring.ring.process_group import RingProcessGroup
from fedring.ring.rendezvous import create, join, leave
from fedring.ring.world import total_traffic, traffic

__all__ = [
    "BytesGather",
    "CollectiveTimeout",
    "Endpoint",
    "Mismatch",
    "NotSupported",
    "PeerLost",
    "RingError",
    "RingOptions",
    "RingProcessGroup",
    "Traffic",
    "allgather_bytes",
    "join",
    "leave",
    "total_traffic",
    "traffic",
]


def allgather_bytes(
    payload: bytes | memoryview, group: dist.ProcessGroup | None = None, *, limit: int = 1 << 30
) -> BytesGather:
    """`payload`, of at most `limit` bytes, and every other rank's, is on its way to every rank of the group."""
    chosen = group or dist.group.WORLD
    if not isinstance(chosen, RingProcessGroup):
        raise NotSupported("only groups of the backend fedring send bytes")
    return chosen.allgather_bytes(payload, limit=limit)


dist.Backend.register_backend("fedring", create, extended_api=True, devices=["cpu", "cuda"])
