"""The download of a model.

Its stream of chunks is checked and written as a safetensors file.
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np

from fedring.codec import CodecError, decode
from fedring.codec.schema import Schema, Vectors, parse_schema
from fedring.control.failure import Failure
from fedring.daemon.exits import Exit
from fedring.v1 import federation_pb2 as fb

_HEADER_BYTES = 1 << 16  # upper bound of the headers of all packets together


def write_model(stream: Iterable[fb.ModelBlob], path: Path, *, exact: bool = False) -> fb.ModelHeader:
    """Write the model of a stream to a safetensors file.

    Its length and its digest are checked before.

    Args:
        stream: The server's answer.
        path: The file.
        exact: Whether to add the rest that the encoding of downloads left out.

    Returns:
        The model's header.

    Raises:
        Failure: The model is damaged or cannot be decoded, or the file cannot be written.
    """
    from fedring.train.tensors.files import save_vectors  # imports torch, which most verbs do not need

    blobs = iter(stream)
    header = next(blobs, fb.ModelBlob()).header
    if exact and not header.exact:
        raise Failure("this fl-server is too old to export exact models: update it, or leave --exact out")
    try:
        schema = parse_schema(header.schema)
        payload = _payload(header, schema, blobs)
        vectors = _vectors(header, schema, payload)
        if vectors.digest(like=header.model_digest) != header.model_digest:
            raise Failure(
                "the model was damaged in transit, since its digest differs from the header's: try again",
                Exit.TRY_AGAIN,
            )
        if exact:
            _add_residual(header, payload, vectors)
    except CodecError as error:
        raise Failure(f"fl-server sent a model that cannot be used: {error}", Exit.TRY_AGAIN) from error
    try:
        save_vectors(schema, vectors, path)
    except OSError as error:
        raise Failure(f"cannot write {path}: {error.strerror or error}") from error
    return header


def _payload(header: fb.ModelHeader, schema: Schema, blobs: Iterable[fb.ModelBlob]) -> bytearray:
    most = (8 if header.exact else 4) * schema.num_parameters + 8 * schema.num_buffers + _HEADER_BYTES
    if not 0 < header.total_bytes <= most or header.base_digest:
        raise CodecError("bad_model", f"{header.total_bytes} bytes for a model of at most {most}")
    payload = bytearray(header.total_bytes)
    end = 0
    for blob in blobs:
        offset, data = blob.chunk.offset, blob.chunk.data
        if offset != end or offset + len(data) > len(payload):
            raise CodecError("bad_model", f"a chunk at offset {offset}, expected {end}")
        end += len(data)
        payload[offset:end] = data
    if end != len(payload):
        raise CodecError("truncated", f"{end} of {len(payload)} bytes")
    return payload


def _vectors(header: fb.ModelHeader, schema: Schema, payload: bytearray) -> Vectors:
    parameters = np.zeros(schema.num_parameters, np.float32)
    buffers = np.zeros(schema.num_buffers, np.float64)
    start = 0
    for packet in header.packets:
        if packet.kind == fb.KIND_DELTA:
            break  # what the encoding has left out, which the digest does not cover
        data = memoryview(payload)[start : start + packet.bytes]
        total = buffers if packet.vector == fb.VECTOR_BUFFERS else parameters
        total += decode(data, name=packet.encoding, length=len(total))
        start += packet.bytes
    return Vectors(parameters, buffers)


def _add_residual(header: fb.ModelHeader, payload: bytearray, vectors: Vectors) -> None:
    """Add the rest that the encoding left out to the parameters.

    It is the last packet, if there is such a rest.
    """
    last = header.packets[-1]
    if last.kind == fb.KIND_DELTA:
        data = memoryview(payload)[len(payload) - last.bytes :]
        values = vectors.parameters
        values += decode(data, name=last.encoding, length=len(values))
