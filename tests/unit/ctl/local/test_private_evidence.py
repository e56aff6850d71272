"""The search of `flctl try private` finds updates where they can be read, and no others."""

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from fedring.ctl.local.private_demo import as_read
from fedring.ctl.local.private_evidence import Evidence, gather
from fedring.secure.masks import mask, masked_packet, wrap

SIZE, BITS = 20_000, 7
MODEL = np.random.default_rng(1).normal(size=SIZE).astype(np.float32)
UPDATE = np.random.default_rng(2).normal(size=SIZE).astype(np.float32)
LEVELS = np.rint(2 * UPDATE).astype(np.int64)
KEY = (3, "client-0")


@pytest.fixture
def state(tmp_path: Path) -> Path:
    """Make a state folder with a published model."""
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "model").write_bytes(MODEL.tobytes())
    return tmp_path


def search(state: Path, words: NDArray[np.uint8]) -> Evidence:
    payload = b"".join(map(bytes, masked_packet(words, BITS)))
    (state / "blobs" / "update").write_bytes(payload)
    return gather(state, {KEY: as_read(payload)}, {KEY: UPDATE}, {KEY: MODEL + UPDATE}, MODEL)


def masked() -> NDArray[np.uint8]:
    return (wrap(LEVELS, BITS) + mask(bytes(range(32)), BITS, 0, SIZE)).astype(np.uint8)


def test_a_masked_update_says_nothing(state: Path) -> None:
    found = search(state, masked())
    assert not found.readable
    assert (found.files, found.stored, found.update_passages, found.model_passages) == (2, 1, 0, 64)
    assert found.entropy > 7.9


def test_an_update_without_its_mask_is_noticed(state: Path) -> None:
    words = wrap(LEVELS, BITS).astype(np.uint8)
    found = search(state, words)
    assert found.readable
    assert found.correlation > 0.9
    assert np.array_equal(as_read(b"".join(map(bytes, masked_packet(words, BITS)))).values, LEVELS)


@pytest.mark.parametrize("values", [UPDATE, MODEL + UPDATE], ids=["update", "trained"])
def test_plain_values_anywhere_in_the_folder_are_noticed(state: Path, values: NDArray[np.float32]) -> None:
    (state / "partial").mkdir()
    (state / "partial" / "3-client-0").write_bytes(b"x" + values.tobytes())
    found = search(state, masked())
    assert found.readable
    assert found.update_passages == 64


def test_parameters_that_training_did_not_change_are_no_update(state: Path) -> None:
    update = UPDATE.copy()
    update[: SIZE // 2] = 0
    assert not gather(state, {}, {KEY: update}, {KEY: MODEL + update}, MODEL).readable
