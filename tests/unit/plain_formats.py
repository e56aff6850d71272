"""A second implementation of FORMATS.md, value by value in plain Python, without numpy and without fedring.

It follows the document alone. Where it agrees with fedring, the document describes what fedring does. A float of Python
is a float64. `f32` rounds it to float32, as the document prescribes for languages that have no float32.
"""

import json
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from functools import reduce
from typing import Any

import zstandard
from blake3 import blake3

SPAN = 1 << 20


def name_of(data: bytes) -> str:
    """Return the name of some bytes."""
    return "blake3-" + blake3(data).hexdigest()


def f32(value: float) -> float:
    """Return the nearest float32."""
    rounded: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return rounded


def vector_of(written: Any) -> list[float]:
    """Return a vector that is written as in vectors.json."""
    if isinstance(written, list):
        return written
    vector = [0.0] * written["size"]
    for index, value in written["entries"]:
        vector[index] = value
    return vector


class Bytes:
    """Bytes that are read from the front to the back."""

    def __init__(self, data: bytes) -> None:
        self.data = data

    def take(self, layout: str) -> tuple[Any, ...]:
        """Read the next values, which are little endian."""
        size = struct.calcsize("<" + layout)
        taken, self.data = self.data[:size], self.data[size:]
        return struct.unpack("<" + layout, taken)

    def stream(self, size: int) -> bytes:
        """Read the next stream, and return its content of `size` bytes."""
        (length,) = self.take("I")
        (frame,) = self.take(f"{length}s")
        content = zstandard.ZstdDecompressor().decompress(frame) if length else b""
        assert len(content) == size
        return content

    def flags(self, count: int, data: bytes | None = None) -> list[int]:
        """Read `count` flags from the next bit field, or from `data`."""
        field: bytes = self.take(f"{-(-count // 8)}s")[0] if data is None else data
        return [field[i // 8] >> i % 8 & 1 for i in range(count)]


def decode(data: bytes, name: str, size: int) -> list[float]:
    """Return the values of a packet with the encoding `name`."""
    rest = Bytes(data)
    if name in ("fp32_sparse", "sq8"):
        return _sparse(rest, name, size)
    magic, zero, version, chunk, dim = rest.take("2sBBIQ")
    formats = {"fp32": b"F4", "fp16": b"H2", "bf16": b"B2", "fp64": b"F8", "int8": b"Q8", "packed": b"PK"}
    assert (magic, zero, version, dim) == (formats.get(name, b"UQ"), 0, 1, size)
    match name:
        case "fp32" | "fp16" | "fp64":
            return list(rest.take(f"{dim}{ {'fp32': 'f', 'fp16': 'e', 'fp64': 'd'}[name] }"))
        case "bf16":
            return [struct.unpack("<f", struct.pack("<I", half << 16))[0] for half in rest.take(f"{dim}H")]
        case "int8":
            scales = rest.take(f"{-(-dim // chunk)}f")
            return [f32(level * scales[i // chunk]) for i, level in enumerate(rest.take(f"{dim}b"))]
    span = SPAN // chunk * chunk
    sizes = rest.take(f"{-(-dim // span)}I")
    read = _packed if name == "packed" else _uniform
    values: list[float] = []
    for number, length in enumerate(sizes):
        (segment,) = rest.take(f"{length}s")
        values += read(Bytes(segment), min(span, dim - number * span), chunk)
    return values


def _sparse(rest: Bytes, name: str, size: int) -> list[float]:
    head, dim, count = rest.take("4sII")
    assert (head, dim) == (b"S4\0\1" if name == "fp32_sparse" else b"SQ\0\1", size)
    (chunk,) = (1,) if name == "fp32_sparse" else rest.take("I")
    indices = rest.take(f"{count}I")
    if name == "fp32_sparse":
        values = list(rest.take(f"{count}f"))
    else:
        scales = rest.take(f"{-(-count // chunk)}f")
        values = [f32(level * scales[i // chunk]) for i, level in enumerate(rest.take(f"{count}b"))]
    vector = [0.0] * size
    for index, value in zip(indices, values, strict=True):
        vector[index] = value
    return vector


def _packed(rest: Bytes, size: int, chunk: int) -> list[float]:
    vector = [0.0] * size
    if not rest.data:
        return vector
    count, bits = rest.take("II")
    scales = rest.take(f"{-(-count // chunk)}f")
    levels, highs = struct.unpack(f"{count}b", rest.stream(count)), rest.stream(count)
    planes = [rest.flags(count) for _ in range(bits)]
    place = -1
    for i in range(count):
        place += 1 + (highs[i] << bits | sum(plane[i] << j for j, plane in enumerate(planes)))
        vector[place] = f32(levels[i] * scales[i // chunk])
    assert not rest.data
    return vector


def _uniform(rest: Bytes, size: int, chunk: int) -> list[float]:
    scales = rest.take(f"{-(-size // chunk)}f")
    places = [place for place, flag in enumerate(rest.flags(size, rest.stream(-(-size // 8)))) if flag]
    count = len(places)
    negative = rest.flags(count, rest.stream(-(-count // 8)))
    pairs = rest.stream(-(-count // 4))
    small = [pairs[i // 4] >> 2 * (i % 4) & 3 for i in range(count)]
    large = small.count(3)
    halves = rest.stream(2 * large)
    rests = iter([low + 256 * high for low, high in zip(halves[:large], halves[large:], strict=True)])
    vector = [0.0] * size
    for i, place in enumerate(places):
        magnitude = small[i] + 1 + (next(rests) if small[i] == 3 else 0)
        vector[place] = f32((-magnitude if negative[i] else magnitude) * scales[place // chunk])
    assert not rest.data
    return vector


Packets = Sequence[Mapping[str, Any]]


def download(held: Mapping[str, Any] | None, packets: Packets, vector: str, size: int) -> list[float]:
    """Return a vector of the model that a client gets from the model it holds and the packets it receives."""
    summed = None if held is None else vector_of(held[vector])
    for values in _values(packets, vector, size):
        both = zip(summed, values, strict=True) if summed is not None else ()
        rounded = f32 if vector == "parameters" else float
        summed = [rounded(a + b) for a, b in both] if summed is not None else values
    return summed or []


def aggregate(example: Mapping[str, Any], vector: str) -> list[float]:
    """Return a vector of the model that a server without options computes from the updates of an example."""
    base = vector_of(example["base"][vector])
    total, samples, absolute = [0.0] * len(base), 0, 0
    for update in sorted(example["updates"], key=lambda update: update["client_id"].encode("ascii")):
        mine = [packet for packet in update["packets"] if packet["vector"] == vector]
        for values in _values(mine, vector, len(base)):
            total = [t + value * update["num_samples"] for t, value in zip(total, values, strict=True)]
        if mine:
            samples += update["num_samples"]
            absolute += update["num_samples"] if mine[0]["kind"] == "weights" else 0
    if absolute:
        total = [t - value * absolute for t, value in zip(total, base, strict=True)]
    moved = [t / samples + value for t, value in zip(total, base, strict=True)]
    if vector == "parameters":
        return list(map(f32, moved))
    whole = [flag for entry in json.loads(example["schema"]) for flag in _whole(entry)]
    return [float(round(value)) if flag else value for value, flag in zip(moved, whole, strict=True)]


def _values(packets: Packets, vector: str, size: int) -> Iterator[list[float]]:
    for packet in packets:
        if packet["vector"] == vector:
            yield decode(bytes.fromhex(packet["encoded"]), packet["encoding"], size)


def _whole(entry: tuple[str, list[int], str, str]) -> list[bool]:
    """Return for each value of a buffer whether it is an integer."""
    _, shape, dtype, role = entry
    count = reduce(lambda a, b: a * b, shape, 1) if role == "buffer" else 0
    return [dtype.startswith(("int", "uint", "bool"))] * count


def decode_gradient(data: bytes, sizes: Sequence[int]) -> list[tuple[list[int] | None, list[float]]]:
    """Return the positions (None = all) and the values of each tensor."""
    rest = Bytes(data)
    head, count, layout = rest.take("4sII")
    assert (head, count) == (b"GR\0\1", len(sizes))
    assert layout == zlib.crc32(struct.pack(f"<{count}Q", *sizes))
    rows = [rest.take("BBBBII") for _ in sizes]
    tensors = []
    for form, precision, bits, zero, entries, length in rows:
        assert zero == 0
        (coded,) = rest.take(f"{length}s")
        tensors.append((_positions(form, bits, entries, coded), _gradient_values(rest, precision, entries)))
    assert not rest.data
    return tensors


def _positions(form: int, bits: int, count: int, coded: bytes) -> list[int] | None:
    if form == 0:
        return None
    if form == 1:
        gaps = list(struct.unpack(f"<{count}H", coded))
    else:
        rest = Bytes(coded)
        lows = rest.flags(count * bits)
        gaps = [sum(lows[i * bits + j] << j for j in range(bits)) for i in range(count)]
        zeros, at = 0, 0
        for flag in rest.flags(8 * len(rest.data)) if count else ():
            if flag:
                gaps[at] |= zeros << bits
                zeros, at = 0, at + 1
            else:
                zeros += 1
    places, place = [], -1
    for gap in gaps:
        place += gap + 1
        places.append(place)
    return places


def _gradient_values(rest: Bytes, precision: int, count: int) -> list[float]:
    if precision == 0:
        return list(rest.take(f"{count}f"))
    if precision == 1:
        (exponent,) = rest.take("b")
        return [f32(half * 2.0**-exponent) for half in rest.take(f"{count}e")]
    (upper,) = rest.take("H")
    (scale,) = struct.unpack("<f", struct.pack("<I", upper << 16))
    return [-scale if flag else scale for flag in rest.flags(count)]


def message(data: bytes) -> Iterator[tuple[int, int | float | bytes]]:
    """Yield the number and the value of each field of a protobuf message."""
    while data:
        key, data = _varint(data)
        match key & 7:
            case 0:
                value, data = _varint(data)
                yield key >> 3, value
            case 1:
                yield key >> 3, struct.unpack("<d", data[:8])[0]
                data = data[8:]
            case _:
                size, data = _varint(data)
                yield key >> 3, data[:size]
                data = data[size:]


def _varint(data: bytes) -> tuple[int, bytes]:
    value = next(i for i, byte in enumerate(data) if byte < 128) + 1
    return sum((byte & 127) << 7 * i for i, byte in enumerate(data[:value])), data[value:]
