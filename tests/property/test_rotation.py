"""The rotation keeps norms, is undone, and works piece by piece."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import hadamard

from fedring.privacy.rotation import Rotation

SEED = b"a seed of the round"


@settings(max_examples=40, deadline=None)
@given(block=st.sampled_from([8, 16, 128, 1024]), blocks=st.integers(0, 9), first=st.integers(0, 9), seed=st.binary())
def test_a_rotation_is_undone_and_keeps_norms(block: int, blocks: int, first: int, seed: bytes) -> None:
    values = np.random.default_rng(blocks).standard_normal(block * blocks)
    rotated = values.copy()
    rotation = Rotation(seed, block)
    rotation.apply(rotated, first * block)
    assert np.linalg.norm(rotated) == pytest.approx(np.linalg.norm(values))
    rotation.undo(rotated, first * block)
    assert np.allclose(rotated, values, atol=1e-12)


def test_a_piece_is_rotated_as_it_is_in_the_whole() -> None:
    rotation = Rotation(SEED, 1024)
    whole = np.random.default_rng(0).standard_normal(400 * 1024)
    rotated = whole.copy()
    rotation.apply(rotated, 0)
    for start, stop in ((0, 1), (1, 2), (127, 130), (399, 400)):
        piece = whole[start * 1024 : stop * 1024].copy()
        rotation.apply(piece, start * 1024)
        assert np.array_equal(piece, rotated[start * 1024 : stop * 1024])


def test_a_block_is_multiplied_with_signs_and_the_hadamard_matrix() -> None:
    rotation = Rotation(SEED, 64)
    columns = np.eye(64)
    for column in columns:
        rotation.apply(column, 640)
    signs = columns[:, 0] * 8.0  # the matrix's first row is ones
    assert set(np.round(signs, 9)) == {-1.0, 1.0}
    assert np.allclose(columns, signs[:, None] * hadamard(64) / 8.0)


def test_the_energy_of_one_value_is_spread_over_its_block() -> None:
    values = np.zeros(8192)
    values[5000] = 1.0
    Rotation(SEED, 4096).apply(values, 0)
    assert np.allclose(np.abs(values), np.repeat([0.0, 1 / 64], 4096))


def test_signs_are_even_and_depend_on_the_seed_and_the_place() -> None:
    signs = [Rotation(seed, 8)._sign(start, 80_000) for seed in (SEED, b"another") for start in (0, 80_000)]
    for index, one in enumerate(signs):
        assert abs(one.mean()) < 0.03
        assert all(abs(np.dot(one, other)) < 0.03 * len(one) for other in signs[:index])


@pytest.mark.parametrize("block", [0, 4, 12, -8])
def test_a_block_that_is_no_power_of_two_is_refused(block: int) -> None:
    with pytest.raises(ValueError, match="is not a power of two"):
        Rotation(SEED, block)


@pytest.mark.parametrize(("start", "count"), [(4, 8), (8, 12)])
def test_a_piece_that_is_not_whole_blocks_is_refused(start: int, count: int) -> None:
    for method in (Rotation(SEED, 8).apply, Rotation(SEED, 8).undo):
        with pytest.raises(ValueError, match="are not whole blocks"):
            method(np.zeros(count), start)
