"""Secure aggregation, with sums of levels."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Self

import numpy as np
from numpy.typing import NDArray

from fedring.codec import CodecError, Reader
from fedring.codec.schema import Schema
from fedring.secure.levels import bits_of, blocks_of, open_blocks
from fedring.secure.masks import MASKED, MaskedPacket, Width
from fedring.server.aggregation.combining import Walk
from fedring.server.aggregation.contributions import Contribution
from fedring.server.aggregation.rule import Rule
from fedring.server.aggregation.steps import BaseFiles, Step, VectorFile
from fedring.server.aggregation.terms import Terms
from fedring.server.model.masked_sum import GroupMasks, Sent, open_groups, width_of
from fedring.server.model.secure_scales import Pace, Spread, pace_in, secure_round
from fedring.server.model.transforms.server_noise import check_no_buffers
from fedring.server.model.transforms.transform import ClosedRound, Feature, Skeleton
from fedring.server.state.rows import ModelRow, PacketSpec, lay_out
from fedring.train.jobs.job import Job
from fedring.train.jobs.secure_table import SecureAggregation
from fedring.v1 import federation_pb2 as pb
from fedring.v1 import secure_pb2 as wire

_STEPS_BYTES = 1 << 20
"""The most bytes of the steps between levels, which are a part of each client's command."""


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
        return secure_round(job, base, _pace(self.table, base, files))

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
        sent = {each.client_id: Sent(each.reader, each.packets[0].bytes) for each in given}
        return open_groups(self._groups, self.secure, sent, length)


class SumsOfLevels(Sums):
    """The sums of levels, and the spread of the next model."""

    def __init__(self, closed: ClosedRound, table: SecureAggregation) -> None:
        super().__init__(closed)
        self._job, self._table = closed.job, table
        self._spread: Spread | None = None

    def read(self, base: ModelRow, files: BaseFiles) -> None:
        """See Step.read."""
        blocks = open_blocks(self.secure, base.parameters)
        self._spread = Spread(self._job, blocks, _pace(self._table, base, files))

    def piece(self, start: int, delta: NDArray[np.float64]) -> None:
        """See Step.piece."""
        if self._spread is not None:
            self._spread.watch(start, delta)

    def files(self, walk: Walk) -> Mapping[str, bytes | VectorFile]:
        """See Step.files."""
        return {"spread_blob": self._spread.data()} if self._spread else {}


def _pace(table: SecureAggregation, base: ModelRow, files: BaseFiles) -> Pace | None:
    return pace_in(files.read(base.spread_blob), base.parameters, table.block)
