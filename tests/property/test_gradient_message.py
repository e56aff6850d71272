"""Decoding inverts encoding, and any other bytes raise nothing but CodecError."""

import contextlib
from collections.abc import Sequence

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from fedring.codec import CodecError
from fedring.codec.gradient import Part, decode_gradient, encode_gradient
from fedring.codec.precision import Precision, to_words
from fedring.codec.rice import coded_size, pack_gaps, unpack_gaps

PRECISIONS: tuple[Precision, ...] = ("fp32", "fp16", "sign")
FLOATS = st.floats(-(2.0**120), 2.0**120, width=32) | st.floats(-4, 4, width=32)


@st.composite
def parts(draw: st.DrawFn) -> tuple[Part, int]:
    """Draw a part, and the size of its tensor."""
    size = draw(st.integers(0, 50) | st.integers(1, 1_000_000))
    precision = draw(st.sampled_from(PRECISIONS))
    if size <= 50 and draw(st.booleans()):
        positions, count = None, size
    else:
        places = draw(st.sets(st.integers(0, max(0, size - 1)), max_size=min(size, 40)))
        positions, count = np.array(sorted(places), np.int64), len(places)
    values = draw(st.lists(FLOATS, min_size=count, max_size=count))
    return Part(positions, to_words(np.array(values, np.float32), precision)), size


BUCKETS = st.lists(parts(), max_size=4)


def written(bucket: Sequence[tuple[Part, int]]) -> tuple[bytes, list[int]]:
    sizes = [size for _, size in bucket]
    return encode_gradient([part for part, _ in bucket], sizes=sizes), sizes


@given(BUCKETS)
def test_decode_inverts_encode(bucket: list[tuple[Part, int]]) -> None:
    data, sizes = written(bucket)
    for (part, _), entries in zip(bucket, decode_gradient(data, sizes=sizes), strict=True):
        assert entries.values.tobytes() == part.words.values.tobytes()
        if part.positions is None or entries.positions is None:
            assert part.positions is entries.positions
        else:
            assert entries.positions.tolist() == part.positions.tolist()


@given(st.lists(FLOATS, max_size=40), st.sampled_from(PRECISIONS))
def test_the_residual_of_rounding_is_exact(values: list[float], precision: Precision) -> None:
    exact = np.array(values, np.float32)
    words = to_words(exact, precision)
    rest = exact - words.values
    slack = np.spacing(np.abs(rest)) if precision == "sign" else 0
    assert (np.abs(words.values.astype(np.float64) + rest - exact) <= slack).all()


@given(st.lists(st.integers(0, 2**31), max_size=30), st.integers(20, 31))
def test_decoding_returns_the_encoded_gaps(gaps: list[int], bits: int) -> None:
    values = np.array(gaps, np.int64)
    data = pack_gaps(values, bits)
    assert len(data) == coded_size(values, bits)
    size = sum(gaps) + len(gaps)
    assert unpack_gaps(memoryview(data), len(gaps), bits=bits, size=size).tolist() == gaps


def survives(data: bytes, sizes: list[int]) -> None:
    """Assert that `data` raises CodecError or decodes to a valid message."""
    with contextlib.suppress(CodecError):
        for entries, size in zip(decode_gradient(data, sizes=sizes), sizes, strict=True):
            assert np.isfinite(entries.values).all()
            if entries.positions is None:
                assert entries.values.size == size
            else:
                assert entries.values.size == entries.positions.size
                assert ((entries.positions >= 0) & (entries.positions < size)).all()
                assert (np.diff(entries.positions) > 0).all()


@settings(max_examples=150, deadline=None)
@given(BUCKETS, st.data())
def test_flipped_bits_raise_nothing_but_codec_errors(bucket: list[tuple[Part, int]], data: st.DataObject) -> None:
    message, sizes = written(bucket)
    changed = bytearray(message)
    for place in data.draw(st.lists(st.integers(0, 8 * len(changed) - 1), max_size=4)):
        changed[place // 8] ^= 1 << place % 8
    survives(bytes(changed), sizes)


@given(BUCKETS, st.binary(max_size=80))
def test_random_bodies_raise_nothing_but_codec_errors(bucket: list[tuple[Part, int]], body: bytes) -> None:
    message, sizes = written(bucket)
    survives(body, sizes)
    table = 12 + 12 * len(sizes)
    survives(message[:12] + body, sizes)
    survives(message[:table] + body, sizes)
    survives(message[:table] + body[: len(message) - table].ljust(len(message) - table, b"\xaa"), sizes)
