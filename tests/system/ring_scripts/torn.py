"""A worker of docs/examples/rejoin.py whose first group fails before it has made DistributedDataParallel.

When it makes it again, it prints the digest of the parameters that it brings.
"""

import hashlib
import runpy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import parallel

from fedring.ring import PeerLost

_whole: Any = parallel.DistributedDataParallel
_has_failed = False


def _replicated(network: nn.Module) -> Any:
    global _has_failed
    if not _has_failed:
        _has_failed = True
        group: Any = dist.group.WORLD
        group.ring.fail(lost := PeerLost("rank 1 is lost", rank=1))
        raise lost
    values = torch.cat([parameter.detach().flatten() for parameter in network.parameters()])
    print(f"brings {hashlib.sha256(values.numpy().tobytes()).hexdigest()[:16]}", flush=True)
    return _whole(network)


if __name__ == "__main__":
    parallel.DistributedDataParallel = _replicated  # type: ignore[assignment,misc]
    runpy.run_module("rejoin", run_name="__main__")
