"""Any bytes either decode to finite values or raise CodecError."""

import contextlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedring.codec import NAMES, CodecError, Encoding, decode, encode, open_payload

LENGTH = 60
FORMATS = (*NAMES, "fp64")
HEADS = {
    "fp32": b"F4\0\1", "fp16": b"H2\0\1", "bf16": b"B2\0\1", "fp64": b"F8\0\1", "int8": b"Q8\0\1",
    "fp32_sparse": b"S4\0\1", "sq8": b"SQ\0\1", "packed": b"PK\0\1", "uniform": b"UQ\0\1",
}  # fmt: skip
VECTOR = (np.random.default_rng(0).standard_normal(LENGTH) ** 5).astype(np.float32)
PAYLOADS = {name: encode(VECTOR, Encoding(name, chunk=16, keep_ratio=0.4, step=0.1)) for name in NAMES}


def survives(payload: bytes, name: str, length: int = LENGTH) -> None:
    """Assert that `payload` raises CodecError or decodes to finite values."""
    with contextlib.suppress(CodecError):
        values = decode(payload, name=name, length=length)
        assert values.shape == (length,)
        assert np.isfinite(values).all()


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(FORMATS), st.binary(max_size=200), st.integers(0, 50))
def test_random_bytes_are_decoded_or_refused(name: str, data: bytes, length: int) -> None:
    survives(data, name, length)
    survives(HEADS[name] + data, name, length)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_flipped_bits_are_decoded_or_refused(name: str, data: st.DataObject) -> None:
    payload = bytearray(PAYLOADS[name])
    for place in data.draw(st.lists(st.integers(0, 8 * len(payload) - 1), min_size=1, max_size=4)):
        payload[place // 8] ^= 1 << place % 8
    survives(bytes(payload), name)


@pytest.mark.parametrize("name", NAMES)
def test_each_single_flipped_bit_is_decoded_or_refused(name: str) -> None:
    for place in range(8 * len(PAYLOADS[name])):
        payload = bytearray(PAYLOADS[name])
        payload[place // 8] ^= 1 << place % 8
        survives(bytes(payload), name)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(NAMES), st.data())
def test_every_truncation_and_every_extension_is_refused(name: str, data: st.DataObject) -> None:
    payload = PAYLOADS[name]
    cut = data.draw(st.integers(0, len(payload) - 1))
    for wrong in (payload[:cut], payload + data.draw(st.binary(min_size=1, max_size=40))):
        with pytest.raises(CodecError):
            decode(wrong, name=name, length=LENGTH)


@given(st.sampled_from(NAMES), st.integers(0, 2**63).filter(lambda length: length != LENGTH))
def test_another_length_is_refused_before_anything_is_allocated(name: str, length: int) -> None:
    payload = PAYLOADS[name]
    with pytest.raises(CodecError) as refused:
        open_payload(lambda at, size: payload[at : at + size], len(payload), name=name, length=length)
    assert refused.value.reason == "wrong_length"


@given(st.sampled_from(NAMES), st.integers(0, LENGTH - 1), st.sampled_from([np.nan, np.inf, -np.inf]))
def test_values_that_are_not_finite_are_never_encoded(name: str, place: int, bad: float) -> None:
    vector = VECTOR.copy()
    vector[place] = bad
    with pytest.raises(CodecError) as refused:
        encode(vector, Encoding(name, keep_ratio=0.01))
    assert refused.value.reason == "non_finite"
