"""The seam to a process group: every rank's message to every rank.

fedring's own groups send messages of different sizes as they are, in one round trip. Any other group sends
equal tensors: the message's length, the message, and zeros up to a capacity that all ranks compute alike.
"""

from typing import Protocol, runtime_checkable

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future

from fedring.codec import CodecError

_PREFIX = 4  # bytes of the length


class BytesHandle(Protocol):
    """Messages on their way."""

    @property
    def future(self) -> Future[list[memoryview]]:
        """Of them, in rank order."""
        ...

    def wait(self, timeout_seconds: float | None = None) -> None:
        """They have all arrived."""

    def collect(self) -> list[memoryview]:
        """They, in rank order."""
        ...


@runtime_checkable
class BytesGroup(Protocol):
    """A group that sends bytes."""

    def allgather_bytes(self, payload: bytes | memoryview, *, limit: int) -> BytesHandle:
        """`payload`, and every other rank's, is on its way to every rank; none is larger than `limit`."""
        ...


def exchange(group: dist.ProcessGroup, payload: bytes | memoryview, *, limit: int) -> Future[list[memoryview]]:
    """A future of every rank's payload, in rank order.

    None is larger than `limit`, which is equal on all ranks.
    """
    if len(payload) > limit:
        raise ValueError(f"a message of {len(payload)} bytes is larger than the limit that was agreed on, {limit}")
    if isinstance(group, BytesGroup):
        return group.allgather_bytes(payload, limit=limit).future
    device = _device(group)
    mine = _padded(payload, _PREFIX + limit).to(device)
    everyone = torch.empty(group.size(), mine.numel(), dtype=torch.uint8, device=device)
    work = dist.all_gather(list(everyone), mine, group=group, async_op=True)
    if work is None:
        raise ValueError("this worker is not in the process group")
    if device.type == "cpu":
        done: Future[list[Tensor]] = work.get_future()
        return done.then(lambda done: _unpadded(done, everyone, limit))
    # A future of tensors on a device cannot carry anything else, so there is nothing to overlap with.
    work.wait()
    ready: Future[list[memoryview]] = Future()
    ready.set_result(_split(everyone.cpu(), limit))
    return ready


def _device(group: dist.ProcessGroup) -> torch.device:
    """Where the tensors of `group` have to be."""
    on_device = dist.get_backend(group) == dist.Backend.NCCL
    return torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")


def _padded(payload: bytes | memoryview, capacity: int) -> Tensor:
    buffer = np.zeros(capacity, np.uint8)
    buffer[:_PREFIX] = np.frombuffer(len(payload).to_bytes(_PREFIX, "little"), np.uint8)
    buffer[_PREFIX : _PREFIX + len(payload)] = np.frombuffer(payload, np.uint8)
    return torch.from_numpy(buffer)


def _unpadded(done: Future[list[Tensor]], everyone: Tensor, limit: int) -> list[memoryview]:
    done.value()  # raises what went wrong
    return _split(everyone, limit)


def _split(everyone: Tensor, limit: int) -> list[memoryview]:
    """The payloads in `everyone` [ranks, capacity] uint8."""
    payloads = []
    for rank, row in enumerate(everyone.numpy()):
        size = int.from_bytes(row[:_PREFIX].tobytes(), "little")
        if size > limit:
            raise CodecError("wrong_size", f"rank {rank} sent {size} bytes where at most {limit} were agreed on")
        payloads.append(memoryview(row)[_PREFIX : _PREFIX + size])
    return payloads
