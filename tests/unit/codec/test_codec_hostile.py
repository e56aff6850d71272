"""Invalid payloads are refused, with a stable reason and at a bounded cost."""

import struct
import tracemalloc

import numpy as np
import pytest
import zstandard

from fedring.codec import NAMES, TILE, CodecError, Encoding, decode, encode, open_payload

VECTOR = np.array([1, -2, 0, 4, -8, 16, 0, -127], np.float32)
ALL_NAMES = (*NAMES, "fp64")


def reason(payload: bytes, name: str, length: int = 8) -> str:
    """Return the reason for which `payload` is refused."""
    with pytest.raises(CodecError) as refused:
        decode(payload, name=name, length=length)
    return refused.value.reason


def frame(content: bytes) -> bytes:
    """Return `content` as a compressed stream."""
    compressed = zstandard.ZstdCompressor().compress(content)
    return struct.pack("<I", len(compressed)) + compressed


def segmented(magic: bytes, segment: bytes, dim: int = 8) -> bytes:
    """Return a payload of one segment."""
    return struct.pack("<2sBBIQI", magic, 0, 1, 8, dim, len(segment)) + segment


def packed(levels: bytes, high: bytes, *, count: int | None = None, bits: int = 0, scale: float = 1.0) -> bytes:
    """Return a packed payload with these levels and gaps."""
    head = struct.pack("<IIf", len(levels) if count is None else count, bits, scale)
    return segmented(b"PK", head + frame(levels) + frame(high))


def s4(dim: int, indices: list[int], values: list[float]) -> bytes:
    """Return an fp32_sparse payload."""
    count = len(indices)
    return struct.pack(f"<2sBBII{count}I{count}f", b"S4", 0, 1, dim, count, *indices, *values)


@pytest.mark.parametrize("name", NAMES)
def test_every_truncation_is_refused(name: str) -> None:
    payload = encode(VECTOR, Encoding(name, chunk=4, keep_ratio=0.5))
    for size in range(len(payload)):
        assert reason(payload[:size], name) == "truncated"


@pytest.mark.parametrize("name", NAMES)
def test_an_extra_byte_is_refused(name: str) -> None:
    assert reason(encode(VECTOR, Encoding(name)) + b"\0", name) == "wrong_size"


@pytest.mark.parametrize("name", NAMES)
def test_a_reader_that_returns_too_few_bytes_is_refused(name: str) -> None:
    payload = encode(VECTOR, Encoding(name))
    with pytest.raises(CodecError) as refused:
        open_payload(lambda at, size: payload[at : at + size][:-1], len(payload), name=name, length=8).decode(0, 8)
    assert refused.value.reason == "truncated"


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_of_another_length_is_refused(name: str) -> None:
    assert reason(encode(VECTOR, Encoding(name)), name, length=9) == "wrong_length"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("place", range(4))
def test_a_wrong_magic_or_version_is_refused(name: str, place: int) -> None:
    payload = bytearray(encode(VECTOR, Encoding(name)))
    payload[place] ^= 0x40
    assert reason(bytes(payload), name) == "bad_header"


@pytest.mark.parametrize("name", ["int8", "packed", "uniform"])
@pytest.mark.parametrize("chunk", [0, TILE + 1, 0xFFFFFFFF])
def test_a_chunk_out_of_range_is_refused(name: str, chunk: int) -> None:
    payload = bytearray(encode(VECTOR, Encoding(name)))
    payload[4:8] = struct.pack("<I", chunk)
    assert reason(bytes(payload), name) == "bad_header"


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
def test_a_chunk_in_a_format_without_chunks_is_refused(name: str) -> None:
    payload = bytearray(encode(VECTOR, Encoding(name)))
    payload[4] = 1
    assert reason(bytes(payload), name) == "bad_header"


def test_an_unknown_encoding_is_refused() -> None:
    assert reason(b"", "pickle") == "unknown_encoding"


@pytest.mark.parametrize("name", ALL_NAMES)
@pytest.mark.parametrize("length", [1 << 31, 1 << 40])
def test_a_header_that_claims_billions_of_entries_allocates_nothing(name: str, length: int) -> None:
    if name in {"fp32_sparse", "sq8"}:
        length = min(length, (1 << 32) - 1)
        head = struct.pack("<2sBBIII", b"S4" if name == "fp32_sparse" else b"SQ", 0, 1, length, length, 8192)
    else:
        magic = {"fp32": b"F4", "fp16": b"H2", "bf16": b"B2", "fp64": b"F8", "int8": b"Q8", "packed": b"PK"}
        chunk = 8192 if name in {"int8", "packed", "uniform"} else 0
        head = struct.pack("<2sBBIQ", magic.get(name, b"UQ"), 0, 1, chunk, length)
    payload = head + b"12345678"
    tracemalloc.start()
    try:
        with pytest.raises(CodecError) as refused:
            open_payload(lambda at, size: payload[at : at + size], len(payload), name=name, length=length)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert refused.value.reason == "truncated"
    assert peak < 1 << 20


@pytest.mark.parametrize(
    "indices",
    [[3, 2], [2, 2], [1, 8], [8], [0xFFFFFFFF], [0, 0xFFFFFFFF]],
    ids=["falling", "twice", "past the end", "first past the end", "minus one", "last minus one"],
)
def test_bad_indices_are_refused(indices: list[int]) -> None:
    assert reason(s4(8, indices, [1.0] * len(indices)), "fp32_sparse") == "bad_indices"


def test_bad_indices_are_found_in_any_block() -> None:
    good = list(range(0, 40_000, 2))
    assert decode(s4(40_000, good, [1.0] * 20_000), name="fp32_sparse", length=40_000).sum() == 20_000
    for place in (1, 4095, 4096, 4097, 8191, 8192, 19_999):
        bad = good.copy()
        bad[place] = bad[place - 1]
        assert reason(s4(40_000, bad, [1.0] * 20_000), "fp32_sparse", length=40_000) == "bad_indices"


def test_more_entries_than_the_vector_has_are_refused() -> None:
    assert reason(s4(8, list(range(9)), [1.0] * 9), "fp32_sparse") == "bad_header"
    assert reason(packed(bytes(9), bytes(9)), "packed") == "bad_header"
    assert reason(packed(b"\1", b"\0", count=0), "packed") == "bad_header"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_values_that_are_not_finite_are_refused(bad: float) -> None:
    assert reason(s4(8, [1, 2], [1.0, bad]), "fp32_sparse") == "non_finite"
    for name, magic, form in (("fp32", b"F4", "f"), ("fp16", b"H2", "e"), ("fp64", b"F8", "d")):
        assert reason(struct.pack(f"<2sBBIQ8{form}", magic, 0, 1, 0, 8, *[0.0] * 7, bad), name) == "non_finite"
    upper = struct.unpack("<2H", struct.pack("<f", bad))[1]
    assert reason(struct.pack("<2sBBIQ8H", b"B2", 0, 1, 0, 8, *[0] * 7, upper), "bf16") == "non_finite"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize(("name", "magic", "form"), [("fp32", b"F4", "f"), ("fp16", b"H2", "e"), ("fp64", b"F8", "d")])
def test_a_sum_of_squares_checks_every_value_of_its_range(name: str, magic: bytes, form: str, bad: float) -> None:
    payload = struct.pack(f"<2sBBIQ8{form}", magic, 0, 1, 0, 8, *[2.0] * 7, bad)
    decoder = open_payload(lambda at, size: payload[at : at + size], len(payload), name=name, length=8)
    assert decoder.square(0, 7) == 28.0
    with pytest.raises(CodecError, match="non_finite"):
        decoder.square(4, 8)


@pytest.mark.parametrize(("name", "magic", "word"), [("fp32", b"F4", "I"), ("bf16", b"B2", "H"), ("fp16", b"H2", "H")])
def test_a_sum_of_squares_of_a_signalling_nan_is_refused_without_a_warning(name: str, magic: bytes, word: str) -> None:
    signalling = {"fp32": 0x7FA00000, "bf16": 0x7F81, "fp16": 0x7D01}[name]
    payload = struct.pack(f"<2sBBIQ8{word}", magic, 0, 1, 0, 8, *[0] * 7, signalling)
    decoder = open_payload(lambda at, size: payload[at : at + size], len(payload), name=name, length=8)
    with pytest.raises(CodecError, match="non_finite"):
        decoder.square(0, 8)


def test_a_sum_of_squares_that_does_not_fit_its_type_is_infinite_and_no_fault_of_the_values() -> None:
    payload = encode(np.full(8, 1e30, np.float32), Encoding("fp32"))
    decoder = open_payload(lambda at, size: payload[at : at + size], len(payload), name="fp32", length=8)
    assert decoder.square(0, 8) == float("inf")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, 3e38])
def test_scales_that_could_make_a_value_infinite_are_refused(bad: float) -> None:
    assert reason(struct.pack("<2sBBIQf8b", b"Q8", 0, 1, 8, 8, bad, *range(8)), "int8") == "bad_scale"
    assert reason(struct.pack("<2sBBIIIIfb", b"SQ", 0, 1, 8, 1, 8, 5, bad, 1), "sq8") == "bad_scale"
    assert reason(packed(b"\1", b"\5", scale=bad), "packed") == "bad_scale"
    uniform = struct.pack("<f", bad) + frame(b"\1") + frame(b"\0") + frame(b"\0") + bytes(4)
    assert reason(segmented(b"UQ", uniform), "uniform") == "bad_scale"


def test_gaps_past_the_end_are_refused() -> None:
    assert decode(packed(b"\1\1", b"\0\6"), name="packed", length=8).tolist() == [1, 0, 0, 0, 0, 0, 0, 1]
    assert reason(packed(b"\1\1", b"\0\7"), "packed") == "bad_indices"
    assert reason(packed(b"\1", b"\1", bits=13), "packed") == "bad_header"


def test_a_decompression_bomb_is_refused_without_decompressing_it() -> None:
    bomb = frame(bytes(1 << 24))
    tracemalloc.start()
    try:
        assert reason(segmented(b"PK", struct.pack("<IIf", 1, 0, 1.0) + bomb), "packed") == "bomb"
        assert reason(segmented(b"UQ", struct.pack("<f", 1.0) + bomb), "uniform") == "bomb"
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


@pytest.mark.parametrize("name", ["packed", "uniform"])
def test_a_segment_larger_than_any_sender_needs_is_refused(name: str) -> None:
    payload = bytearray(encode(VECTOR, Encoding(name)))
    payload[16:20] = struct.pack("<I", 1 << 30)
    assert reason(bytes(payload), name) == "bad_header"


def test_a_decompression_bomb_without_its_size_is_refused() -> None:
    for claim in (b"\1", None):
        raw = zstandard.ZstdCompressor(write_content_size=False).compress(bytes(1 << 20))
        if claim:  # single segment, content size 1
            raw = raw[:4] + b"\x20" + claim + raw[6:]
        content = struct.pack("<IIf", 1, 0, 1.0) + struct.pack("<I", len(raw)) + raw
        assert reason(segmented(b"PK", content), "packed") == "bad_compression"


def test_a_stream_of_a_wrong_length_is_refused() -> None:
    assert reason(packed(b"\1\1", b"\0"), "packed") == "bad_compression"
    assert reason(segmented(b"PK", struct.pack("<IIf", 1, 0, 1.0) + bytes(4)), "packed") == "bad_compression"
    good = packed(b"\1", b"\5")[20:]
    assert reason(segmented(b"PK", good + b"\0"), "packed") == "wrong_size"
    two = zstandard.ZstdCompressor().compress(b"\1") * 2
    content = struct.pack("<IIfI", 1, 0, 1.0, len(two)) + two
    assert reason(segmented(b"PK", content), "packed") == "bad_compression"


def test_a_skippable_frame_is_not_accepted_as_a_stream() -> None:
    skippable = b"\x50\x2a\x4d\x18" + struct.pack("<I", 4) + b"junk"
    content = struct.pack("<f", 1.0) + frame(b"\0") + (struct.pack("<I", len(skippable)) + skippable) * 3
    assert reason(segmented(b"UQ", content), "uniform") == "bad_compression"
    content = struct.pack("<f", 1.0) + (struct.pack("<I", len(skippable)) + skippable) * 4
    assert reason(segmented(b"UQ", content), "uniform") == "bad_compression"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_and_infinity_are_never_encoded(name: str, bad: float) -> None:
    vector = VECTOR.copy()
    vector[3] = bad
    with pytest.raises(CodecError) as refused:
        encode(vector, Encoding(name, keep_ratio=0.2))
    assert refused.value.reason == "non_finite"
