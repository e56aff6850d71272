"""The blocks and level steps of a round with secure aggregation.

The blocks are those of the parameters that the round sends. Both follow from past aggregates, so all clients know them
before they train: the spread of a model says how much each block has changed, and how long it has waited. It is
measured while the model is made, piece by piece. A round sends the blocks in which most should have gathered since they
were sent, after those that were never sent. As this grows with the rounds that a block waits, each of them gets its
turn.
"""

import struct
from dataclasses import dataclass
from math import ceil, sqrt

import numpy as np
from numpy.typing import NDArray

from fedring.secure.levels import Blocks, blocks_of
from fedring.secure.masks import mask
from fedring.server.state.rows import ModelRow
from fedring.signatures.digests import digest_of
from fedring.train.jobs.job import Job
from fedring.train.jobs.secure_table import SecureAggregation
from fedring.train.orders.sums import secure_settings
from fedring.v1 import secure_pb2 as wire

_HEADER = struct.Struct("<I")
"""Values of a block. One float32 for each block follows, and then one u32."""

_FLOOR = 1 / 8
"""No block counts for less than if it changed by this share of the root mean square over all blocks."""

_SHRINK = 1 / 8
"""A block's spread becomes at most so much smaller from round to round, because integers that are all zero say little.

A block that is sent for the first time has what was expected of it as its spread before. If it had none, a first step
that is too large for all values would be followed by one that is too small for any.
"""

_SMALLEST, _LARGEST = 1e-30, 1e30

_LONGEST = np.uint32(1_000_000)
"""Blocks do not count for more if they wait for longer than that."""

Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True, eq=False)
class Pace:
    """How fast the blocks of a model change."""

    changes: Float32  # in a round: the root mean square when a block was last sent, by its rounds; 0 = never sent, [n]
    waiting: NDArray[np.uint32]  # rounds whose changes the next update of a block has, at least 1, [n]

    def gathered(self, first: float) -> NDArray[np.float64]:
        """Return each block's expected change in the next round, [n].

        It is a root mean square.

        Args:
            first: the root mean square of a round's changes while no block was ever sent.
        """
        changes, known = self.changes.astype(np.float64), self.changes > 0
        if known.any():
            first = sqrt(float(np.mean(np.square(changes[known]))))
        return np.maximum(np.where(known, changes, first), _FLOOR * first) * self.waiting.astype(np.float64)


def secure_round(job: Job, base: ModelRow, pace: Pace | None) -> wire.SecureRound:
    """Return the command's fields for a round's secure values.

    They are the same in each call.

    Args:
        job: a job with secure aggregation.
        base: the model that the round starts from.
        pace: of that model, for the job's blocks; None = not known.
    """
    table = _table(job)
    known = _first_pace(table, base.parameters) if pace is None else pace
    expected = known.gathered(_first_change(table, base.parameters))
    total = len(expected)
    sent = np.arange(total)
    if table.keep_ratio < 1:
        new = known.changes == 0
        sent = _choose(np.where(new, np.inf, expected), ceil(table.keep_ratio * total), job.seed)
    scales = table.step * expected[sent]
    flags = np.zeros(total, np.bool_)
    flags[sent] = True
    made = secure_settings(job)
    made.scales = scales.clip(_SMALLEST, _LARGEST).astype("<f4").tobytes()
    made.blocks = b"" if len(sent) == total else np.packbits(flags, bitorder="little").tobytes()
    return made


def pace_in(data: bytes, parameters: int, block: int) -> Pace | None:
    """Return the pace of a model's blocks, or None.

    None if it is not known for blocks of this size.

    Args:
        data: the bytes of the model's spread; b"" = it has none.
        parameters: the number of parameters of the model.
        block: values of a block.
    """
    total = blocks_of(parameters, block)
    if len(data) != _HEADER.size + 8 * total or _HEADER.unpack_from(data) != (block,):
        return None
    changes = np.frombuffer(data, "<f4", total, _HEADER.size)
    return Pace(changes, np.frombuffer(data, "<u4", total, _HEADER.size + 4 * total))


class Spread:
    """The spread of the next model, while it is made.

    Args:
        job: a job with secure aggregation.
        blocks: what is sent in the round.
        before: how fast the blocks of the base model change; None = not known.
    """

    def __init__(self, job: Job, blocks: Blocks, before: Pace | None) -> None:
        self._blocks = blocks
        self._before = _first_pace(_table(job), blocks.length) if before is None else before
        known, expected = self._before.changes, self._before.gathered(_first_change(_table(job), blocks.length))
        self._changes = np.where(known > 0, known.astype(np.float64), expected / self._before.waiting)
        self._squares = np.zeros(len(expected), np.float64)

    def watch(self, start: int, delta: NDArray[np.float64]) -> None:
        """Add the piece of the combined delta at `start` to the spread.

        Several threads may call this, for pieces that begin and end between two blocks.
        """
        block = self._blocks.block
        first, last = start // block, blocks_of(start + len(delta), block)
        edges = np.arange(first, last) * block - start
        edges[:1] = 0
        self._squares[first:last] += np.add.reduceat(np.square(delta), edges)

    def data(self) -> bytes:
        """Return the bytes of the spread.

        Blocks that were not sent keep what they had, and wait for a round more.
        """
        block, sent = self._blocks.block, self._blocks.indices
        sizes = np.minimum(block, self._blocks.length - sent * block)
        found = np.sqrt(self._squares[sent] / sizes) / self._before.waiting[sent]
        changes = self._before.changes.astype(np.float64)
        changes[sent] = np.maximum(found, _SHRINK * self._changes[sent]).clip(_SMALLEST, _LARGEST)
        waiting = np.minimum(self._before.waiting, _LONGEST) + 1
        waiting[sent] = 1
        return _HEADER.pack(block) + changes.astype("<f4").tobytes() + waiting.astype("<u4").tobytes()


def _table(job: Job) -> SecureAggregation:
    if job.secure_aggregation is None:
        raise ValueError("the job has no secure aggregation")
    return job.secure_aggregation


def _first_pace(table: SecureAggregation, parameters: int) -> Pace:
    total = blocks_of(parameters, table.block)
    return Pace(np.zeros(total, np.float32), np.ones(total, np.uint32))


def _first_change(table: SecureAggregation, parameters: int) -> float:
    """Return the root mean square that is expected of the first change."""
    return table.first_norm / sqrt(parameters)


def _choose(expected: NDArray[np.float64], count: int, seed: int) -> NDArray[np.int64]:
    """Return the indices of the `count` most changed blocks, rising.

    The expected change counts. Equals go by an order that is drawn.

    Args:
        expected: the root mean square of each block; infinite = it was never sent.
        count: of the blocks that are sent.
        seed: of the job, which clients know.
    """
    drawn = np.argsort(mask(digest_of("blocks", [str(seed).encode()]), 32, 0, len(expected)), kind="stable")
    return np.sort(drawn[np.argsort(-expected[drawn], kind="stable")[:count]])
