"""The files of private tensors in a client's folder: which update and which models they belong to, and damage."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedring.client.transfer.private import KEEP_MODELS, Line, PrivateState, PrivateValues
from fedring.client.transfer.spool import Spool
from fedring.codec.digest import name_of, update_name
from fedring.train.state import schema_of
from fedring.v1 import federation_pb2 as pb

LINE = Line("run", bytes(32), (0, 0))


def values(number: float, line: Line = LINE) -> PrivateValues:
    """Return private values in two dtypes."""
    tensors = {"weight": torch.full((2,), number, dtype=torch.bfloat16), "steps": torch.tensor(7)}
    module = nn.Module()
    for name, tensor in tensors.items():
        module.register_buffer(name, tensor)
    return PrivateValues(line, schema_of(module), tensors)


def spool(folder: Path, number: float, round_: int, line: Line = LINE) -> Spool:
    """Spool an update of a round with private values."""
    header = pb.UpdateHeader(run_id="run", round=round_, total_bytes=3, schema_hash=line.model).SerializeToString()
    digest = name_of(b"abc")
    offer = pb.UpdateOffer(header=header, payload_digest=digest, name=update_name(header, digest))
    spool = Spool(folder)
    spool.write(offer, [b"abc"], None, private=values(number, line))
    return spool


def kept(folder: Path, line: Line = LINE) -> float | None:
    """Return the first private value that a new process reads."""
    found = PrivateState(folder).load(line, values(0.0).schema)
    return None if found is None else float(found.tensors["weight"][0])


def test_private_values_become_the_client_s_when_their_update_is_accepted(tmp_path: Path) -> None:
    PrivateState(tmp_path).begin(values(1.0))
    spool(tmp_path, 2.0, 1)
    assert kept(tmp_path) == 1.0
    again = Spool(tmp_path)  # of another process
    pending = again.pending()
    assert pending is not None
    assert (pending.has_private, pending.leaves) == (True, False)
    again.accept(pending)
    again.accept(pending)  # it was killed before it had dropped the update
    assert kept(tmp_path) == 2.0


@pytest.mark.parametrize(
    "other", [{"run_id": "another run"}, {"model": b"another" * 4}, {"after": (0, 1)}, {"after": (1, 2)}]
)
def test_private_values_of_another_line_of_models_are_not_used(tmp_path: Path, other: dict[str, Any]) -> None:
    line = Line("run", bytes(32), (0, 2))
    PrivateState(tmp_path).begin(values(1.0, line))
    assert kept(tmp_path, line) == 1.0
    assert kept(tmp_path, replace(line, **other)) is None


def test_private_values_of_several_models_are_kept_side_by_side_and_the_oldest_are_dropped(tmp_path: Path) -> None:
    lines = [Line("run", bytes([number] * 32), (0, 0)) for number in range(KEEP_MODELS + 1)]
    state = PrivateState(tmp_path)
    for number, line in enumerate(lines):
        state.begin(values(float(number), line))
        os.utime(newest(tmp_path), (number, number))
    assert [kept(tmp_path, line) for line in lines] == [None, *map(float, range(1, KEEP_MODELS + 1))]
    spooled = spool(tmp_path, 99.0, 1, lines[1])
    pending = spooled.pending()
    assert pending is not None
    spooled.accept(pending)
    assert (kept(tmp_path, lines[1]), kept(tmp_path, lines[2])) == (99.0, 2.0)


@pytest.mark.parametrize("damage", ["empty", "cut", "of another update"])
def test_damaged_private_values_of_an_accepted_update_leave_those_before_it(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    PrivateState(tmp_path).begin(values(1.0))
    file = tmp_path / "update.private"
    if damage == "of another update":
        spool(tmp_path, 9.0, 8)
        other = file.read_bytes()
        spool(tmp_path, 2.0, 1)
        file.write_bytes(other)
    else:
        spool(tmp_path, 2.0, 1)
        os.truncate(file, 0 if damage == "empty" else file.stat().st_size - 1)
    again = Spool(tmp_path)
    pending = again.pending()
    assert pending is not None
    again.accept(pending)
    assert kept(tmp_path) == 1.0
    assert not file.exists()
    assert [record.message for record in caplog.records if "are lost, and those before it stay" in record.message]
    assert Spool(tmp_path).pending() is None


def newest(folder: Path) -> Path:
    """Return the file of private values that was written last."""
    return max(folder.glob("private-*.safetensors"), key=lambda path: path.stat().st_mtime_ns)


def test_private_values_of_an_update_that_is_refused_or_replaced_are_dropped(tmp_path: Path) -> None:
    PrivateState(tmp_path).begin(values(1.0))
    spool(tmp_path, 2.0, 1).drop()
    assert not (tmp_path / "update.private").exists()
    assert kept(tmp_path) == 1.0
    spool(tmp_path, 3.0, 2)
    newest = spool(tmp_path, 4.0, 3)
    pending = newest.pending()
    assert pending is not None
    newest.accept(pending)
    assert kept(tmp_path) == 4.0
    assert not (tmp_path / "update.private").exists()


def test_private_values_of_a_pending_update_outlive_the_first_ones_of_another_job(tmp_path: Path) -> None:
    """A model of another job is evaluated while the update is still to be delivered."""
    PrivateState(tmp_path).begin(values(1.0))
    pending = spool(tmp_path, 2.0, 1)
    other = Line("run", b"another" * 4, (0, 0))
    pending.private.begin(values(3.0, other))
    spooled = Spool(tmp_path).pending()
    assert spooled is not None
    Spool(tmp_path).accept(spooled)
    assert kept(tmp_path) == 2.0


@pytest.mark.parametrize("damage", [b"", b"\x08\0\0\0\0\0\0\0{}      ", b"damaged"])
def test_damaged_private_values_are_not_used(tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    PrivateState(tmp_path).begin(values(1.0))
    (file,) = tmp_path.glob("private-*.safetensors")
    file.write_bytes(damage)
    assert kept(tmp_path) is None
    assert kept(tmp_path) is None


def test_values_of_other_private_tensors_are_not_used(tmp_path: Path) -> None:
    state = PrivateState(tmp_path)
    state.begin(values(1.0))
    assert state.load(LINE, schema_of(nn.Linear(2, 2))) is None
