"""The law of error feedback: nothing is lost."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from fedring.codec import NAMES, STATELESS, Encoding, decode
from fedring.compress.feedback import compress

SMALL = hnp.arrays(np.float32, 24, elements=st.integers(-1000, 1000).map(float))
ANY = hnp.arrays(np.float32, 24, elements=st.floats(-(2.0**100), 2.0**100, width=32))
LOSSY = sorted(set(NAMES) - STATELESS)


@settings(max_examples=150, deadline=None)
@given(ANY, ANY, st.sampled_from(LOSSY), st.integers(1, 30), st.floats(0.01, 1))
def test_decoded_plus_residual_is_update_plus_old_residual(
    update: NDArray[np.float32], old: NDArray[np.float32], name: str, chunk: int, ratio: float
) -> None:
    sent = compress(update, old, Encoding(name, chunk=chunk, keep_ratio=ratio))
    decoded = decode(sent.payload, name=name, length=24).astype(np.float64)
    assert sent.residual is not None
    assert sent.residual.dtype == np.float32
    target = update + old
    gap = np.abs(decoded + sent.residual - target)
    assert (gap <= np.spacing(np.maximum(np.abs(target), np.abs(sent.residual)))).all()


@given(SMALL, SMALL, st.sampled_from(["fp32_sparse", "fp16", "bf16"]), st.floats(0.01, 1))
def test_the_law_is_exact_where_float32_is_exact(
    update: NDArray[np.float32], old: NDArray[np.float32], name: str, ratio: float
) -> None:
    sent = compress(update, old, Encoding(name, keep_ratio=ratio))
    decoded = decode(sent.payload, name=name, length=24)
    assert sent.residual is not None
    assert np.array_equal(decoded + sent.residual, update + old)


@settings(max_examples=50, deadline=None)
@given(ANY, ANY)
def test_fp32_sends_the_whole_sum(update: NDArray[np.float32], old: NDArray[np.float32]) -> None:
    sent = compress(update, old, Encoding("fp32"))
    assert sent.residual is None
    assert np.array_equal(decode(sent.payload, name="fp32", length=24), update + old)
