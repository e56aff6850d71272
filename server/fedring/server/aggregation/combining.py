"""The walk over a round's updates that combines them.

It makes one delta of them, piece by piece. Federated averaging and the rules of Gram matrices need a weighted sum, for
which one update after the other is added to a piece of the result. A Gram matrix and the coordinate-wise rules need the
values of all updates side by side. These are held in one array of at most ROWS_BYTES, whatever the number of updates:
the more there are, the smaller the pieces. Encodings that decode whole segments decode each segment once for every
piece of it.
"""

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedring.job_code import job_code
from fedring.server.aggregation.contributions import ClientVector, Contribution, Values, values_at_a_time
from fedring.server.aggregation.mean import weighted_mean
from fedring.server.aggregation.robust import Median
from fedring.server.aggregation.rule import CoordinateRule, GramRule, Rule, RuleError
from fedring.server.aggregation.walk import cut, gather, in_order

T = TypeVar("T")
Float64 = NDArray[np.float64]
Finish = Callable[[int, Values, Float64], T]
"""Takes where a piece begins, the base's values and the combined delta; may overwrite the delta."""

ROWS_BYTES = 208 << 20
"""The most memory for the values of all updates side by side: 100 updates with half a tile of float32 each."""

_BLOCK_VALUES = 1 << 19
"""Values, of all updates together, that one thread takes at a time from those that lie side by side."""

UNIT = 16
"""Pieces begin at multiples of this many values: decoders may read groups of so many."""

_MOST_COLUMNS = 4096
"""The most columns that a block has because there are many updates."""


@dataclass(frozen=True, slots=True)
class Combination:
    """How updates are combined. The default is federated averaging."""

    rule: Rule | None = None  # None = the mean, weighted as the contributions say
    bucketing: int = 1  # updates that are averaged before the rule sees them
    seed: str = ""  # draws the buckets, together with the clients' ids; not to be known to clients
    divisor: float | None = None  # of the mean of the parameters; None = the sum of the weights
    own: Contribution | None = None  # the server's update, seen last by the rule, in no bucket of others


@dataclass(frozen=True, slots=True)
class Walk:
    """One vector of the base and all updates, and its walk.

    Args:
        base: returns a range of the base model, float32 or float64, not to be written to.
        length: the number of values.
        clients: the updates that have this vector, in client-id order, at least one.
        executor: computes several pieces at a time.
        value_bytes: of a value of the base, 4 or 8.
    """

    base: Callable[[int, int], Values]
    length: int
    clients: Sequence[ClientVector]
    executor: Executor
    value_bytes: int = 4

    @property
    def step(self) -> int:
        """The number of values that a sequential walk reads at once.

        Such a walk adds one update after the other.
        """
        return values_at_a_time(decoder for client in self.clients for decoder in client.decoders)

    def side_by_side(self) -> Generator[tuple[Values, NDArray[Any]], None, None]:
        """Yield each piece's base values and all updates' deltas.

        The base's values are [m], and the deltas are [clients, m], of the same dtype. Each array of deltas is
        overwritten when the next one is asked for.
        """
        count, size = len(self.clients), self.value_bytes
        pieces = -(-self.step * count * size // ROWS_BYTES)
        step = self.step if pieces == 1 else max(UNIT, self.step // pieces // UNIT * UNIT)
        step = min(step, self.length)
        rows = np.empty((count, step), f"f{size}")
        for start, stop in cut(0, self.length, step):
            base, piece = self.base(start, stop), rows[:, : stop - start]
            _run(in_order(self.executor, partial(self._read, start, base, piece), cut(0, count, 1)))
            yield base, piece

    def _read(self, start: int, base: Values, piece: NDArray[Any], low: int, high: int) -> None:
        """Fill rows `low` to `high` of a piece beginning at `start`."""
        for index in range(low, high):
            with np.errstate(over="ignore"):  # what becomes infinite is noticed in the result
                piece[index] = self.clients[index].delta(base, start, start + len(base))


def combine_parameters(walk: Walk, how: Combination, finish: Finish[T]) -> Generator[T, None, None]:
    """Yield the combined delta of the parameters, piece by piece.

    Args:
        walk: the parameters; if `how` has an update of the server, it is the last one.
        how: how they are combined.
        finish: called with the place, the base's values and the delta of each piece, which it may overwrite; its
            results are yielded. Called from several threads.

    Raises:
        RuleError: "bad_rule", if the rule raises an error, or returns something else than finite values; or the error
            of a rule that finds these updates unusable.
    """
    rule = how.rule
    if rule is None:
        return _mean(walk, finish, how.divisor)
    count = len(walk.clients) - (how.own is not None)
    buckets = buckets_of([client.client_id for client in walk.clients[:count]], how.bucketing, how.seed)
    buckets += [[count]] if how.own else []
    if not isinstance(rule, GramRule):
        return _by_coordinates(walk, rule, buckets, finish)
    shares = np.zeros((len(buckets), len(walk.clients)))
    for row, bucket in zip(shares, buckets, strict=True):
        row[bucket] = 1.0 / len(bucket)
    gram = shares @ gram_of(walk) @ shares.T
    weights = _weights(walk.clients, buckets)
    coefficients = _call(lambda: rule.coefficients(gram, weights), len(buckets))
    return _weighted(walk, (coefficients @ shares).tolist(), 1.0, finish)


def combine_buffers(walk: Walk, how: Combination) -> Float64:
    """Return the combined delta of the buffers, [walk.length].

    They are averaged with the mean, and combined by coordinates with any other rule, without buckets: what a Gram
    matrix says of the parameters says nothing of the buffers that a client sends.

    Raises:
        RuleError: as combine_parameters.
    """
    out = np.empty(walk.length, np.float64)
    if how.rule is None:
        return gather(_mean(walk, lambda _start, _base, delta: delta), out)
    rule = Median() if isinstance(how.rule, GramRule) else how.rule
    each = buckets_of([client.client_id for client in walk.clients], 1, "")
    return gather(_by_coordinates(walk, rule, each, lambda _start, _base, delta: delta), out)


def buckets_of(clients: Sequence[str], size: int, seed: str) -> list[list[int]]:
    """Return the buckets of clients that are averaged before the rule.

    Karimireddy et al. 2022, algorithm 1.

    Args:
        clients: their ids.
        size: clients in a bucket; the last one may have fewer. 1 = each client has its own, in the order of `clients`.
        seed: draws the buckets. Who is in which depends on it and on the set of ids only, so clients must not know it:
            they could choose ids that share buckets with honest ones.

    Returns:
        The indices of the clients in each bucket, rising.
    """
    order = list(range(len(clients)))
    if size > 1:
        order.sort(key=lambda index: (blake2b(f"{seed} {clients[index]}".encode()).digest(), clients[index]))
    return [sorted(order[start:stop]) for start, stop in cut(0, len(order), size)]


def gram_of(walk: Walk) -> Float64:
    """Return the updates' Gram matrix, [clients, clients], in float64.

    It has the inner products of all updates' deltas, added up in float64. With many clients, NumPy's BLAS may round the
    last bit differently if it uses another number of threads.
    """
    count = len(walk.clients)
    total = np.zeros((count, count))
    for _, rows in walk.side_by_side():
        with closing(_blocks(walk, partial(_products, rows), rows)) as parts:
            for part in parts:
                total += part
    return total


def _products(rows: NDArray[Any], low: int, high: int) -> Float64:
    block = rows[:, low:high].astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        return block @ block.T


def _mean(walk: Walk, finish: Finish[T], divisor: float | None = None) -> Generator[T, None, None]:
    weights = [client.weight for client in walk.clients]
    return _weighted(walk, weights, sum(weights) if divisor is None else divisor, finish)


def _weighted(walk: Walk, weights: Sequence[float], divisor: float, finish: Finish[T]) -> Generator[T, None, None]:
    # Each tile is read whole before the next one begins, so that the readers see their bytes in order.
    def piece(start: int, stop: int) -> T:
        base = walk.base(start, stop)
        return finish(start, base, weighted_mean(base, walk.clients, weights, divisor, start))

    return in_order(walk.executor, piece, cut(0, walk.length, walk.step))


def _by_coordinates(
    walk: Walk, rule: CoordinateRule, buckets: Sequence[Sequence[int]], finish: Finish[T]
) -> Generator[T, None, None]:
    weights, start = _weights(walk.clients, buckets), 0
    for base, rows in walk.side_by_side():
        parts = _blocks(walk, partial(_combine, rule, buckets, weights, rows), rows)
        yield finish(start, base, gather(parts, np.empty(len(base), np.float64)))
        start += len(base)


def _combine(
    rule: CoordinateRule, buckets: Sequence[Sequence[int]], weights: Float64, rows: NDArray[Any], low: int, high: int
) -> Float64:
    deltas = rows[:, low:high].astype(np.float64)
    if len(buckets) < len(deltas):
        deltas = np.stack([deltas[bucket].mean(axis=0) for bucket in buckets])
    return _call(lambda: rule.combine(deltas, weights), high - low)


def _blocks(walk: Walk, function: Callable[[int, int], T], rows: NDArray[Any]) -> Generator[T, None, None]:
    count, length = rows.shape
    # At least as many columns as rows, so that the products of a block are no larger than the block.
    return in_order(walk.executor, function, cut(0, length, max(_BLOCK_VALUES // count, min(count, _MOST_COLUMNS))))


def _weights(clients: Sequence[ClientVector], buckets: Sequence[Sequence[int]]) -> Float64:
    """Return the weight of each bucket, [buckets], with the sum 1."""
    weights = np.array([sum(clients[index].weight for index in bucket) for bucket in buckets], np.float64)
    weights /= weights.sum()
    weights.setflags(write=False)  # all calls of a rule, on several threads, share this array
    return weights


def _call(rule: Callable[[], Any], length: int) -> Float64:
    """Return a rule's result, [length].

    Raises:
        RuleError: if it is anything else, or if the rule fails.
    """
    try:
        with np.errstate(all="ignore"), job_code():
            values = np.asarray(rule(), np.float64)
    except (MemoryError, RuleError):
        raise
    except Exception as error:  # the user's code may raise anything
        raise RuleError("bad_rule", f"it raised {type(error).__name__}: {error}") from error
    if values.shape != (length,):
        raise RuleError("bad_rule", f"it returned an array of shape {values.shape} instead of ({length},)")
    if not np.isfinite(values).all():
        raise RuleError("bad_rule", "it returned a value that is not finite")
    return values


def _run(work: Generator[object, None, None]) -> None:
    with closing(work):
        for _ in work:
            pass
