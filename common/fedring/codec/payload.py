"""Payloads of all formats, dispatched by the format's name."""

import numpy as np
from numpy.typing import NDArray

from fedring.codec.decoder import Decoder
from fedring.codec.dense import FORMATS, DenseDecoder, Int8Decoder, encode_dense, encode_int8
from fedring.codec.encoding import BUFFERS, TILE, Encoding
from fedring.codec.errors import CodecError
from fedring.codec.packed import PackedDecoder, encode_packed
from fedring.codec.source import Reader, Source
from fedring.codec.sparse import IndexedDecoder, encode_sparse
from fedring.codec.uniform import UniformDecoder, encode_uniform


def encode(vector: NDArray[np.float32], encoding: Encoding) -> bytes:
    """Encode a vector.

    Args:
        vector: The values [D] float32.
        encoding: The format and its parameters.

    Returns:
        The payload (protos/FORMATS.md).

    Raises:
        CodecError: "non_finite" if a value is NaN or infinite.
    """
    vector = np.ascontiguousarray(vector, np.float32)
    match encoding.name:
        case "int8":
            return encode_int8(vector, encoding.chunk)
        case "fp32_sparse" | "sq8":
            return encode_sparse(vector, encoding)
        case "packed":
            return encode_packed(vector, encoding)
        case "uniform":
            return encode_uniform(vector, encoding)
        case _:
            return encode_dense(vector, encoding.name)


def encode_buffers(vector: NDArray[np.float64]) -> bytes:
    """Encode buffers exactly, as fp64.

    Args:
        vector: The values [B] float64.

    Raises:
        CodecError: "non_finite" if a value is NaN or infinite.
    """
    return encode_dense(np.ascontiguousarray(vector, np.float64), BUFFERS)


def open_payload(read: Reader, size: int, *, name: str, length: int) -> Decoder:
    """Open a payload and check its header.

    Args:
        read: Returns the bytes at an offset, of a given size.
        size: The size of the payload in bytes.
        name: The name of the format.
        length: The number of entries that the receiver expects.

    Returns:
        The open payload. When all of 0..length was decoded, range by range, every byte was checked.

    Raises:
        CodecError: If there is no such format, or if the header does not fit.
    """
    source = Source(read, size)
    match name:
        case "int8":
            return Int8Decoder(source, length)
        case "fp32_sparse" | "sq8":
            return IndexedDecoder(source, name, length)
        case "packed":
            return PackedDecoder(source, length)
        case "uniform":
            return UniformDecoder(source, length)
        case _ if name in FORMATS:
            return DenseDecoder(source, name, length)
    raise CodecError("unknown_encoding", repr(name[:100]))


def decode(data: bytes | memoryview, *, name: str, length: int) -> NDArray[np.floating]:
    """Decode a whole payload.

    Args:
        data: The bytes.
        name: The name of the format.
        length: The number of entries that the receiver expects.

    Returns:
        A new array [length] float32, or float64 for fp64.

    Raises:
        CodecError: If the bytes are not a valid payload.
    """
    # In tiles, so that a sparse or compressed payload never needs a second vector of full length.
    view = memoryview(data)
    decoder = open_payload(lambda offset, size: view[offset : offset + size], len(view), name=name, length=length)
    values: NDArray[np.floating] = np.empty(length, np.float64 if name == BUFFERS else np.float32)
    for start in range(0, length, TILE):
        stop = min(start + TILE, length)
        values[start:stop] = decoder.decode(start, stop)
    return values
