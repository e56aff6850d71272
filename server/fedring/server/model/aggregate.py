"""From a base model and the accepted updates to the blobs of the next model.

The law: the result depends on the base, the plan and the set of updates only, byte for byte. Federated averaging takes
the memory of a few tiles and of the buffers, whatever the number of clients and of parameters. Another rule takes
ROWS_BYTES (`fedring.server.model.combining`) on top. A server optimizer or an encoded delta takes a few models.
"""

import time
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fedring.codec import encode_buffers
from fedring.codec.encoding import BUFFERS, Encoding
from fedring.codec.errors import CodecError
from fedring.codec.schema import Schema, Vectors
from fedring.server.model.combining import Combination, Walk, combine_buffers, combine_parameters
from fedring.server.model.contributions import Contribution, open_vectors
from fedring.server.model.control import ControlPlan, next_control
from fedring.server.model.downlink import delta_step
from fedring.server.model.modelfile import LoadedModel, ModelReader, ModelWriter
from fedring.server.model.optimizer import ServerOptimizer
from fedring.server.model.secure_scales import Spread
from fedring.server.model.walk import gather, tiles
from fedring.server.state.blob_interfaces import Blobs, Partial
from fedring.server.state.checked import read_checked
from fedring.server.state.rows import ModelRow, PacketSpec, Vector, lay_out

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
_Base = ModelReader | LoadedModel

_INTEGERS = ("int", "uint", "bool")
"""How the dtypes begin whose buffers are rounded to whole numbers."""


@dataclass(frozen=True, slots=True)
class AggregationPlan:
    """How the next model is made. The default is federated averaging.

    The blobs are those that the base model's row names; they are empty for a first model.
    """

    combination: Combination = field(default_factory=Combination)  # makes one delta of the updates
    optimizer: ServerOptimizer | None = None  # steps by that delta; without one it is added to the base
    optimizer_blob: str = ""  # the optimizer's state
    encoding: Encoding | None = None  # of the delta that clients may fetch instead of the model
    residual_blob: str = ""  # what the encoding left out in the round before
    control: ControlPlan | None = None  # how the control variate changes; None = there is none
    spread: Spread | None = None  # is measured on the way; None = there is none
    metadata: Mapping[str, str] = field(default_factory=dict)  # of the model file, for people


@dataclass(frozen=True, slots=True)
class NewModel:
    """The sealed blobs of a model, and the facts for its row."""

    blob: str
    digest: str  # of the model
    bytes: int  # of the model file
    delta_blob: str = ""
    delta_packets: tuple[PacketSpec, ...] = ()
    residual_blob: str = ""
    optimizer_blob: str = ""
    control_blob: str = ""
    control_digest: str = ""
    spread_blob: str = ""

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
            delta_blob=self.delta_blob,
            delta_packets=self.delta_packets,
            residual_blob=self.residual_blob,
            optimizer_blob=self.optimizer_blob,
            control_blob=self.control_blob,
            control_digest=self.control_digest,
            spread_blob=self.spread_blob,
        )


@dataclass(frozen=True, slots=True)
class _Draft:
    buffers: Float64
    parameters: Generator[Float32, None, None]  # tile by tile
    delta_packets: tuple[PacketSpec, ...] = ()
    extras: dict[str, bytes] = field(default_factory=dict)  # by the name of their blob in NewModel


def aggregate(
    base: ModelReader,
    contributions: Sequence[Contribution],
    blobs: Blobs,
    executor: Executor,
    plan: AggregationPlan,
    *,
    check: Callable[[], object] = lambda: None,
) -> NewModel:
    """Make the next model and seal it. Only one call at a time may use the same `blobs`.

    Args:
        base: the model that the round began with. It and the contributions are read from front to back, once; twice
            if the plan's rule needs a Gram matrix, or if there is a control variate.
        contributions: the accepted updates, in any order.
        blobs: takes the new model, and holds the blobs that the plan names.
        executor: computes several tiles at a time.
        plan: how the model is made.
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
    length = base.schema.num_parameters
    own = [plan.combination.own] if plan.combination.own else []
    clients = open_vectors(contributions, "parameters", length) + open_vectors(own, "parameters", length)
    # An optimizer and an encoding take the whole vectors, so those are read at once, and once only.
    start: _Base = LoadedModel(base.schema, base.vectors()) if plan.optimizer or plan.encoding else base
    walk = Walk(start.parameters, length, clients, executor)
    how = replace(plan.combination, watch=plan.spread.watch) if plan.spread else plan.combination
    buffers = _next_buffers(start, contributions, executor, plan.combination)
    if plan.optimizer is None:
        draft = _Draft(buffers, combine_parameters(walk, how, next_parameters))
    else:
        deltas = combine_parameters(walk, how, lambda _, delta: delta.astype(np.float32))
        draft = _optimized(start, gather(deltas, np.empty(length, np.float32)), buffers, blobs, plan)
    if plan.encoding is not None:
        draft = _encoded(start, draft, blobs, plan)
    control = (next_control(walk, plan.control), plan.control.metadata) if plan.control else None
    return _seal(draft, base.schema, blobs, plan.metadata, check, control=control, spread=plan.spread)


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
    return store_parts(schema, vectors.buffers, _tiles_of(vectors.parameters), blobs, metadata)


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
    return _seal(_Draft(buffers, parameters), schema, blobs, metadata, lambda: None)


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
    """Return base + delta, [n], rounded to the nearest whole number where `whole`, [n], is true.

    Raises:
        CodecError: "non_finite", if a value does not fit into float64.
    """
    moved = base + delta
    np.rint(moved, out=moved, where=whole)
    if not np.isfinite(moved).all():
        raise CodecError("non_finite", "a buffer of the next model does not fit into float64")
    return moved


def whole_numbers(schema: Schema, start: int, stop: int) -> NDArray[np.bool_]:
    """Return which of the buffers from `start` to `stop` belong to integer tensors, [stop - start]."""
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


def _optimized(base: _Base, delta: Float32, buffers: Float64, blobs: Blobs, plan: AggregationPlan) -> _Draft:
    if plan.optimizer is None:
        raise ValueError("no optimizer")
    state = read_checked(blobs, plan.optimizer_blob) if plan.optimizer_blob else b""
    parameters, state = plan.optimizer.step(base.vectors().parameters, delta, state)
    if not np.isfinite(parameters).all():
        raise CodecError("non_finite", "the server optimizer's step does not fit into float32")
    return _Draft(buffers, _tiles_of(parameters), extras={"optimizer_blob": state})


def _encoded(base: _Base, draft: _Draft, blobs: Blobs, plan: AggregationPlan) -> _Draft:
    if plan.encoding is None:
        raise ValueError("no encoding")
    before = base.vectors()
    target = gather(draft.parameters, np.empty_like(before.parameters))
    residual = np.frombuffer(read_checked(blobs, plan.residual_blob), "<f4") if plan.residual_blob else None
    step = delta_step(before.parameters, target, residual, plan.encoding)
    change = draft.buffers - before.buffers
    payloads: list[tuple[Vector, str, bytes]] = [
        ("parameters", plan.encoding.name, step.payload),
        ("buffers", BUFFERS, encode_buffers(change)),
    ]
    present = [part for part, values in zip(payloads, (target, change), strict=True) if len(values)]
    extras = {
        "delta_blob": b"".join(payload for _, _, payload in present),
        "residual_blob": step.residual.astype("<f4").tobytes(),
    }
    packets = lay_out([(vector, "delta", name, len(payload)) for vector, name, payload in present])
    # Not draft.buffers: the sum is what a client computes, and it may differ in the last bit.
    return _Draft(before.buffers + change, _tiles_of(step.model), packets, draft.extras | extras)


def _seal(
    draft: _Draft,
    schema: Schema,
    blobs: Blobs,
    metadata: Mapping[str, str],
    check: Callable[[], object],
    *,
    control: tuple[Generator[Float32, None, None], Mapping[str, str]] | None = None,
    spread: Spread | None = None,
) -> NewModel:
    with ExitStack() as undo:
        model = _begin(blobs, "blob", undo)
        digest, size = _write(model, schema, metadata, draft.buffers, draft.parameters), model.size
        partials, control_digest = {"blob": model}, ""
        # The spread is known only now that all parameters have been made.
        for name, data in (draft.extras | ({"spread_blob": spread.data()} if spread else {})).items():
            partials[name] = _begin(blobs, name, undo)
            partials[name].write(data)
        if control is not None:
            values, facts = control
            partials["control_blob"] = _begin(blobs, "control_blob", undo)
            none = np.empty(0, np.float64)
            control_digest = _write(partials["control_blob"], schema.without_buffers, facts, none, values)
        check()
        names = dict(zip(partials, blobs.seal_many(list(partials.values())), strict=True))
        undo.pop_all()
    return NewModel(
        digest=digest, bytes=size, delta_packets=draft.delta_packets, control_digest=control_digest, **names
    )


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
    partial = blobs.open_partial(f"next-model-{name}", fresh=True)
    undo.callback(blobs.abort, partial)
    return partial


def _tiles_of(vector: Float32) -> Generator[Float32, None, None]:
    return (vector[start:stop] for start, stop in tiles(len(vector)))
