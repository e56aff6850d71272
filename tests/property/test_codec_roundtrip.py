"""Every encoding keeps its promise about decoded values, for any vector."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from fedring.codec import NAMES, Encoding, decode, encode, encode_buffers, open_payload
from fedring.codec.select import largest

FLOATS = st.floats(-(2.0**100), 2.0**100, width=32) | st.floats(-4, 4, width=32) | st.just(0.0)
VECTORS = hnp.arrays(np.float32, st.integers(0, 80), elements=FLOATS)
CHUNKS = st.integers(1, 100)
RATIOS = st.floats(0.001, 1)
FLOAT_TINY = float(np.finfo(np.float32).tiny)

quick = settings(max_examples=60, deadline=None)


def through(vector: NDArray[np.float32], encoding: Encoding) -> NDArray[np.float64]:
    """Encode and decode `vector`."""
    payload = encode(vector, encoding)
    return decode(payload, name=encoding.name, length=vector.size).astype(np.float64)


def peaks(vector: NDArray[np.float32], chunk: int) -> NDArray[np.float64]:
    """Return, for each value, the largest magnitude in its chunk."""
    found = np.zeros(vector.size)
    for start in range(0, vector.size, chunk):
        found[start : start + chunk] = np.abs(vector[start : start + chunk]).max()
    return found


@quick
@given(VECTORS)
def test_fp32_is_exact(vector: NDArray[np.float32]) -> None:
    assert decode(encode(vector, Encoding("fp32")), name="fp32", length=vector.size).tobytes() == vector.tobytes()


@quick
@given(hnp.arrays(np.float64, st.integers(0, 40), elements=st.floats(allow_nan=False, allow_infinity=False)))
def test_buffers_are_exact(vector: NDArray[np.float64]) -> None:
    assert decode(encode_buffers(vector), name="fp64", length=vector.size).tobytes() == vector.tobytes()


@quick
@given(VECTORS)
def test_fp16_is_the_nearest_half_within_its_range(vector: NDArray[np.float32]) -> None:
    expected = np.clip(vector, -65504, 65504).astype(np.float16)
    assert np.array_equal(through(vector, Encoding("fp16")), expected)


@quick
@given(VECTORS)
def test_bf16_keeps_eight_significant_bits(vector: NDArray[np.float32]) -> None:
    error = np.abs(through(vector, Encoding("bf16")) - vector)
    assert (error <= np.abs(vector.astype(np.float64)) / 256 + FLOAT_TINY).all()


@quick
@given(VECTORS, CHUNKS)
def test_int8_is_within_half_a_scale(vector: NDArray[np.float32], chunk: int) -> None:
    error = np.abs(through(vector, Encoding("int8", chunk=chunk)) - vector)
    assert (error <= peaks(vector, chunk) / 127 * 0.50001 + 64 * FLOAT_TINY).all()


@quick
@given(VECTORS, RATIOS)
def test_fp32_sparse_is_exact_for_the_values_that_it_keeps(vector: NDArray[np.float32], ratio: float) -> None:
    decoded = through(vector, Encoding("fp32_sparse", keep_ratio=ratio))
    kept = largest(vector, max(1, int(np.ceil(ratio * vector.size))))
    expected = np.zeros(vector.size)
    expected[kept] = vector[kept]
    assert np.array_equal(decoded, expected)


@quick
@given(VECTORS, RATIOS, CHUNKS, st.sampled_from(["sq8", "packed"]))
def test_quantised_sparse_is_within_half_a_scale_for_the_values_that_it_keeps(
    vector: NDArray[np.float32], ratio: float, chunk: int, name: str
) -> None:
    decoded = through(vector, Encoding(name, chunk=chunk, keep_ratio=ratio))
    kept = largest(vector, max(1, int(np.ceil(ratio * vector.size))))
    left_out = np.ones(vector.size, bool)
    left_out[kept] = False
    assert not decoded[left_out].any()
    error = np.abs(decoded - vector)[kept]
    assert (error <= peaks(vector[kept], chunk) / 127 * 0.50001 + 64 * FLOAT_TINY).all()


@quick
@given(VECTORS, CHUNKS, st.floats(1e-6, 1000))
def test_uniform_is_within_half_a_step(vector: NDArray[np.float32], chunk: int, step: float) -> None:
    error = np.abs(through(vector, Encoding("uniform", chunk=chunk, step=step)) - vector)
    for start in range(0, vector.size, chunk):
        values = vector[start : start + chunk].astype(np.float64)
        scale = max(step * np.sqrt(np.mean(values**2)), np.abs(values).max() / 65535)
        assert (error[start : start + chunk] <= scale * 0.51 + 65535 * FLOAT_TINY).all()


@settings(max_examples=150, deadline=None)
@given(VECTORS, RATIOS, CHUNKS, st.sampled_from(NAMES), st.data())
def test_decoding_a_range_equals_a_slice_of_the_whole_vector(
    vector: NDArray[np.float32], ratio: float, chunk: int, name: str, data: st.DataObject
) -> None:
    payload = encode(vector, Encoding(name, chunk=chunk, keep_ratio=ratio))
    start = data.draw(st.integers(0, vector.size))
    stop = data.draw(st.integers(start, vector.size))
    decoder = open_payload(lambda at, size: payload[at : at + size], len(payload), name=name, length=vector.size)
    whole = decode(payload, name=name, length=vector.size)
    assert decoder.decode(start, stop).tobytes() == whole[start:stop].tobytes()
    out = np.zeros(stop - start)
    decoder.add(start, stop, out, 3.0)
    assert np.array_equal(out, whole[start:stop].astype(np.float64) * 3.0)


@quick
@given(hnp.arrays(np.float32, st.integers(0, 200), elements=st.floats(-3, 3, width=16)), st.integers(0, 220))
def test_largest_agrees_with_sorting(vector: NDArray[np.float32], count: int) -> None:
    order = np.argsort(-np.abs(vector), kind="stable")[:count]
    assert largest(vector, count).tolist() == sorted(order[vector[order] != 0].tolist())
