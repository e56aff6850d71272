"""Secure aggregation, with sums of levels.

A round sends blocks of the parameters, in levels of a step for each. Both follow from past aggregates, so all clients
know them before they train: the spread of a model says how much each block has changed, and how long it has waited. It
is measured while the model is made, piece by piece. A round sends the blocks in which most should have gathered since
they were sent, after those that were never sent. As this grows with the rounds that a block waits, each of them gets
its turn.
"""

import struct
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, sqrt
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from fedring.codec import CodecError, Reader
from fedring.codec.schema import Schema
from fedring.secure.levels import Blocks, bits_of, blocks_of, open_blocks
from fedring.secure.masks import MASKED, MaskedPacket, Width, mask
from fedring.server.aggregation.combining import Walk
from fedring.server.aggregation.contributions import Contribution
from fedring.server.aggregation.rule import Rule
from fedring.server.aggregation.steps import BaseFiles, Step, VectorFile
from fedring.server.aggregation.terms import Terms
from fedring.server.model.masked_sum import GroupMasks, open_groups, width_of
from fedring.server.model.transforms.server_noise import check_no_buffers
from fedring.server.model.transforms.transform import ClosedRound, Feature, Skeleton
from fedring.server.state.rows import ModelRow, PacketSpec, lay_out
from fedring.signatures.digests import digest_of
from fedring.train.jobs.job import Job
from fedring.train.jobs.secure_table import SecureAggregation
from fedring.train.orders.sums import secure_settings
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

_STEPS_BYTES = 1 << 20
"""The most bytes of the steps between levels, which are a part of each client's command."""

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


class Masked(Feature):
    """A feature with masked updates: only sums of groups are known."""

    opens_groups: ClassVar[bool] = True
    hides_norms: ClassVar[bool] = True

    @abstractmethod
    def values(self, job: Job, base: ModelRow, files: BaseFiles) -> wire.SecureRound:
        """Return the command's fields for the masked values."""

    @abstractmethod
    def width(self, command: pb.TrainCmd, length: int, members: int) -> Width:
        """Return the number and the bits of an update's values.

        Args:
            command: of the round.
            length: the number of parameters of the model.
            members: the number of clients in the group.
        """

    def check(self, job: Job, schema: Schema, skeleton: Skeleton) -> None:
        """See Transform.check."""
        check_no_buffers(schema, "secure_aggregation", "masks")

    def update_bytes(self, least: int) -> int:
        """See Transform.update_bytes."""
        return 0  # the group, which is drawn later, decides

    def command(self, job: Job, command: pb.TrainCmd, base: ModelRow, files: BaseFiles) -> None:
        """See Transform.command."""
        # A client that does not know of secure aggregation does not know this name either, and sends nothing.
        command.encoding.name = MASKED
        command.secure.CopyFrom(self.values(job, base, files))

    def terms(self, terms: Terms, command: pb.TrainCmd, members: int) -> Terms:
        """See Transform.terms."""
        width = self.width(command, terms.schema.num_parameters, members)
        return replace(terms, bare=True, opaque=MaskedForm(width))


@dataclass(frozen=True, slots=True)
class MaskedForm:
    """The form of a masked update; OpaqueForm documents each method."""

    width: Width

    def packets(self, header: pb.UpdateHeader) -> tuple[PacketSpec, ...]:
        """See OpaqueForm.packets."""
        found = [(packet.vector, packet.kind, packet.encoding) for packet in header.packets]
        if found != [(pb.VECTOR_PARAMETERS, pb.KIND_DELTA, MASKED)]:
            text = "a round with secure aggregation takes one masked packet of the parameters only"
            raise CodecError("not_masked", text)
        if header.packets[0].bytes != self.width.bytes:
            text = f"a masked packet of {header.packets[0].bytes} bytes, and not of {self.width.bytes}"
            raise CodecError("wrong_width", text)
        return lay_out([("parameters", "delta", MASKED, self.width.bytes)])

    def check(self, reader: Reader, size: int) -> None:
        """See OpaqueForm.check."""
        MaskedPacket(reader, size, self.width)


@dataclass(frozen=True)
class MaskedLevels(Masked):
    """The table [secure_aggregation], if the clients add no noise."""

    table: SecureAggregation

    @classmethod
    def of(cls, job: Job) -> Self | None:
        """See Feature.of."""
        return None if job.secure_aggregation is None or job.dp is not None else cls(job.secure_aggregation)

    def check(self, job: Job, schema: Schema, skeleton: Skeleton) -> None:
        """See Transform.check."""
        if (steps := 4 * blocks_of(schema.num_parameters, self.table.block)) > _STEPS_BYTES:
            raise ValueError(
                f"secure_aggregation.block: {self.table.block} values share a step, and the steps of this model have "
                f"{steps} bytes, above {_STEPS_BYTES}: raise it"
            )
        super().check(job, schema, skeleton)

    def values(self, job: Job, base: ModelRow, files: BaseFiles) -> wire.SecureRound:
        """See Masked.values."""
        return secure_round(job, self.table, base, _pace(self.table, base, files))

    def width(self, command: pb.TrainCmd, length: int, members: int) -> Width:
        """See Masked.width."""
        return width_of(command.secure, length, bits_of(command.secure, members))

    def close(self, closed: ClosedRound, rule: Rule | None) -> Step:
        """See Transform.close."""
        return SumsOfLevels(closed, self.table)


class Sums(Step):
    """The sums of the groups of one round.

    Args:
        closed: the round, with its groups.
    """

    def __init__(self, closed: ClosedRound) -> None:
        self._groups: Sequence[GroupMasks] = closed.groups or ()
        self.secure: wire.SecureRound = closed.command.secure

    def contributions(self, given: list[Contribution], length: int) -> list[Contribution]:
        """Return one contribution for each group."""
        return open_groups(self._groups, self.secure, given, length)


class SumsOfLevels(Sums):
    """The sums of levels, and the spread of the next model."""

    def __init__(self, closed: ClosedRound, table: SecureAggregation) -> None:
        super().__init__(closed)
        self._table = table
        self._spread: Spread | None = None

    def read(self, base: ModelRow, files: BaseFiles) -> None:
        """See Step.read."""
        blocks = open_blocks(self.secure, base.parameters)
        self._spread = Spread(self._table, blocks, _pace(self._table, base, files))

    def piece(self, start: int, delta: NDArray[np.float64]) -> None:
        """See Step.piece."""
        if self._spread is not None:
            self._spread.watch(start, delta)

    def files(self, walk: Walk) -> Mapping[str, bytes | VectorFile]:
        """See Step.files."""
        return {"spread_blob": self._spread.data()} if self._spread else {}


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


def secure_round(job: Job, table: SecureAggregation, base: ModelRow, pace: Pace | None) -> wire.SecureRound:
    """Return the command's fields for a round's secure values.

    They are the same in each call.

    Args:
        job: a job with secure aggregation.
        table: of the job.
        base: the model that the round starts from.
        pace: of that model, for the job's blocks; None = not known.
    """
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


def _pace(table: SecureAggregation, base: ModelRow, files: BaseFiles) -> Pace | None:
    return pace_in(files.read(base.spread_blob), base.parameters, table.block)


class Spread:
    """The spread of the next model, while it is made.

    Args:
        table: of the job.
        blocks: what is sent in the round.
        before: how fast the blocks of the base model change; None = not known.
    """

    def __init__(self, table: SecureAggregation, blocks: Blocks, before: Pace | None) -> None:
        self._blocks = blocks
        self._before = _first_pace(table, blocks.length) if before is None else before
        known, expected = self._before.changes, self._before.gathered(_first_change(table, blocks.length))
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
