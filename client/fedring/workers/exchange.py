"""Exchanges of integers and files between workers.

They are those of the default group. Files pass piece by piece.

Whatever a peer sends is checked before memory or disk is taken for it.
"""

import os
from collections.abc import Sequence
from contextlib import ExitStack
from io import FileIO
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from fedring.daemon.durable import sync
from fedring.train.errors import TrainError, on_disk

TAG = 1 << 20
"""The tag of these messages, far above those of the lanes between stages."""

_PIECE_BYTES = 1 << 18
_MAX_INTEGERS = 1 << 16


def gather_integers(values: Sequence[int]) -> list[list[int]]:
    """Return the values of every worker, by rank.

    Their number may differ from worker to worker.

    Raises:
        TrainError: With the reason bad_peer, if a worker sends too many.
    """
    counts = [int(row) for row in _gather(torch.tensor([len(values)]))]
    most = max(counts)
    if not 0 <= min(counts) <= most <= _MAX_INTEGERS:
        raise TrainError("bad_peer", f"a worker sends {most} integers, above {_MAX_INTEGERS}.")
    if not most:
        return [[] for _ in counts]
    padded = torch.zeros(most, dtype=torch.int64)
    padded[: len(values)] = torch.tensor(list(values), dtype=torch.int64)
    return [row[:count].tolist() for row, count in zip(_gather(padded), counts, strict=True)]


def exchange_files(outgoing: tuple[Path, int] | None, incoming: tuple[Path, int] | None, *, limit: int = 0) -> None:
    """Send one file while another one is received, piece by piece.

    The two other sides may be different workers.

    Args:
        outgoing: The file and the rank that it goes to; None = none. The other side must call this, too.
        incoming: The file to write and the rank that it comes from; None = none. It is written durably, and appears
            under its name when it is complete.
        limit: The largest size of a file to receive, in bytes.

    Raises:
        TrainError: With the reason bad_peer, if the incoming file is larger than the limit, or disk_failed.
    """
    sent = outgoing[0].stat().st_size if outgoing else 0
    announced = dist.isend(torch.tensor([sent]), outgoing[1], tag=TAG) if outgoing else None
    total = _announced(incoming[1], limit) if incoming else 0
    if announced is not None:
        announced.wait()
    with ExitStack() as files:
        source = files.enter_context(outgoing[0].open("rb", buffering=0)) if outgoing else None
        part = incoming[0].with_name(incoming[0].name + ".part") if incoming else None
        if part:
            files.enter_context(on_disk(part))
            files.callback(part.unlink, missing_ok=True)  # of a file whose sender is lost
        target = files.enter_context(part.open("wb", buffering=0)) if part else None
        for offset in range(0, max(sent, total), _PIECE_BYTES):
            work = None
            if outgoing and source and offset < sent:
                piece = _read(source.fileno(), offset, min(_PIECE_BYTES, sent - offset))
                work = dist.isend(piece, outgoing[1], tag=TAG)
            if incoming and target and offset < total:
                received = torch.empty(min(_PIECE_BYTES, total - offset), dtype=torch.uint8)
                dist.recv(received, incoming[1], tag=TAG)
                _write(target, received.numpy().data)
            if work is not None:
                # The next piece is read only when this one has left, so that one piece at a time is in memory.
                work.wait()
        if incoming and part and target:
            os.fsync(target.fileno())
            part.replace(incoming[0])
            sync(incoming[0].parent)


def _announced(source: int, limit: int) -> int:
    """Receive the size of a rank's file."""
    size = torch.zeros(1, dtype=torch.int64)
    dist.recv(size, source, tag=TAG)
    if not 0 < int(size) <= limit:
        raise TrainError("bad_peer", f"rank {source} sends {int(size)} bytes, which must be 1 to {limit}.")
    return int(size)


def _write(file: FileIO, left: memoryview) -> None:
    while left:
        left = left[file.write(left) :]


def _read(fd: int, offset: int, size: int) -> Tensor:
    """Return a piece of a file, [size] uint8."""
    piece = torch.empty(size, dtype=torch.uint8)
    left = piece.numpy().data
    while left:
        count = os.preadv(fd, [left], offset)
        if not count:
            raise TrainError("bad_checkpoint", "a checkpoint was cut short while it was sent.")
        left, offset = left[count:], offset + count
    return piece


def _gather(mine: Tensor) -> list[Tensor]:
    rows = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(rows, mine)
    return rows
