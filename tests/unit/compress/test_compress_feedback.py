"""Error feedback: later updates deliver what one leaves out."""

import numpy as np
import pytest

from fedring.codec import NAMES, STATELESS, TILE, CodecError, Encoding, decode
from fedring.compress.feedback import compress


@pytest.mark.parametrize("name", NAMES)
def test_over_many_updates_nothing_is_lost(name: str) -> None:
    random = np.random.default_rng(0)
    encoding = Encoding(name, keep_ratio=0.05)
    intended, arrived = np.zeros(1000), np.zeros(1000)
    residual = None
    for _ in range(30):
        update = random.standard_normal(1000, dtype=np.float32)
        sent = compress(update, residual, encoding)
        intended += update
        arrived += decode(sent.payload, name=name, length=1000)
        residual = sent.residual
    owed = np.zeros(1000) if residual is None else residual
    if name != "uniform":  # it leaves no residual, so its rounding errors are lost
        assert np.abs(arrived + owed - intended).max() < 1e-4
    assert np.abs(owed).max() < 10


@pytest.mark.parametrize("name", sorted(STATELESS))
def test_a_stateless_encoding_sends_an_old_residual_and_leaves_none(name: str) -> None:
    update, residual = np.zeros(4, np.float32), np.full(4, 3, np.float32)
    sent = compress(update, residual, Encoding(name))
    assert sent.residual is None
    assert decode(sent.payload, name=name, length=4).tolist() == [3, 3, 3, 3]


@pytest.mark.parametrize("name", NAMES)
def test_compress_does_not_change_its_arguments(name: str) -> None:
    update, residual = np.arange(9, dtype=np.float32), np.ones(9, np.float32)
    update.flags.writeable = residual.flags.writeable = False
    compress(update, residual, Encoding(name))
    compress(update, None, Encoding(name))
    assert update.tolist() == list(range(9))
    assert residual.tolist() == [1] * 9


def test_the_residual_of_a_sparse_encoding_is_what_was_not_sent() -> None:
    vector = np.random.default_rng(1).standard_normal(TILE + 3, dtype=np.float32)
    sent = compress(vector, None, Encoding("fp32_sparse", keep_ratio=0.01))
    decoded = decode(sent.payload, name="fp32_sparse", length=vector.size)
    assert sent.residual is not None
    assert np.array_equal(sent.residual, np.where(decoded == 0, vector, 0))


def test_nan_is_refused() -> None:
    with pytest.raises(CodecError) as refused:
        compress(np.ones(2, np.float32), np.array([1, np.nan], np.float32), Encoding("int8"))
    assert refused.value.reason == "non_finite"
