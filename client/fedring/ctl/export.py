"""A model's stream of chunks, checked and written as a file."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedring.codec.errors import CodecError
from fedring.codec.schema import Schema, Vectors, parse_schema
from fedring.ctl.failure import Failure
from fedring.daemon.exits import Exit
from fedring.v1 import federation_pb2 as fb

_DENSE = {fb.VECTOR_PARAMETERS: ("fp32", "<f4"), fb.VECTOR_BUFFERS: ("fp64", "<f8")}


def write_model(stream: Iterable[fb.ModelBlob], path: Path) -> fb.ModelHeader:
    """`path` holds the model of the stream, whole and with the digest it was announced with, as safetensors."""
    from fedring.train.files import save_vectors  # imports torch: only who exports waits for it

    blobs = iter(stream)
    header = next(blobs, fb.ModelBlob()).header
    try:
        schema = parse_schema(header.schema)
        vectors = _vectors(header, schema, _payload(header, schema, blobs))
    except CodecError as error:
        raise Failure(f"fl-server sent a model that cannot be used: {error}", Exit.TRY_AGAIN) from error
    if vectors.digest() != header.model_digest:
        raise Failure("the model was damaged on its way: its digest is another one; try again", Exit.TRY_AGAIN)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_vectors(schema, vectors, path)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror or error}") from error
    return header


def _payload(header: fb.ModelHeader, schema: Schema, blobs: Iterable[fb.ModelBlob]) -> bytearray:
    total = 4 * schema.num_parameters + 8 * schema.num_buffers
    if header.total_bytes != total or header.base_version or sum(p.bytes for p in header.packets) != total:
        raise CodecError("bad_model", f"{header.total_bytes} bytes for a model of {total}")
    payload = bytearray(total)
    end = 0
    for blob in blobs:
        offset, data = blob.chunk.offset, blob.chunk.data
        if offset != end or offset + len(data) > total:
            raise CodecError("bad_model", f"a chunk at {offset} in the place of {end}")
        end += len(data)
        payload[offset:end] = data
    if end != total:
        raise CodecError("truncated", f"{end} of {total} bytes")
    return payload


def _vectors(header: fb.ModelHeader, schema: Schema, payload: bytearray) -> Vectors:
    found: dict[int, NDArray[np.floating]] = {}
    start = 0
    for packet in header.packets:
        encoding, dtype = _DENSE.get(packet.vector, ("", ""))
        if packet.encoding != encoding or packet.bytes % np.dtype(dtype).itemsize or packet.vector in found:
            raise CodecError("bad_model", f"a packet encoded as {packet.encoding!r}")
        found[packet.vector] = np.frombuffer(payload, dtype, packet.bytes // np.dtype(dtype).itemsize, start)
        start += packet.bytes
    parameters = found.get(fb.VECTOR_PARAMETERS, np.empty(0, np.float32)).astype(np.float32, copy=False)
    buffers = found.get(fb.VECTOR_BUFFERS, np.empty(0, np.float64)).astype(np.float64, copy=False)
    if (len(parameters), len(buffers)) != (schema.num_parameters, schema.num_buffers):
        raise CodecError("bad_model", "the packets do not fill the schema")
    return Vectors(parameters, buffers)
