"""The values of secure aggregation: an update as integers of a few levels, on steps that all clients share.

The parameters are cut into blocks of neighbouring values. A round sends some blocks or all of them, and each has one
step s: the value v becomes the level x = v / s, rounded to the nearest integer, halves to even, and cut to what the
levels hold. What the levels do not say stays with the client: the residual v - s x, and the values of blocks that are
not sent. In a round that leaves blocks out, a client trains from the model plus its residual. If it trained from the
model alone, in which a block has not moved, it would repeat the change that it keeps already, and the sum of both would
go much too far.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from fedring.codec.source import check_finite
from fedring.secure.errors import SecureError
from fedring.secure.limits import bits_of_sum
from fedring.v1 import secure_pb2 as wire

MIN_BLOCK, MAX_BLOCK = 16, 8192
MAX_LEVELS = 32767

_AT_A_TIME = 1 << 16
"""Values that are rounded at a time: they fit into a processor's cache."""

_TINY, _LARGEST = 2.0**-126, 2.0**112
"""The smallest and the largest step: its largest level, times a weight, still fits into float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """Which values of the parameters a round sends, and with which steps."""

    length: int  # number of parameters
    block: int  # values of a block; the last one may have fewer
    indices: NDArray[np.int64]  # of the blocks that are sent, rising, [n]
    scales: NDArray[np.float32]  # the step of each of them, [n]

    @property
    def count(self) -> int:
        """The number of values that are sent, without a weight."""
        return self.place(self.length)

    @property
    def all_sent(self) -> bool:
        """Whether all blocks are sent."""
        return len(self.indices) * self.block >= self.length

    def place(self, parameter: int) -> int:
        """Return how many of the parameters before this one are sent."""
        number, rest = divmod(parameter, self.block)
        before = int(np.searchsorted(self.indices, number))
        sent = before < len(self.indices) and self.indices[before] == number
        return before * self.block + (rest if sent else 0)


def blocks_of(length: int, block: int) -> int:
    """Return how many blocks so many parameters have."""
    return -(-length // block)


def open_blocks(secure: wire.SecureRound, length: int) -> Blocks:
    """Return which values a round sends.

    Args:
        secure: what the command says of the round.
        length: the number of parameters of the model.

    Raises:
        SecureError: "bad_blocks", if the round does not fit the model, or itself.
    """
    block, total = secure.block, 0
    possible = MIN_BLOCK <= block <= MAX_BLOCK and not block & (block - 1) and 1 <= secure.levels <= MAX_LEVELS
    if possible and length > 0:
        total = blocks_of(length, block)
    if not total or len(secure.blocks) not in (0, -(-total // 8)) or len(secure.scales) % 4:
        raise SecureError("bad_blocks", f"blocks of {block} with {secure.levels} levels do not fit {length} parameters")
    indices = np.arange(total)
    if secure.blocks:
        flags = np.unpackbits(np.frombuffer(secure.blocks, np.uint8), bitorder="little")
        if flags[total:].any():
            raise SecureError("bad_blocks", f"a block is sent that a model of {length} parameters does not have")
        indices = np.flatnonzero(flags)
    scales = np.frombuffer(secure.scales, "<f4")
    if len(scales) != len(indices) or not len(indices):
        raise SecureError("bad_blocks", f"there are {len(scales)} steps for {len(indices)} blocks")
    if not ((scales >= _TINY) & (scales <= _LARGEST)).all():
        raise SecureError("bad_blocks", "a step is not a number between 2^-126 and 2^112")
    return Blocks(length, block, indices.astype(np.int64), scales)


def shorten(values: NDArray[np.float32], clip: float) -> None:
    """Multiply the change of the parameters so that its L2 norm is at most about `clip`.

    Args:
        values: the change, [n], which is overwritten.
        clip: the norm, above 0; 0 = it stays as it is.
    """
    square = 0.0
    if clip:
        for start in range(0, len(values), _AT_A_TIME):
            piece = values[start : start + _AT_A_TIME].astype(np.float64)
            square += float(np.dot(piece, piece))
    if square > clip * clip:
        values *= np.float32(clip / sqrt(square))


def bits_of(secure: wire.SecureRound, clients: int) -> int:
    """Return the bits of a masked value in a round, in a group of so many clients."""
    return bits_of_sum(clients, secure.levels, secure.max_weight or 1)


def to_levels(values: NDArray[np.float32], blocks: Blocks, levels: int) -> NDArray[np.int32]:
    """Return the levels of all values that are sent, [blocks.count].

    Args:
        values: the parameters' change, [blocks.length]. It becomes what the client keeps for its next update: what the
            levels leave out, exactly wherever a level was not cut to the largest one, and rounded to float32 elsewhere;
            values that are not sent stay as they are.
        blocks: which values are sent.
        levels: the largest level on each side of zero.

    Raises:
        CodecError: "non_finite", if a value is not finite; then `values` is not changed.
    """
    if values.shape != (blocks.length,):
        raise ValueError(f"{values.shape} are not {blocks.length} parameters")
    check_finite(values)
    found = np.empty(blocks.count, np.int32)
    block = blocks.block
    whole = len(blocks.indices) - (blocks.count % block != 0)  # blocks that are not cut by the end of the model
    table = values[: blocks.length // block * block].reshape(-1, block)
    out = found[: whole * block].reshape(-1, block)
    step = max(1, _AT_A_TIME // block)
    for low in range(0, whole, step):
        high = min(low + step, whole)
        scales = blocks.scales[low:high, None]
        if blocks.all_sent:
            _round(table[low:high], scales, levels, out[low:high])
        else:
            rows = table[blocks.indices[low:high]]
            _round(rows, scales, levels, out[low:high])
            table[blocks.indices[low:high]] = rows
    if whole < len(blocks.indices):
        _round(values[len(table) * block :], blocks.scales[-1:], levels, found[whole * block :])
    return found


def integers_of(levels: NDArray[np.int32], weight: int, weighted: bool) -> NDArray[np.int32]:
    """Return the integers whose sum over clients the server learns, [n], or [n + 1] if weights count.

    Args:
        levels: of the values that are sent, [n].
        weight: of the update.
        weighted: whether updates count by their weights, which then come last. Otherwise `weight` is not used.
    """
    if not weighted:
        return levels
    integers = np.empty(len(levels) + 1, np.int32)
    np.multiply(levels, weight, out=integers[:-1])
    integers[-1] = weight
    return integers


def _round(values: NDArray[np.float32], scales: NDArray[np.float32], levels: int, out: NDArray[np.int32]) -> None:
    """Write the levels of values to `out`, and replace the values by what is left."""
    with np.errstate(over="ignore"):
        found = values / scales
    np.rint(found, out=found)
    np.clip(found, -levels, levels, out=found)
    out[...] = found
    # In float64, because the product of a step and a level does not always fit into float32.
    values -= np.multiply(found, scales, dtype=np.float64)
