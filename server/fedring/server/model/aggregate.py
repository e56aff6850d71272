"""From a base model and the accepted updates to the blobs of the next model.

The law: the result depends on the base, the plan and the set of updates only, byte
for byte. FedAvg takes the memory of a few tiles and of the buffers, whatever the
number of clients and of parameters; an optimizer or a delta takes a few models.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import ExitStack, closing
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from fedring.codec import encode_buffers
from fedring.codec.encoding import BUFFERS, Encoding
from fedring.codec.errors import CodecError
from fedring.codec.schema import Schema, Vectors
from fedring.server.model.downlink import delta_step
from fedring.server.model.mean import (
    Contribution,
    mean_delta,
    moved_buffers,
    moved_parameters,
    open_sources,
    step_of,
    whole_numbers,
)
from fedring.server.model.modelfile import LoadedModel, ModelReader, ModelWriter
from fedring.server.model.optimizer import ServerOptimizer
from fedring.server.model.walk import cut, gather, in_order, tiles
from fedring.server.state.blobs import Blobs, Partial
from fedring.server.state.checked import read_checked
from fedring.server.state.rows import PacketSpec, Vector, lay_out

Float32 = NDArray[np.float32]
Float64 = NDArray[np.float64]
_Base = ModelReader | LoadedModel


@dataclass(frozen=True, slots=True)
class Plan:
    """What follows the mean; nothing is FedAvg. The blobs are those of the base's row, empty at first."""

    optimizer: ServerOptimizer | None = None
    optimizer_blob: str = ""
    encoding: Encoding | None = None  # of the delta that clients may fetch in the place of the model
    residual_blob: str = ""
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
    plan: Plan,
    *,
    check: Callable[[], object] = lambda: None,
) -> NewModel:
    """Make the next model and seal it. One at a time for each `blobs`.

    Args:
        base: the model that the round began with; it and the contributions are read once, from front to back.
        contributions: the accepted updates, in any order.
        blobs: where the new model goes, and what the plan names comes from.
        executor: computes several ranges at a time.
        plan: what follows the mean.
        check: called when everything has been read and before anything is sealed; raises if it was damaged.

    Raises:
        CodecError: if the result leaves its format; as every error, it leaves nothing of the new model.
    """
    if not contributions:
        raise ValueError("no contributions")
    length = base.schema.num_parameters
    sources = open_sources(contributions, "parameters", length)
    # Each range is read whole before the next one begins, so that the readers see their bytes in order.
    spans = cut(0, length, step_of(decoder for source in sources for decoder in source.decoders))
    # What takes the whole vectors anyway reads them first, and once.
    start: _Base = LoadedModel(base.schema, base.vectors()) if plan.optimizer or plan.encoding else base

    def delta(low: int, high: int) -> Float32:
        return mean_delta(start.parameters(low, high), sources, low, high).astype(np.float32)

    def moved(low: int, high: int) -> Float32:
        tile = start.parameters(low, high)
        return moved_parameters(tile, mean_delta(tile, sources, low, high))

    buffers = _mean_buffers(start, contributions)
    if plan.optimizer is None:
        draft = _Draft(buffers, in_order(executor, moved, spans))
    else:
        mean = gather(in_order(executor, delta, spans), np.empty(length, np.float32))
        draft = _optimized(start, mean, buffers, blobs, plan)
    if plan.encoding is not None:
        draft = _encoded(start, draft, blobs, plan)
    return _seal(draft, base.schema, blobs, plan.metadata, check)


def store_model(schema: Schema, vectors: Vectors, blobs: Blobs, metadata: Mapping[str, str]) -> NewModel:
    """These values are a sealed model: the first one."""
    return _seal(_Draft(vectors.buffers, _cut(vectors.parameters)), schema, blobs, metadata, lambda: None)


def _mean_buffers(base: _Base, contributions: Sequence[Contribution]) -> Float64:
    length = base.schema.num_buffers
    out = np.empty(length, np.float64)
    sources = open_sources(contributions, "buffers", length)
    for start, stop in tiles(length):
        tile = base.buffers(start, stop)
        if sources:
            delta = mean_delta(tile, sources, start, stop)
            tile = moved_buffers(tile, delta, whole_numbers(base.schema, start, stop))
        out[start:stop] = tile
    return out


def _optimized(base: _Base, mean: Float32, buffers: Float64, blobs: Blobs, plan: Plan) -> _Draft:
    if plan.optimizer is None:
        raise ValueError("no optimizer")
    state = read_checked(blobs, plan.optimizer_blob) if plan.optimizer_blob else b""
    parameters, state = plan.optimizer.step(base.vectors().parameters, mean, state)
    if not np.isfinite(parameters).all():
        raise CodecError("non_finite", "the server optimizer's step leaves float32")
    return _Draft(buffers, _cut(parameters), extras={"optimizer_blob": state})


def _encoded(base: _Base, draft: _Draft, blobs: Blobs, plan: Plan) -> _Draft:
    if plan.encoding is None:
        raise ValueError("no encoding")
    before = base.vectors()
    target = gather(draft.parameters, np.empty_like(before.parameters))
    owed = np.frombuffer(read_checked(blobs, plan.residual_blob), "<f4") if plan.residual_blob else None
    step = delta_step(before.parameters, target, owed, plan.encoding)
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
    # before + change, not draft.buffers: it is what a client computes
    return _Draft(before.buffers + change, _cut(step.model), packets, draft.extras | extras)


def _seal(
    draft: _Draft, schema: Schema, blobs: Blobs, metadata: Mapping[str, str], check: Callable[[], object]
) -> NewModel:
    with ExitStack() as undo, closing(draft.parameters) as parameters:
        model = _begin(blobs, "blob", undo)
        writer = ModelWriter(model, schema, metadata)
        writer.write_buffers(draft.buffers)
        for tile in parameters:
            writer.write_parameters(tile)
        digest, size = writer.finish(), model.size
        partials = [model]
        for name, data in draft.extras.items():
            partials.append(_begin(blobs, name, undo))
            partials[-1].write(data)
        check()
        first, *others = blobs.seal_many(partials)
        undo.pop_all()
    names = dict(zip(draft.extras, others, strict=True))
    return NewModel(first, digest, size, delta_packets=draft.delta_packets, **names)


def _begin(blobs: Blobs, name: str, undo: ExitStack) -> Partial:
    partial = blobs.open_partial(f"next-model-{name}", fresh=True)
    undo.callback(blobs.abort, partial)
    return partial


def _cut(vector: Float32) -> Generator[Float32, None, None]:
    return (vector[start:stop] for start, stop in tiles(len(vector)))
