"""Aggregation of a base model and accepted updates into new blobs.

The law: the result depends on the base, the plan and the set of updates only, byte for byte. Federated averaging takes
the memory of a few tiles and of the buffers, whatever the number of clients and of parameters. Another rule takes
ROWS_BYTES (`fedring.server.aggregation.combining`) on top. A step that is `whole`, such as a server optimizer, takes a
few models.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import count
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from fedring.codec.errors import CodecError
from fedring.codec.schema import Schema, Vectors
from fedring.server.aggregation.combining import Combination, Finish, Walk, combine_buffers, combine_parameters
from fedring.server.aggregation.contributions import Contribution, Values, open_vectors
from fedring.server.aggregation.modelfile import LoadedModel, ModelReader, ModelWriter
from fedring.server.aggregation.steps import Draft, Step, VectorFile
from fedring.server.aggregation.walk import tiles_of
from fedring.server.state.blob_interfaces import Blobs, Partial
from fedring.server.state.rows import ModelRow, PacketSpec

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
T = TypeVar("T")
_Base = ModelReader | LoadedModel

_INTEGERS = ("int", "uint", "bool")
_NUMBERS = count()  # of files that are being written: those of several jobs may be at once
"""How the dtypes begin whose buffers are rounded to whole numbers."""


@dataclass(frozen=True, slots=True)
class AggregationPlan:
    """How the next model is made. The default is federated averaging."""

    combination: Combination = field(default_factory=Combination)  # makes one delta of the updates
    steps: Sequence[Step] = ()  # what transforms add to that, in their order
    metadata: Mapping[str, str] = field(default_factory=dict)  # of the model file, for people


@dataclass(frozen=True, slots=True)
class NewModel:
    """The sealed blobs of a model, and the facts for its row."""

    blob: str
    digest: str  # of the model
    bytes: int  # of the model file
    delta_packets: tuple[PacketSpec, ...] = ()
    columns: Mapping[str, Any] = field(default_factory=dict)  # further ones of its row, such as names of blobs

    def row(self, schema: Schema, *, version: int, number: int, base: ModelRow | None = None) -> ModelRow:
        """Return the row of the model.

        Args:
            schema: what it consists of.
            version: its number.
            number: of the round that publishes it.
            base: the model that the round began with; None = there is none.
        """
        return ModelRow(
            version=version,
            round=number,
            digest=self.digest,
            blob=self.blob,
            schema_hash=schema.hash.hex(),
            parameters=schema.num_parameters,
            bytes=self.bytes,
            created_at=time.time(),
            base_version=base.version if base else 0,
            base_digest=base.digest if base else "",
            delta_packets=self.delta_packets,
            **self.columns,
        )


def aggregate(
    base: ModelReader,
    contributions: Sequence[Contribution],
    blobs: Blobs,
    executor: Executor,
    plan: AggregationPlan,
    *,
    check: Callable[[], object] = lambda: None,
) -> NewModel:
    """Make the next model and seal it.

    Args:
        base: the model that the round began with. It and the contributions are read from front to back, once; again
            if the plan's rule needs a Gram matrix, or if a step reads them for a file of its own.
        contributions: the accepted updates, in any order.
        blobs: takes the new model.
        executor: computes several tiles at a time.
        plan: how the model is made. Its steps have read their state.
        check: called when everything has been read and before anything is sealed; it raises if what was read is
            damaged.

    Returns:
        The sealed blobs of the model. No row names them yet.

    Raises:
        CodecError: if a value of the result does not fit its format ("non_finite"), or an update is damaged.
        RuleError: if the rule fails.
        OptimizerError: if the optimizer's state cannot be used.
        StorageError: if something cannot be read or kept.
        ValueError: if there are no contributions, or two of one client.

    After an error nothing of the new model is left in `blobs`.
    """
    if not contributions:
        raise ValueError("no contributions")
    length, how, steps = base.schema.num_parameters, plan.combination, plan.steps
    sent = list(contributions)
    for step in steps:
        sent, how = step.contributions(sent, length), step.combination(how)
    own = [how.own] if how.own else []
    clients = open_vectors(sent, "parameters", length) + open_vectors(own, "parameters", length)
    # Some steps take the whole vectors, so those are read at once, and once only.
    loaded = LoadedModel(base.schema, base.vectors()) if any(step.whole for step in steps) else None
    start: _Base = loaded or base
    walk = Walk(start.parameters, length, clients, executor)

    def deltas(finish: Finish[T]) -> Generator[T, None, None]:
        def stepped(start: int, base: Values, delta: Float64) -> T:
            for step in steps:
                step.piece(start, delta)
            return finish(start, base, delta)

        return combine_parameters(walk, how, stepped)

    draft = Draft(
        buffers=_next_buffers(start, sent, executor, how),
        deltas=deltas,
        parameters=lambda: deltas(lambda _, base, delta: next_parameters(base, delta)),
    )
    if loaded is not None:
        for step in steps:
            draft = step.change(loaded, draft)
    return _seal(draft, base.schema, blobs, plan.metadata, check, steps=steps, walk=walk)


def store_model(schema: Schema, vectors: Vectors, blobs: Blobs, metadata: Mapping[str, str]) -> NewModel:
    """Seal a model that is in memory, such as the first one.

    Args:
        schema: what the model consists of.
        vectors: its values.
        blobs: takes the model file.
        metadata: goes into the model file, for people.

    Raises:
        CodecError: if the schema does not fit into a model file.
        StorageError: if the file cannot be kept; then nothing is left of it.
    """
    return store_parts(schema, vectors.buffers, tiles_of(vectors.parameters), blobs, metadata)


def store_parts(
    schema: Schema,
    buffers: Float64,
    parameters: Generator[Float32, None, None],
    blobs: Blobs,
    metadata: Mapping[str, str],
) -> NewModel:
    """Seal a model whose parameters are made piece by piece.

    Args:
        schema: what the model consists of.
        buffers: all of them, [schema.num_buffers].
        parameters: the pieces in their order, [schema.num_parameters] together.
        blobs: takes the model file.
        metadata: goes into the model file, for people.

    Raises:
        CodecError: if the schema does not fit into a model file.
        StorageError: if the file cannot be kept; then nothing is left of it.
    """
    return _seal(Draft(buffers, _no_deltas, lambda: parameters), schema, blobs, metadata, lambda: None)


def next_parameters(base: NDArray[np.floating], delta: Float64) -> Float32:
    """Return base + delta, rounded once, [n]. Overwrites `delta`.

    Raises:
        CodecError: "non_finite", if a value does not fit into float32.
    """
    delta += base
    with np.errstate(over="ignore"):
        moved = delta.astype(np.float32)
    if not np.isfinite(moved).all():
        raise CodecError("non_finite", "a parameter of the next model does not fit into float32")
    return moved


def next_buffers(base: NDArray[np.floating], delta: Float64, whole: NDArray[np.bool_]) -> Float64:
    """Return base + delta, [n], rounded where `whole`, [n], is true.

    It is rounded to the nearest whole number.

    Raises:
        CodecError: "non_finite", if a value does not fit into float64.
    """
    moved = base + delta
    np.rint(moved, out=moved, where=whole)
    if not np.isfinite(moved).all():
        raise CodecError("non_finite", "a buffer of the next model does not fit into float64")
    return moved


def whole_numbers(schema: Schema, start: int, stop: int) -> NDArray[np.bool_]:
    """Return which buffers are of integer tensors, [stop - start].

    It covers the buffers from `start` to `stop`.
    """
    whole = np.zeros(stop - start, np.bool_)
    for entry, span in schema.spans("buffer"):
        if entry.dtype.startswith(_INTEGERS):
            whole[max(span.start - start, 0) : max(span.stop - start, 0)] = True
    return whole


def _next_buffers(start: _Base, contributions: Sequence[Contribution], executor: Executor, how: Combination) -> Float64:
    length = start.schema.num_buffers
    base = np.asarray(start.buffers(0, length), np.float64)
    clients = open_vectors(contributions, "buffers", length)
    if not clients:
        return base
    walk = Walk(lambda low, high: base[low:high], length, clients, executor, value_bytes=8)
    delta = combine_buffers(walk, how)
    return next_buffers(base, delta, whole_numbers(start.schema, 0, length))


def _seal(
    draft: Draft,
    schema: Schema,
    blobs: Blobs,
    metadata: Mapping[str, str],
    check: Callable[[], object],
    *,
    steps: Sequence[Step] = (),
    walk: Walk | None = None,
) -> NewModel:
    with ExitStack() as undo:
        model = _begin(blobs, "blob", undo)
        digest, size = _write(model, schema, metadata, draft.buffers, draft.parameters()), model.size
        partials, columns = {"blob": model}, dict[str, Any]()
        files: dict[str, bytes | VectorFile] = dict(draft.files)
        # What steps have measured, and what they go over once more, is known only now that all parameters are made.
        if walk is not None:
            for step in steps:
                files.update(step.files(walk))
        for name, content in files.items():
            partials[name] = _begin(blobs, name, undo)
            if isinstance(content, bytes):
                partials[name].write(content)
            else:
                none = np.empty(0, np.float64)
                found = _write(partials[name], schema.without_buffers, content.metadata, none, content.pieces)
                columns[content.digest_column] = found
        for step in steps:
            columns.update(step.columns())
        check()
        names = dict(zip(partials, blobs.seal_many(list(partials.values())), strict=True))
        undo.pop_all()
    blob = names.pop("blob")
    return NewModel(blob, digest, size, draft.delta_packets, columns | names)


def _no_deltas(finish: Finish[T]) -> Generator[T, None, None]:
    raise ValueError("a first model is made of no updates")


def _write(
    partial: Partial,
    schema: Schema,
    metadata: Mapping[str, str],
    buffers: Float64,
    parameters: Generator[Float32, None, None],
) -> str:
    """Write a model file, and return the digest of its values."""
    with closing(parameters):
        writer = ModelWriter(partial, schema, metadata)
        writer.write_buffers(buffers)
        for tile in parameters:
            writer.write_parameters(tile)
        return writer.finish()


def _begin(blobs: Blobs, name: str, undo: ExitStack) -> Partial:
    partial = blobs.open_partial(f"next-model-{next(_NUMBERS)}-{name}", fresh=True)
    undo.callback(blobs.abort, partial)
    return partial
