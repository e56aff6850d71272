"""Which blocks of the parameters a round with secure aggregation sends, and the steps between their levels.

The steps follow the last aggregate, so all clients know them before they train: the spread of a model has the root mean
square of each block of the combined delta that led to it. It is measured while the model is made, piece by piece.
"""

import struct
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray

from fedring.secure.levels import Blocks, blocks_of
from fedring.secure.masks import mask
from fedring.secure.statements import digest_of
from fedring.server.state.blob_interfaces import Blobs
from fedring.server.state.checked import read_checked
from fedring.server.state.rows import ModelRow
from fedring.train.job import Job
from fedring.train.secure_table import SecureAggregation
from fedring.v1 import secure_pb2 as wire

_HEADER = struct.Struct("<I")
"""Values of a block. One float32 for each block follows."""

_FLOOR = 1 / 8
"""No step is finer than if its block had this share of the root mean square over all blocks."""

_SHRINK = 1 / 8
"""A block's spread becomes at most so much smaller from round to round, because levels that are all zero say little."""

_SMALLEST, _LARGEST = 1e-30, 1e30

Float32 = NDArray[np.float32]


def secure_round(job: Job, base: ModelRow, spread: Float32 | None, seed: int) -> wire.SecureRound:
    """Return what the command of a round says of its values: the same whenever it is asked for.

    Args:
        job: a job with secure aggregation.
        base: the model that the round starts from.
        spread: of that model, for each of the job's blocks; None = not known.
        seed: of the round, which clients know.
    """
    table = _table(job)
    known = _first_spread(table, base.parameters) if spread is None else spread
    total = len(known)
    sent = np.arange(total)
    if table.keep_ratio < 1:
        sent = _choose(known, ceil(table.keep_ratio * total), seed)
    floor = _FLOOR * sqrt(float(np.mean(np.square(known, dtype=np.float64))))
    scales = table.step * np.maximum(known[sent].astype(np.float64), floor)
    flags = np.zeros(total, np.bool_)
    flags[sent] = True
    return wire.SecureRound(
        scales=scales.clip(_SMALLEST, _LARGEST).astype("<f4").tobytes(),
        blocks=b"" if len(sent) == total else np.packbits(flags, bitorder="little").tobytes(),
        block=table.block,
        levels=table.levels,
        max_weight=min(job.max_samples, table.max_weight) if job.weights == "samples" else 0,
        clip=job.update_clip,
    )


def read_spread(blobs: Blobs, base: ModelRow, block: int) -> Float32 | None:
    """Return the spread of a model, [blocks]; None if it has none for blocks of this size.

    Args:
        blobs: holds it.
        base: the model.
        block: values of a block.

    Raises:
        DamagedBlob: if it is damaged.
        StorageFailed: if it cannot be read now.
    """
    if not base.spread_blob:
        return None
    data = read_checked(blobs, base.spread_blob)
    total = blocks_of(base.parameters, block)
    if len(data) != _HEADER.size + 4 * total or _HEADER.unpack_from(data) != (block,):
        return None
    return np.frombuffer(data, "<f4", offset=_HEADER.size)


class Spread:
    """The spread of the next model, while it is made.

    Args:
        job: a job with secure aggregation.
        blocks: what is sent in the round.
        before: the spread of the base model, [blocks]; None = not known.
    """

    def __init__(self, job: Job, blocks: Blocks, before: Float32 | None) -> None:
        self._blocks = blocks
        self._before = _first_spread(_table(job), blocks.length) if before is None else before
        self._squares = np.zeros(len(self._before), np.float64)

    def watch(self, start: int, delta: NDArray[np.float64]) -> None:
        """Take the piece of the combined delta that begins at `start` into account.

        Several threads may call this, for pieces that begin and end between two blocks.
        """
        block = self._blocks.block
        first, last = start // block, blocks_of(start + len(delta), block)
        edges = np.arange(first, last) * block - start
        edges[:1] = 0
        self._squares[first:last] += np.add.reduceat(np.square(delta), edges)

    def data(self) -> bytes:
        """Return the bytes of the spread; blocks that were not sent keep what they had."""
        block, sent = self._blocks.block, self._blocks.indices
        sizes = np.minimum(block, self._blocks.length - sent * block)
        found = np.sqrt(self._squares[sent] / sizes)
        spread = self._before.astype(np.float64)
        spread[sent] = np.maximum(found, _SHRINK * spread[sent])
        return _HEADER.pack(block) + spread.clip(_SMALLEST, _LARGEST).astype("<f4").tobytes()


def _table(job: Job) -> SecureAggregation:
    if job.secure_aggregation is None:
        raise ValueError("the job has no secure aggregation")
    return job.secure_aggregation


def _first_spread(table: SecureAggregation, parameters: int) -> Float32:
    total = blocks_of(parameters, table.block)
    return np.full(total, table.first_norm / sqrt(parameters), np.float32)


def _choose(spread: Float32, count: int, seed: int) -> NDArray[np.int64]:
    """Return the indices of `count` blocks, rising: half of them have the largest spread, the others are drawn."""
    order = np.argsort(-spread, kind="stable")
    largest, others = order[: count // 2], np.sort(order[count // 2 :])
    drawn = mask(digest_of("blocks", [str(seed).encode()]), 32, 0, len(others))
    chosen = others[np.argsort(drawn, kind="stable")[: count - count // 2]]
    return np.sort(np.concatenate([largest, chosen]))
