"""Updates as integers, on steps that all clients share.

These integers are the values of secure aggregation. The parameters are cut into blocks of neighbouring values. A round
sends some blocks or all of them, and each has one step s. In an update of the weight w, the value v becomes the integer
x = w v / s, rounded to the nearest, halves to even, and cut to the range of the round's levels L and its largest weight
W: -L W to L W, for every client alike. A dither between -1/2 and 1/2 is added before, which nobody else can compute: so
two sums of nearly the same updates differ by more than these do.

The weight counts before the rounding. Unequal weights that multiply a few levels afterwards make a knapsack of their
sum, which opens: only one choice of levels gives it. Integers on one grid, in one range, have nothing of that.

The rest stays with the client: the residual v - s x / w, and the values of blocks that are not sent. In a round that
leaves blocks out, a client trains from the model plus its residual. If it trained from the model alone, in which a
block has not moved, it would repeat the change that it keeps already, and the sum of both would go much too far.
"""

from dataclasses import dataclass
from math import sqrt

import numpy as np
from numpy.typing import NDArray

from fedring.codec.errors import CodecError
from fedring.secure import SecureError
from fedring.secure.limits import MAX_BLOCK, MAX_LEVELS, MIN_BLOCK, bits_of_sum
from fedring.secure.masks import mask
from fedring.v1 import secure_pb2 as wire

MAX_INTEGER = 2**31 - 1

_AT_A_TIME = 1 << 16
"""Values that are rounded at a time: they fit into a processor's cache."""

_TINY, _LARGEST = 2.0**-126, 2.0**112
"""The smallest and the largest step."""


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The values of the parameters that a round sends, and their steps."""

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
        """Return the number of sent parameters before this one."""
        number, rest = divmod(parameter, self.block)
        before = int(np.searchsorted(self.indices, number))
        sent = before < len(self.indices) and self.indices[before] == number
        return before * self.block + (rest if sent else 0)


def blocks_of(length: int, block: int) -> int:
    """Return the number of blocks of `length` parameters."""
    return -(-length // block)


def open_blocks(secure: wire.SecureRound, length: int) -> Blocks:
    """Return the blocks of values that a round sends.

    Args:
        secure: the command's settings of the round.
        length: the number of parameters of the model.

    Raises:
        SecureError: "bad_blocks", if the round does not fit the model, or itself.
    """
    block, total = secure.block, 0
    possible = MIN_BLOCK <= block <= MAX_BLOCK and not block & (block - 1) and 1 <= secure.levels <= MAX_LEVELS
    if possible and length > 0 and largest_of(secure) <= MAX_INTEGER:
        total = blocks_of(length, block)
    if not total or len(secure.blocks) not in (0, -(-total // 8)) or len(secure.scales) % 4:
        raise SecureError("bad_blocks", f"blocks of {block} with {secure.levels} levels do not fit {length} parameters")
    # The lengths are checked: everything below takes no more memory than the model's blocks.
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
    """Scale the change of the parameters to an L2 norm of `clip`.

    The norm is then at most about `clip`; a smaller one stays as it is.

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


def largest_of(secure: wire.SecureRound) -> int:
    """Return the largest integer of any client in a round."""
    return secure.levels * (secure.max_weight or 1)


def weight_of(secure: wire.SecureRound, samples: int) -> int:
    """Return the weight of an update of `samples` samples, at least 1."""
    if samples < 1:
        raise ValueError(f"an update of {samples} samples has no weight")
    return min(samples, secure.max_weight or 1)


def bits_of(secure: wire.SecureRound, clients: int) -> int:
    """Return the bits of a masked value in a group of `clients`."""
    return bits_of_sum(clients, secure.levels, secure.max_weight or 1)


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """An update as integers."""

    integers: NDArray[np.int32]  # of the values that are sent, and then the weight if weights count, [n] or [n + 1]
    clipped_share: float  # of the values that are sent and are not 0, how many are too large for the range
    zeroed: bool  # whether these were too many, so that all integers but the weight are 0


def to_integers(
    values: NDArray[np.float32],
    secure: wire.SecureRound,
    samples: int,
    *,
    dither: bytes = b"",
    max_clipped_share: float = 1.0,
) -> Rounded:
    """Round an update to the integers of secure aggregation.

    The server learns their sum over clients.

    Args:
        values: the parameters' change, [n]. It becomes the residual that the client keeps for its next update: the part
            that the integers leave out, computed in float64 and rounded to float32; values that are not sent stay as
            they are.
        secure: the command's settings of the round.
        samples: how many samples the client was trained on, at least 1.
        dither: 32 bytes that it follows from, for this update only; empty = none.
        max_clipped_share: of the values that are sent and are not 0. If more would be cut, nothing is told: each
            integer but the weight is 0, and `values` stays as it is.

    Raises:
        CodecError: "non_finite", if a value is not finite; then `values` is not changed.
        SecureError: "bad_blocks", if the round does not fit the model.
    """
    blocks, weight, largest = open_blocks(secure, values.size), weight_of(secure, samples), largest_of(secure)
    found, share = zero_integers(secure, values.size, samples), _clipped_share(values, blocks, (largest + 0.5) / weight)
    # Cut values stay in the residual and are sent again: if too many are, the steps are wrong, and a cut update would
    # be another direction.
    zeroed = share > max_clipped_share
    if not zeroed:
        _round_all(values, blocks, _Grid(weight, _not_above(largest), dither), found[: blocks.count])
    return Rounded(found, share, zeroed)


def zero_integers(secure: wire.SecureRound, length: int, samples: int) -> NDArray[np.int32]:
    """Return the integers of an update of zeros, with its full weight.

    Args:
        secure: the command's settings of the round.
        length: the number of parameters.
        samples: how many samples the client's updates count for, at least 1.

    Raises:
        SecureError: "bad_blocks", if the round does not fit the model.
    """
    count = open_blocks(secure, length).count
    found = np.zeros(count + (secure.max_weight > 0), np.int32)
    found[count:] = weight_of(secure, samples)
    return found


def _clipped_share(values: NDArray[np.float32], blocks: Blocks, steps: float) -> float:
    """Return the share of sent, nonzero values beyond `steps` steps.

    Raises:
        CodecError: "non_finite", if any value is not finite, sent or not.
    """
    edges = np.full(blocks_of(blocks.length, blocks.block), np.nan, np.float32)  # of blocks that are not sent
    with np.errstate(over="ignore"):
        edges[blocks.indices] = blocks.scales * np.float64(steps)
    whole, at_once = blocks.length // blocks.block, _AT_A_TIME // blocks.block
    table, last = values[: whole * blocks.block].reshape(-1, blocks.block), values[None, whole * blocks.block :]
    counts = [
        _count(table[low : low + at_once], edges[:whole][low : low + at_once]) for low in range(0, whole, at_once)
    ]
    if last.size:
        counts.append(_count(last, edges[whole:]))
    cut, live = (sum(column) for column in zip(*counts, strict=True))
    return cut / live if live else 0.0


def _count(rows: NDArray[np.float32], edges: NDArray[np.float32]) -> tuple[int, int]:
    """Count values of rows beyond their edges, and those not 0.

    Args:
        rows: [n, m].
        edges: of the rows, [n]; NaN for rows that are not sent.
    """
    sizes = np.abs(rows)
    longest = sizes.max()
    if not np.isfinite(longest):
        raise CodecError("non_finite")
    sent = ~np.isnan(edges)
    if not sent.all():
        sizes, edges = sizes[sent], edges[sent]
    # Mostly, no value is beyond any edge, which is seen faster than that each is below its own.
    cut = int(np.count_nonzero(sizes > edges[:, None])) if (longest > edges).any() else 0
    return cut, int(np.count_nonzero(sizes > 0))


@dataclass(frozen=True, slots=True, eq=False)
class _Grid:
    """The parameters by which values become integers."""

    weight: int
    largest: np.float32
    dither: bytes


def _round_all(values: NDArray[np.float32], blocks: Blocks, grid: _Grid, found: NDArray[np.int32]) -> None:
    """Write the integers of sent values to `found`.

    The rest of each value is left in `values`.
    """
    block = blocks.block
    whole = len(blocks.indices) - (blocks.count % block != 0)  # blocks that are not cut by the end of the model
    table = values[: blocks.length // block * block].reshape(-1, block)
    out = found[: whole * block].reshape(-1, block)
    step = _AT_A_TIME // block
    room = np.empty((2, step, block))  # that is written over: to allocate it takes longer
    for low in range(0, whole, step):
        high = min(low + step, whole)
        scales, dither = blocks.scales[low:high, None], _dither(grid.dither, low * block, high * block)
        if blocks.all_sent:
            _round(table[low:high], scales, grid, dither, out[low:high], room)
        else:
            rows = table[blocks.indices[low:high]]
            _round(rows, scales, grid, dither, out[low:high], room)
            table[blocks.indices[low:high]] = rows
    if whole < len(blocks.indices):
        rows, dither = values[None, len(table) * block :], _dither(grid.dither, whole * block, blocks.count)
        _round(rows, blocks.scales[-1:, None], grid, dither, found[None, whole * block :], room)


def _dither(key: bytes, start: int, stop: int) -> NDArray[np.float32] | None:
    """Return the dither of the sent values, [stop - start].

    The values are those from `start` to `stop`. It is None without a key.
    """
    if not key:
        return None
    # The middles of 256 equal cells: never 1/2, which would move a value that is an integer already.
    found = np.multiply(mask(key, 8, start, stop), np.float32(2**-8), dtype=np.float32)
    found += np.float32(2**-9 - 0.5)
    return found


def _round(
    values: NDArray[np.float32],
    scales: NDArray[np.float32],
    grid: _Grid,
    dither: NDArray[np.float32] | None,
    out: NDArray[np.int32],
    room: NDArray[np.float64],
) -> None:
    """Write the integers of rows to `out`; leave the rest in `values`."""
    with np.errstate(over="ignore"):
        found = values / scales
        if grid.weight != 1:
            found *= np.float32(grid.weight)
    if dither is not None:
        found += dither.reshape(found.shape)
    np.rint(found, out=found)
    np.clip(found, -grid.largest, grid.largest, out=found)
    out[...] = found
    # In float64, because the product of a step and an integer does not always fit into float32.
    told, left = room[:, : values.shape[0], : values.shape[1]]
    told[...] = found
    told *= scales.astype(np.float64) / grid.weight
    left[...] = values
    left -= told
    values[...] = left


def _not_above(largest: int) -> np.float32:
    """Return the largest float32 that is not above an integer."""
    bound = np.float32(largest)
    return bound if int(bound) <= largest else np.nextafter(bound, np.float32(0))
