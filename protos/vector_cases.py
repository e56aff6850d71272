"""The cases of vectors.json: values, and bytes that are no payload.

vectors.py computes the rest.
"""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fedring.codec import Encoding, encode

Values = Sequence[float] | Mapping[int, float]
"""A vector: all values, or its entries other than 0, by index."""

ABOUT = [
    "Examples that every implementation of fedring's wire formats must agree on. FORMATS.md says what they mean.",
    "`python protos/vectors.py` writes this file.",
    "If you read numbers as 64-bit floats, you get them exactly. Those of parameters are float32.",
    "-0.0 is minus zero. Its bits, and therefore its digest, differ from those of 0.0.",
    "A vector is a list or, if it is long, an object with its size and its entries [index, value]. All others are 0.0.",
    "Bytes are hexadecimal. Keys that end in _bits hold values as they travel: little endian, parameters as float32,",
    "buffers as float64.",
    "A reader of `encoded` must get `decoded`, bit by bit.",
    "exact: true means that a writer of `values` must write `encoded`. exact: false means that a writer has a choice,",
    "if only because each zstandard library compresses in its own way. What it writes must decode to `decoded`.",
]

SCHEMAS = [
    r'[["conv.weight",[2,1,3],"float32","parameter"],["norm.count",[],"int64","buffer"],'
    r'["\u00e9",[4],"float16","parameter"]]',
    r'[["a\"b\\c\n\t\u001f\u007f/\ud83d\ude00",[0],"bfloat16","parameter"],["m",[1,2],"float64","buffer"]]',
]
OTHER_SPELLINGS = {
    "white space": '[["a", [1],"float32","parameter"]]',
    "a letter that is not escaped": '[["é",[1],"float32","parameter"]]',
    "digits in capitals": r'[["\u00E9",[1],"float32","parameter"]]',
    "an escape that is not needed": r'[["\u0061",[1],"float32","parameter"]]',
    "an escaped slash": r'[["a\/b",[1],"float32","parameter"]]',
    "a size that is not an integer": '[["a",[1.0],"float32","parameter"]]',
    "a negative size": '[["a",[-1],"float32","parameter"]]',
    "an unknown role": '[["a",[1],"float32","weight"]]',
}
MODELS: list[tuple[list[float], list[float]]] = [([1, -2.5], [3]), ([-0.0], []), ([0], []), ([], [0.5]), ([], [])]


@dataclass(frozen=True)
class Case:
    """One vector in one encoding.

    `shows` begins with the name of the encoding.
    """

    shows: str
    values: Values
    parameters: Mapping[str, Any] = field(default_factory=dict)
    size: int = 0  # of the vector, if the values are entries

    @property
    def name(self) -> str:
        """The name of the encoding."""
        return self.shows.partition(":")[0]


SMALLEST = 2.0**-126  # normal float32
LARGEST = float(np.finfo(np.float32).max)
CASES = [
    Case("fp32", [1, -2.5, 0]),
    Case("fp32: minus zero, the smallest and the largest number", [-0.0, 2.0**-149, LARGEST]),
    Case("fp32: an empty vector", []),
    Case("fp16", [1, -2.5, 0.1, 100000]),
    Case("fp16: ties to even, subnormal numbers", [2049, 2051, 2.0**-25, 3 * 2.0**-25, -0.0]),
    Case("fp16: beyond the largest number", [65519, 65520, -1e30]),
    Case("bf16", [1, -2.5, 0.1, 1.00390625]),
    Case("bf16: ties to even, and beyond the largest number", [1.01171875, LARGEST, -LARGEST, -0.0]),
    Case("fp64", [0.1, -3]),
    Case("fp64: what buffers may hold", [2.0**53, -0.0, 1e200]),
    Case("fp64: an empty vector", []),
    Case("int8", [127, -1, 0.5, 1.5, -254], {"chunk": 4}),
    Case("int8: scales are rounded, and values once more", [0.1, 0.2, -0.9, 1e-3, 7e-3, 5e-3], {"chunk": 3}),
    Case("int8: a scale of 0", [127 * 2.0**-130, -(2.0**-130), 127 * SMALLEST, SMALLEST], {"chunk": 2}),
    Case("int8: the largest scale", [LARGEST, -1, -LARGEST, LARGEST / 2], {"chunk": 2}),
    Case("int8: an empty vector", []),
    Case("fp32_sparse", [0, 1, -3, 0.5, 2, 0], {"keep_ratio": 0.5}),
    Case("fp32_sparse: among equals, the lowest index", [0, -2, 2, 2, -2, 1, 0, 0], {"keep_ratio": 0.3}),
    Case("fp32_sparse: zeros are never kept", [0, 2.0**-149, -0.0], {"keep_ratio": 1.0}),
    Case("fp32_sparse: an empty vector", []),
    Case("sq8", [0, 1, -127, 0.5, 2, 0], {"keep_ratio": 0.5, "chunk": 2}),
    Case("sq8: an empty vector", []),
    Case("packed", [0, 1, -127, 0.25, 2, 0], {"keep_ratio": 0.5, "chunk": 4}),
    Case("packed: the larger of two distances is the median", {0: 127, 64: -1}, {"keep_ratio": 1.0, "chunk": 4}, 70),
    Case(
        "packed: a gap that is bridged",
        {0: 1, 1: 2, 2: -4, 3: 127, 1000: -254},
        {"keep_ratio": 1.0, "chunk": 4},
        size=1001,
    ),
    Case("packed: 12 low bits, the most", {65535: 127, 131071: 5}, {"keep_ratio": 1.0, "chunk": 4}, 131072),
    Case(
        "packed: three segments, the second one empty",
        {5: 1, 1_400_001: -2},
        {"keep_ratio": 1.0, "chunk": 700_000},
        size=1_400_002,
    ),
    Case("packed: an empty vector", []),
    Case("uniform", [5, 1, -7, 5, 0, 0, 0, 0, 3], {"chunk": 4, "step": 0.2}),
    Case(
        "uniform: scales are rounded, and values once more",
        [0.1, 0.2, -0.3, 1, -1e-3, 4, 9],
        {"chunk": 3, "step": 0.7},
    ),
    Case("uniform: a raised scale, and the largest level", [1, 0.5, -65535], {"chunk": 3, "step": 1e-6}),
    Case(
        "uniform: magnitudes of every kind",
        [0, 1, -2, 3, -4, 5, 300, -1000, 65535, 0, 0, 4],
        {"chunk": 16, "step": 1e-6},
    ),
    Case("uniform: a scale of 0", [2.0**-130, -(2.0**-130), SMALLEST, SMALLEST], {"chunk": 2, "step": 1.0}),
    Case(
        "uniform: two segments",
        {7: 1024, 1 << 20: 3, (1 << 20) + 1: -3},
        {"chunk": 1 << 20, "step": 1.0},
        size=(1 << 20) + 2,
    ),
    Case("uniform: an empty vector", []),
]

Packets = list[tuple[str, str, Encoding | None, list[float]]]
"""The packets, each with its vector, kind, encoding (None = fp64) and values."""

DOWNLOADS: dict[str, tuple[list[float], list[float], Packets]] = {
    "one addition per packet, in their order": (
        [2.0**24, 0.1, -0.0, -0.0, 1],
        [0.1, 3],
        [
            ("parameters", "delta", Encoding("fp32"), [1, 0.2, -0.0, 0, 2.0**-25]),
            ("parameters", "delta", Encoding("fp16"), [1, 1e-3, -0.0, 0, 2.0**-24]),
            ("buffers", "delta", None, [0.2, 1]),
            ("buffers", "delta", None, [1e-17, 1]),
        ],
    ),
    "an entry that is left out is added as 0: minus zero becomes zero": (
        [-0.0, -0.0, 5],
        [],
        [("parameters", "delta", Encoding("fp32_sparse", keep_ratio=0.3), [0, 0, 2])],
    ),
    "a whole model": (
        [],
        [],
        [("parameters", "weights", Encoding("fp32"), [1, -0.0]), ("buffers", "weights", None, [7])],
    ),
}

AGGREGATED_SCHEMA = (
    b'[["w",[2,3],"float32","parameter"],["b",[2],"float32","parameter"],'
    b'["mean",[2],"float32","buffer"],["count",[],"int64","buffer"]]'
)
AGGREGATED_BASE: tuple[list[float], list[float]] = ([0.5, 0.1, -0.0, 1, -2, 3.25, 1e-3, 7], [0.25, -1.5, 10])
_LARGE = 127 * 2.0**49  # the first entries of B.1 and a_3 cancel out; that of b-2 is lost if it is added in between
AGGREGATED: dict[str, tuple[int, Packets]] = {
    "b-2": (
        2,
        [
            (
                "parameters",
                "delta",
                Encoding("packed", chunk=1, keep_ratio=0.5),
                [1, 0.3, 0, 0.7, 0, 0, -1e-3, 0.01],
            ),
            ("buffers", "delta", None, [0.1, 0.2, 3]),
        ],
    ),
    "B.1": (
        4,
        [
            ("parameters", "weights", Encoding("fp32"), [3 * _LARGE, 0.2, -0.0, 1.5, -2.5, 3.2, 2e-3, 6.9]),
            ("buffers", "weights", None, [0.35, -1.4, 12]),
        ],
    ),
    "a_3": (
        3,
        [
            ("parameters", "delta", Encoding("int8", chunk=1), [-4 * _LARGE, 0.1, 0, -0.2, 0.3, 0.2, 0.1, -1]),
            ("parameters", "delta", Encoding("fp32_sparse", keep_ratio=0.25), [0, 0, 0, 0, 1e-3, -7e-4, 0, 0]),
        ],
    ),
}
"""The samples and packets of each client."""


def refused() -> list[tuple[str, str, bytes, str]]:
    """Return payloads that every reader of two values refuses.

    Each comes with its fault, encoding, bytes and reason.
    """
    dense = encode(np.array([1, -2], np.float32), Encoding("fp32"))
    levels = encode(np.array([1, -127], np.float32), Encoding("int8", chunk=2))
    sparse = struct.pack("<2sBBII2I2f", b"S4", 0, 1, 2, 2, 0, 1, 1, 1)
    return [
        ("another magic", "fp32", b"F5" + dense[2:], "bad_header"),
        ("another version", "fp32", dense[:3] + b"\2" + dense[4:], "bad_header"),
        ("a chunk where there is none", "fp32", dense[:4] + b"\1" + dense[5:], "bad_header"),
        ("a vector of three values", "fp32", encode(np.ones(3, np.float32), Encoding("fp32")), "wrong_length"),
        ("a byte too few", "fp32", dense[:-1], "truncated"),
        ("a byte too many", "fp32", dense + b"\0", "wrong_size"),
        ("NaN", "fp32", dense[:-4] + struct.pack("<f", float("nan")), "non_finite"),
        ("infinity", "fp16", struct.pack("<2sBBIQ2H", b"H2", 0, 1, 0, 2, 0, 0x7C00), "non_finite"),
        ("a chunk of 0", "int8", levels[:4] + bytes(4) + levels[8:], "bad_header"),
        ("a negative scale", "int8", levels[:16] + struct.pack("<f", -1) + levels[20:], "bad_scale"),
        ("an infinite scale", "int8", levels[:16] + struct.pack("<f", float("inf")) + levels[20:], "bad_scale"),
        ("the same index twice", "fp32_sparse", sparse[:16] + bytes(4) + sparse[20:], "bad_indices"),
        ("an index beyond the vector", "fp32_sparse", sparse[:16] + b"\2" + sparse[17:], "bad_indices"),
        ("more entries than values", "fp32_sparse", sparse[:8] + b"\3" + sparse[9:], "bad_header"),
        ("a gap beyond the vector", "packed", _packed(b"\1\1", b"\0\1"), "bad_indices"),
        ("13 low bits", "packed", _packed(b"\1\1", b"\0\0", bits=13), "bad_header"),
        ("a byte after a segment's end", "packed", _packed(b"\1\1", b"\0\0", after=b"\0"), "wrong_size"),
        ("a stream that is too short", "packed", _packed(b"\1", b"\0\0"), "bad_compression"),
        ("a stream that is too long", "packed", _packed(bytes(1 << 20), b"\0\0"), "bomb"),
    ]


def _packed(levels: bytes, high: bytes, bits: int = 0, after: bytes = b"") -> bytes:
    """Return a payload of `packed` with one segment of two entries."""
    segment = struct.pack("<IIf", 2, bits, 1) + _stream(levels) + _stream(high) + after
    return struct.pack("<2sBBIQI", b"PK", 0, 1, 2, 2, len(segment)) + segment


def _stream(content: bytes) -> bytes:
    """Return a stream whose bytes depend on no library.

    Its blocks are uncompressed, or repeat one byte.
    """
    frame = struct.pack("<IBI", 0xFD2FB528, 0xA0, len(content))
    for start in range(0, len(content), 1 << 17):
        block = content[start : start + (1 << 17)]
        repeated, last = len(set(block)) == 1, start + len(block) == len(content)
        frame += (len(block) << 3 | repeated << 1 | last).to_bytes(3, "little") + (block[:1] if repeated else block)
    return struct.pack("<I", len(frame)) + frame
