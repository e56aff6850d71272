"""The exchange of bytes between all ranks of a process group.

Groups of fedring send messages of different sizes as they are, in one round trip. In any other group each rank sends a
tensor of the same size: the message's length, the message, and zeros up to a capacity that all ranks compute alike.
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
    """An exchange of messages that was started."""

    @property
    def future(self) -> Future[list[memoryview]]:
        """A future of all ranks' messages, in the order of ranks."""
        ...

    def wait(self, timeout_seconds: float | None = None) -> None:
        """Wait until all messages have arrived."""

    def collect(self) -> list[memoryview]:
        """Return all ranks' messages, in the order of ranks."""
        ...


@runtime_checkable
class BytesGroup(Protocol):
    """A process group that can send bytes."""

    def allgather_bytes(self, payload: bytes | memoryview, *, limit: int) -> BytesHandle:
        """Start an allgather of payloads of at most `limit` bytes."""
        ...


def exchange(group: dist.ProcessGroup, payload: bytes | memoryview, *, limit: int) -> Future[list[memoryview]]:
    """Send a message to all ranks, and receive theirs.

    Args:
        group: The ranks, of any backend.
        payload: This rank's message.
        limit: The size in bytes that no rank's message exceeds; equal on all ranks.

    Returns:
        A future of all ranks' messages, in the order of ranks. Its error is a CodecError("wrong_size") if one of them
        claims to be larger than `limit`.

    Raises:
        ValueError: If `payload` is larger than `limit`, or if this worker is not in the group.
    """
    if len(payload) > limit:
        raise ValueError(f"a message of {len(payload)} bytes is larger than the limit that was agreed on, {limit}")
    if isinstance(group, BytesGroup):
        return group.allgather_bytes(payload, limit=limit).future
    device = device_of(group)
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


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device that the tensors of `group` have to be on."""
    on_device = dist.get_backend(group) == dist.Backend.NCCL
    return torch.device("cuda", torch.cuda.current_device()) if on_device else torch.device("cpu")


def _padded(payload: bytes | memoryview, capacity: int) -> Tensor:
    buffer = np.zeros(capacity, np.uint8)
    buffer[:_PREFIX] = np.frombuffer(len(payload).to_bytes(_PREFIX, "little"), np.uint8)
    buffer[_PREFIX : _PREFIX + len(payload)] = np.frombuffer(payload, np.uint8)
    return torch.from_numpy(buffer)


def _unpadded(done: Future[list[Tensor]], everyone: Tensor, limit: int) -> list[memoryview]:
    done.value()  # raises the error of a gather that failed
    return _split(everyone, limit)


def _split(everyone: Tensor, limit: int) -> list[memoryview]:
    """Return the messages that the rows of `everyone` [ranks, capacity] uint8 hold."""
    payloads = []
    for rank, row in enumerate(everyone.numpy()):
        size = int.from_bytes(row[:_PREFIX].tobytes(), "little")
        if size > limit:
            raise CodecError("wrong_size", f"rank {rank} sent {size} bytes where at most {limit} were agreed on")
        payloads.append(memoryview(row)[_PREFIX : _PREFIX + size])
    return payloads
