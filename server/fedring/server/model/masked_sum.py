"""Sums of masked updates.

The updates of a group are one contribution, whose values are their sum without its masks. The clients' integers are
levels, or private integers, which have the clients' noise in them.

The walk asks for a range of the parameters. The words of this range are added up modulo 2^bits, over all updates of the
group, the same range of each mask is removed, and what is left is the sum of the clients' integers. So no update is
ever seen without its masks, and the memory is that of a few tiles, whatever the number of clients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from fedring.codec import CodecError, Decoder
from fedring.codec.chunks import spread
from fedring.privacy.integer_plan import IntegerPlan
from fedring.privacy.integers import decode_sum
from fedring.secure.levels import Blocks, largest_of, open_blocks
from fedring.secure.masks import GROUP, MaskedPacket, Width, mask, unwrap, word_type
from fedring.server.aggregation.contributions import Contribution
from fedring.v1 import secure_pb2 as wire


@dataclass(frozen=True, slots=True)
class PrivateIntegers:
    """How the clients of a group have made integers with noise."""

    plan: IntegerPlan
    seed: bytes  # of the rotation


@dataclass(frozen=True, slots=True, repr=False)
class GroupMasks:
    """A group whose masks can be removed."""

    name: str  # of the group, for the rule: the lowest client id
    clients: tuple[str, ...]  # survivors; their updates add up
    bits: int
    masks: tuple[tuple[bytes, int], ...]  # seeds of the masks that the sum of the updates still holds, with +1 or -1
    integers: PrivateIntegers | None = None  # None = they are levels


class BadSum(CodecError):
    """The sum of a group is impossible for its clients' integers.

    No model can be made with it.

    Attributes:
        group: the group's name.
    """

    def __init__(self, group: str, what: str) -> None:
        super().__init__("bad_sum", f"the sum of the group of {group} {what}: a client of it has sent other values")
        self.group = group


def width_of(secure: wire.SecureRound, length: int, bits: int) -> Width:
    """Return the number and the bits of an update's values.

    They are those of all updates of a round.

    Args:
        secure: what the command says of the round.
        length: the number of parameters of the model.
        bits: of a value, in the client's group.

    Raises:
        SecureError: "bad_blocks", if the round does not fit the model.
    """
    return Width(open_blocks(secure, length).count + (secure.max_weight > 0), bits)


def private_width(plan: IntegerPlan) -> Width:
    """Return the number and the bits of private integers.

    They are those of all updates of a group.
    """
    return Width(plan.padded, plan.bits)


def open_groups(
    groups: Sequence[GroupMasks],
    secure: wire.SecureRound,
    given: Sequence[Contribution],
    length: int,
) -> list[Contribution]:
    """Return each group as one contribution.

    It counts as much as its clients together.

    Args:
        groups: the groups of a round; no client is in two.
        secure: what the command said of the round.
        given: the clients' updates, each with its one packet.
        length: the number of parameters of the model.

    Raises:
        BadSum: if the sum of a group's weights is impossible.
        CodecError: if a payload is damaged.
        SecureError: "bad_blocks", if the round does not fit the model.
    """
    contributions, sent = [], {each.client_id: each for each in given}
    for group in groups:
        width = private_width(group.integers.plan) if group.integers else width_of(secure, length, group.bits)
        opened = [sent[client] for client in group.clients]
        packets = [MaskedPacket(each.reader, each.packets[0].bytes, width) for each in opened]
        values: MaskedSum | PrivateSum
        if group.integers:
            values = PrivateSum(group, group.integers, packets)
        else:
            values = MaskedSum(group, secure, open_blocks(secure, length), packets)
        contributions.append(Contribution(group.name, values.weight, (), opened[0].reader, values=values))
    return contributions


class MaskedSum(Decoder):
    """The mean of a group's masked updates.

    It is the sum of their values divided by the sum of their weights.

    Args:
        group: whose updates they are, and which masks their sum still holds.
        secure: what the command said of the round.
        blocks: what of the parameters is sent.
        packets: the updates of the group.

    Attributes:
        weight: the sum of the clients' weights; their number if all weights are 1.

    Raises:
        BadSum: if the sum of the weights is impossible.
        CodecError: if a packet is damaged.
    """

    seeks: ClassVar[bool] = True

    def __init__(
        self, group: GroupMasks, secure: wire.SecureRound, blocks: Blocks, packets: Sequence[MaskedPacket]
    ) -> None:
        self._group, self._blocks, self._packets = group, blocks, packets
        self._count = blocks.count + (secure.max_weight > 0)
        clients = len(group.clients)
        self.weight = float(clients)
        if secure.max_weight:
            found = int(self._sums(blocks.count, self._count)[0])
            if not 1 <= found <= clients * secure.max_weight:
                raise BadSum(group.name, f"has the weight {found}, which {clients} clients cannot have")
            self.weight = float(found)
        self._most = clients * largest_of(secure)

    def add(self, start: int, stop: int, out: NDArray[np.float64], weight: float) -> None:
        """See Decoder.add; BadSum if a value of the sum is impossible."""
        blocks = self._blocks
        low, high = blocks.place(start), blocks.place(stop)
        if low == high:
            return
        sums = self._sums(low, high)
        if max(int(sums.max()), -int(sums.min())) > self._most:
            raise BadSum(self._group.name, f"has a value beyond {self._most}")
        first, last = low // blocks.block, -(-high // blocks.block)
        values = sums.astype(np.float64)
        values *= spread(blocks.scales[first:last], blocks.block, low - first * blocks.block, high - low)
        if (share := weight / self.weight) != 1.0:
            values *= share
        if high - low == stop - start:
            out += values
        else:
            places = blocks.indices[first:last, None] * blocks.block + np.arange(blocks.block)
            begin = low - first * blocks.block
            out[places.reshape(-1)[begin : begin + high - low] - start] += values

    def decode(self, start: int, stop: int) -> NDArray[np.floating]:
        """See Decoder.decode; the values are float64."""
        values = np.zeros(stop - start, np.float64)
        self.add(start, stop, values, 1.0)
        return values

    def _sums(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return the sums of the clients' integers in a range.

        `start` and `stop` are places among the values that are sent.
        """
        return _sums(self._group, self._packets, self._count, start, stop)


class PrivateSum(Decoder):
    """The sum of a group's updates, with its clients' noise.

    It is not the mean.

    Args:
        group: whose updates they are, and which masks their sum still holds.
        integers: how they were made.
        packets: the updates of the group.

    Attributes:
        weight: the number of clients.

    Raises:
        CodecError: if a packet is damaged.
    """

    seeks: ClassVar[bool] = True

    def __init__(self, group: GroupMasks, integers: PrivateIntegers, packets: Sequence[MaskedPacket]) -> None:
        self._group, self._integers, self._packets = group, integers, packets
        self.weight = float(len(group.clients))

    def decode(self, start: int, stop: int) -> NDArray[np.floating]:
        """See Decoder.decode; the values are float64.

        Whole blocks are read, because they were rotated together.
        """
        plan, seed = self._integers.plan, self._integers.seed
        low, high = start // plan.block * plan.block, -(-stop // plan.block) * plan.block
        sums = _sums(self._group, self._packets, plan.padded, low, high)
        return decode_sum(sums, plan, seed, low)[start - low : stop - low]


def _sums(group: GroupMasks, packets: Sequence[MaskedPacket], count: int, start: int, stop: int) -> NDArray[np.int64]:
    """Return sums of the clients' integers, without their masks.

    They are those from `start` to `stop` of `count`.
    """
    low, high = start // GROUP * GROUP, min(-(-stop // GROUP) * GROUP, count)
    total = np.zeros(high - low, word_type(group.bits))
    for packet in packets:
        total += packet.words(low, high)
    for seed, sign in group.masks:
        piece = mask(seed, group.bits, low, high)
        np.subtract(total, piece, out=total) if sign > 0 else np.add(total, piece, out=total)
    return unwrap(total[start - low : stop - low], group.bits)
