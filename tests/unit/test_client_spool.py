"""What is on disk between any two steps, and what it means to the process that finds it."""

import os
from pathlib import Path

import numpy as np
import pytest

from fedring.client.spool import Spool, Spooled
from fedring.v1 import federation_pb2 as pb

HASH = b"h" * 32


def write(spool: Spool, residual: float, *, run: str = "run", round_: int = 1) -> Spooled:
    header = pb.UpdateHeader(run_id=run, round=round_, schema_hash=HASH, total_bytes=6)
    return spool.write(header, [b"abc", b"def"], np.full(4, residual, np.float32))


def test_a_spool_can_be_read_back_in_parts(tmp_path: Path) -> None:
    write(Spool(tmp_path), 1.0)
    pending = Spool(tmp_path).pending()
    assert pending is not None
    with pending.reader() as read:
        assert read(2, 3) == b"cde"
    assert pending.header.round == 1


@pytest.mark.parametrize("size", [1, 7, 30, -1])
def test_a_spool_that_is_not_whole_is_dropped_and_the_residual_kept(tmp_path: Path, size: int) -> None:
    spool = Spool(tmp_path)
    spool.accept(write(spool, 1.0))
    write(spool, 2.0)
    update = tmp_path / "update"
    os.truncate(update, size if size > 0 else update.stat().st_size + size)
    again = Spool(tmp_path)
    assert again.pending() is None
    assert Spool(tmp_path).size == 0
    np.testing.assert_array_equal(again.residual("run", HASH), np.full(4, 1.0, np.float32))


def test_of_a_shorter_update_in_the_place_of_a_longer_one_nothing_of_that_is_left(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    header = pb.UpdateHeader(run_id="run", round=1, schema_hash=HASH, total_bytes=100)
    spool.accept(spool.write(header, [b"x" * 100], None))
    write(spool, 1.0, round_=2)
    pending = Spool(tmp_path).pending()
    assert pending is not None
    with pending.reader() as read:
        assert read(0, 100) == b"abcdef"


def test_an_update_whose_writing_did_not_end_is_none_and_neither_is_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def die(*args: object) -> None:
        raise KeyboardInterrupt

    spool = Spool(tmp_path)
    write(spool, 1.0)
    assert spool.size == (tmp_path / "update").stat().st_size
    monkeypatch.setattr(os, "pwrite", die)  # the last step
    with pytest.raises(KeyboardInterrupt):
        spool.write(pb.UpdateHeader(run_id="run", round=2, total_bytes=6), [b"ABC", b"DEF"], None)
    assert (Spool(tmp_path).pending(), spool.size) == (None, 0)


def test_nothing_is_pending_before_the_first_update_and_after_an_accepted_one(tmp_path: Path) -> None:
    spool = Spool(tmp_path)
    assert spool.pending() is None
    spool.accept(write(spool, 1.0))
    assert Spool(tmp_path).pending() is None


@pytest.mark.parametrize("taken", [True, False])
def test_a_death_after_the_residual_moved_keeps_it_whatever_the_server_says_then(tmp_path: Path, taken: bool) -> None:
    spool = Spool(tmp_path)
    spool.accept(write(spool, 1.0))
    write(spool, 2.0, round_=2)
    (tmp_path / "update.residual").rename(tmp_path / "residual.safetensors")
    again = Spool(tmp_path)
    pending = again.pending()
    assert pending is not None
    if taken:
        again.accept(pending)
    else:
        again.drop()
    np.testing.assert_array_equal(again.residual("run", HASH), np.full(4, 2.0, np.float32))


@pytest.mark.parametrize(("run", "schema"), [("other", HASH), ("run", b"x" * 32)])
def test_a_residual_of_another_run_or_model_is_dropped(tmp_path: Path, run: str, schema: bytes) -> None:
    spool = Spool(tmp_path)
    spool.accept(write(spool, 1.0))
    assert Spool(tmp_path).residual(run, schema) is None
    assert not (tmp_path / "residual.safetensors").exists()
