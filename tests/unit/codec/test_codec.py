"""Every payload format, on vectors of more than one tile: exactness, sizes, ranges, memory."""

import tracemalloc
from itertools import pairwise

import numpy as np
import pytest
from numpy.typing import NDArray

from fedring.codec import NAMES, TILE, CodecError, Encoding, decode, encode, encode_buffers, open_payload
from fedring.codec.sparse import encode_sparse

DIM = 2 * TILE + TILE // 3 + 5


def update(dim: int = DIM, seed: int = 0) -> NDArray[np.float32]:
    """Return a vector like an update: heavy tails, layers of different magnitude, and units that did not change."""
    random = np.random.default_rng(seed)
    values = random.laplace(size=dim) * np.exp(random.normal(size=dim))
    values *= np.repeat(np.exp(random.normal(size=dim // 1000 + 1)), 1000)[:dim]
    values *= np.repeat(random.random(dim // 72 + 1) < 0.6, 72)[:dim]
    return values.astype(np.float32)


UPDATE = update()


@pytest.mark.parametrize("name", NAMES)
def test_any_split_into_ranges_decodes_to_the_same_bits_as_the_whole(name: str) -> None:
    payload = encode(UPDATE, Encoding(name, chunk=1000))
    whole = decode(payload, name=name, length=DIM)
    decoder = open_payload(lambda at, size: payload[at : at + size], len(payload), name=name, length=DIM)
    cuts = [0, 0, 1, 999, 1000, 1001, 70_003, TILE - 576, TILE - 1, TILE + 1, 2 * TILE, DIM - 1, DIM]
    parts = [decoder.decode(start, stop) for start, stop in pairwise(cuts)]
    assert np.concatenate(parts).tobytes() == whole.tobytes()


@pytest.mark.parametrize("name", NAMES)
def test_add_is_decode_times_weight_in_float64(name: str) -> None:
    payload = encode(UPDATE, Encoding(name))
    decoder = open_payload(lambda at, size: payload[at : at + size], len(payload), name=name, length=DIM)
    start, stop = 5, TILE + 7
    out = np.full(stop - start, 0.25)
    decoder.add(start, stop, out, 0.1)
    expected = 0.25 + decoder.decode(start, stop).astype(np.float64) * 0.1
    assert np.array_equal(out, expected)


@pytest.mark.parametrize("name", NAMES)
def test_encoding_is_deterministic_and_does_not_change_the_vector(name: str) -> None:
    vector = UPDATE[: TILE // 4].copy()
    vector.flags.writeable = False
    before = vector.tobytes()
    assert encode(vector, Encoding(name)) == encode(vector, Encoding(name))
    assert vector.tobytes() == before


@pytest.mark.parametrize(
    ("encoding", "most"),
    [
        (Encoding("fp32"), 1.0001),
        (Encoding("fp16"), 0.5001),
        (Encoding("bf16"), 0.5001),
        (Encoding("int8"), 0.26),
        (Encoding("fp32_sparse"), 0.205),
        (Encoding("sq8"), 0.135),
        (Encoding("uniform"), 0.045),
        (Encoding("packed"), 0.045),
        (Encoding("packed", keep_ratio=0.01), 0.006),
    ],
    ids=lambda value: f"{value.name}-{value.keep_ratio}" if isinstance(value, Encoding) else str(value),
)
def test_a_payload_is_no_larger_than_promised(encoding: Encoding, most: float) -> None:
    assert len(encode(UPDATE, encoding)) <= most * 4 * DIM


@pytest.mark.parametrize("ratio", [0.1, 0.01, 0.001])
def test_packed_is_near_the_entropy_of_positions_plus_levels(ratio: float) -> None:
    vector = np.random.default_rng(3).standard_normal(2 * TILE, dtype=np.float32)
    encoding = Encoding("packed", keep_ratio=ratio)
    payload = encode(vector, encoding)
    # As in int8, the largest kept value has level 127. The entropy of such levels in the tail of a Gaussian comes from
    # a much longer vector: 6.25, 5.99, 5.78 bits.
    levels = {0.1: 6.25, 0.01: 5.99, 0.001: 5.78}[ratio]
    gaps = -(ratio * np.log2(ratio) + (1 - ratio) * np.log2(1 - ratio)) / ratio
    assert 8 * len(payload) <= 1.08 * (gaps + levels) * ratio * vector.size


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dim", [0, 1, 3])
def test_short_vectors_are_legal(name: str, dim: int) -> None:
    vector = np.zeros(dim, np.float32)
    assert np.array_equal(decode(encode(vector, Encoding(name)), name=name, length=dim), vector)


def test_buffers_are_exact() -> None:
    buffers = np.array([0.1, -0.0, 2.0**53, 5e-324, -1.7e308])
    assert decode(encode_buffers(buffers), name="fp64", length=5).tobytes() == buffers.tobytes()


@pytest.mark.parametrize("name", ["fp32_sparse", "sq8", "packed"])
def test_zeros_are_never_sent(name: str) -> None:
    vector = np.zeros(10_000, np.float32)
    vector[[7, 9_000]] = 2, -254  # exact in levels of 2
    payload = encode(vector, Encoding(name, keep_ratio=0.5))
    assert len(payload) < 100
    assert np.array_equal(decode(payload, name=name, length=10_000), vector)


@pytest.mark.parametrize("name", ["fp32_sparse", "sq8", "packed"])
def test_at_least_one_entry_is_kept(name: str) -> None:
    vector = np.array([1, 3, -4, 2], np.float32)
    decoded = decode(encode(vector, Encoding(name, keep_ratio=1e-9)), name=name, length=4)
    assert decoded.tolist() == [0, 0, -4, 0]


def test_packed_bridges_gaps_of_any_length() -> None:
    vector = np.zeros(3 * TILE, np.float32)
    vector[:100] = np.arange(1, 101)  # a dense run makes the code choose few low bits
    vector[[5_000, TILE - 1, TILE, 3 * TILE - 1]] = 50, -127, 50, 127
    decoded = decode(encode(vector, Encoding("packed", keep_ratio=1.0)), name="packed", length=vector.size)
    assert np.flatnonzero(decoded).tolist() == np.flatnonzero(vector).tolist()
    assert np.abs(decoded - vector).max() <= 0.5


@pytest.mark.parametrize("name", ["int8", "sq8", "packed", "uniform"])
@pytest.mark.parametrize("size", [1e-44, 1e-38, 1e-30, 1e30, 3.4028235e38])
def test_the_smallest_and_the_largest_floats_stay_finite_and_close(name: str, size: float) -> None:
    vector = np.array([1, -1, 0.5, 0], np.float32) * np.float32(size)
    decoded = decode(encode(vector, Encoding(name, keep_ratio=1.0, step=0.01)), name=name, length=4)
    assert np.isfinite(decoded).all()
    assert np.abs(decoded.astype(np.float64) - vector).max() <= 0.01 * size + 1e-36 + (0.5 * size if size > 1e38 else 0)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_half_precision_saturates_instead_of_overflowing(name: str) -> None:
    largest = np.array([3.4028235e38, -3.4028235e38], np.float32)
    decoded = decode(encode(largest, Encoding(name)), name=name, length=2)
    assert np.isfinite(decoded).all()
    assert decoded[0] == -decoded[1] > 60_000


def test_bf16_rounds_to_nearest_even() -> None:
    bits = np.array([0x3F800000, 0x3F808000, 0x3F818000, 0x3F808001, 0xBF807FFF], np.uint32)
    decoded = decode(encode(bits.view(np.float32), Encoding("bf16")), name="bf16", length=5)
    assert [f"{value:08X}" for value in decoded.astype(np.float32).view(np.uint32)] == [
        "3F800000", "3F800000", "3F820000", "3F810000", "BF800000",
    ]  # fmt: skip


def test_uniform_raises_the_scale_where_a_level_would_not_fit() -> None:
    vector = np.ones(1 << 16, np.float32)
    vector[3] = 1e6
    decoded = decode(encode(vector, Encoding("uniform", chunk=1 << 16, step=1e-6)), name="uniform", length=vector.size)
    assert np.abs(decoded - vector).max() <= 1e6 / 65535 / 2 * 1.01


@pytest.mark.parametrize("name", ["fp32", "fp64"])
def test_a_view_of_the_bytes_cannot_be_written_to(name: str) -> None:
    payload = bytearray(encode(UPDATE[:10], Encoding("fp32")) if name == "fp32" else encode_buffers(np.ones(10)))
    view = memoryview(payload)
    values = open_payload(lambda at, size: view[at : at + size], len(view), name=name, length=10).decode(0, 10)
    assert not values.flags.writeable


@pytest.mark.parametrize("name", NAMES)
def test_an_open_payload_holds_little_memory(name: str) -> None:
    payload = encode(UPDATE, Encoding(name))
    tracemalloc.start()
    try:
        decoders = [
            open_payload(lambda at, size: payload[at : at + size], len(payload), name=name, length=DIM)
            for _ in range(10)
        ]
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 10 * 4096
    assert len(decoders) == 10


@pytest.mark.parametrize("name", ["fp32_sparse", "sq8"])
def test_a_range_of_a_sparse_payload_reads_few_bytes_beyond_its_entries(name: str) -> None:
    payload = encode(UPDATE, Encoding(name))
    read: list[int] = []

    def reader(at: int, size: int) -> bytes:
        read.append(size)
        return payload[at : at + size]

    decoder = open_payload(reader, len(payload), name=name, length=DIM)
    read.clear()
    decoder.decode(TILE, TILE + 1000)
    assert sum(read) < 8 * (2 * 4096 + 1000)


def test_vectors_too_long_for_32_bit_indices_are_refused() -> None:
    vector = np.broadcast_to(np.float32(0), 1 << 32)  # one value in memory
    with pytest.raises(CodecError) as refused:
        encode_sparse(vector, Encoding("fp32_sparse"))
    assert refused.value.reason == "bad_encoding"
