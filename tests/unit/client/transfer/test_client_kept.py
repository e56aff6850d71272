"""What updates leave in a client's folder: which update, model and client it belongs to, and damage."""

import os
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.kept import kept_file, sections_in
from torch import nn

from fedring.client.transfer.kept import KEEP_LINES, KeptFiles, KeptState, Section
from fedring.client.transfer.own_values import PERSONAL, PRIVATE, Line, section_of, values_in
from fedring.client.transfer.spool import Spool
from fedring.codec.digest import name_of, update_name
from fedring.codec.schema import Schema
from fedring.train.tensors.state import schema_of
from fedring.v1 import federation_pb2 as pb

LINE = Line("run", bytes(32), (0, 0))
CLIENT = "alice"
_MODULE = nn.Module()
_MODULE.register_buffer("weight", torch.zeros(2, dtype=torch.bfloat16))
_MODULE.register_buffer("steps", torch.tensor(7))
SCHEMA = schema_of(_MODULE)


def private(number: float, line: Line = LINE) -> Section:
    """Return private values in two dtypes."""
    return section_of(
        line, SCHEMA, {"weight": torch.full((2,), number, dtype=torch.bfloat16), "steps": torch.tensor(7)}
    )


def spool(folder: Path, number: float, round_: int, line: Line = LINE, **others: Section) -> Spool:
    """Spool an update of a round with private values."""
    header = pb.UpdateHeader(run_id="run", round=round_, total_bytes=3, schema_hash=line.model).SerializeToString()
    digest = name_of(b"abc")
    offer = pb.UpdateOffer(header=header, payload_digest=digest, name=update_name(header, digest))
    spool = Spool(folder, CLIENT)
    spool.write(offer, [b"abc"], KeptState(line.key, {PRIVATE: private(number, line), **others}), durable=True)
    return spool


def begin(folder: Path, number: float, line: Line = LINE) -> None:
    """Keep first values, without an update."""
    KeptFiles(folder, CLIENT).put(line.key, {PRIVATE: private(number, line)})


def kept(folder: Path, line: Line = LINE, client: str = CLIENT, schema: Schema = SCHEMA) -> float | None:
    """Return the first private value that a new process reads."""
    found = values_in(KeptFiles(folder, client).load(line.key), PRIVATE, line, schema)
    return None if found is None else float(found["weight"][0])


def accept(folder: Path) -> Spool:
    """Accept the update in the spool in a new process."""
    again = Spool(folder, CLIENT)
    pending = again.pending()
    assert pending is not None
    again.accept(pending)
    return again


def test_what_an_update_leaves_is_kept_when_it_is_accepted(tmp_path: Path) -> None:
    begin(tmp_path, 1.0)
    spool(tmp_path, 2.0, 1)
    assert kept(tmp_path) == 1.0
    again = Spool(tmp_path, CLIENT)  # of another process
    pending = again.pending()
    assert pending is not None
    again.accept(pending)
    again.accept(pending)  # it was killed before it had dropped the update
    assert kept(tmp_path) == 2.0


def test_all_sections_of_an_update_count_with_one_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begin(tmp_path, 1.0)
    control = Section({"values": torch.arange(4.0)}, {"line": "0.1"})
    spool(tmp_path, 2.0, 1, scaffold=control, personal=private(3.0))
    renames: list[set[str]] = []
    rename = Path.rename

    def see(path: Path, target: Path) -> Path:
        renames.append(set(sections_in(kept_file(tmp_path))))
        found = rename(path, target)
        renames.append(set(sections_in(kept_file(tmp_path))))
        return found

    monkeypatch.setattr(Path, "rename", see)
    accept(tmp_path)
    assert renames == [{PRIVATE}, {PRIVATE, "scaffold", PERSONAL}]
    found = KeptFiles(tmp_path, CLIENT).load(LINE.key)
    assert torch.equal(found["scaffold"].tensors["values"], torch.arange(4.0))
    assert found["scaffold"].words == {"line": "0.1"}


@pytest.mark.parametrize(
    "other", [{"run_id": "another run"}, {"model": b"another" * 4}, {"after": (0, 1)}, {"after": (1, 2)}]
)
def test_private_values_of_another_line_of_models_are_not_used(tmp_path: Path, other: dict[str, Any]) -> None:
    line = Line("run", bytes(32), (0, 2))
    begin(tmp_path, 1.0, line)
    assert kept(tmp_path, line) == 1.0
    assert kept(tmp_path, replace(line, **other)) is None


def test_lines_of_models_are_kept_side_by_side_and_the_oldest_are_dropped(tmp_path: Path) -> None:
    lines = [Line("run", bytes([number] * 32), (0, 0)) for number in range(KEEP_LINES + 1)]
    for number, line in enumerate(lines):
        begin(tmp_path, float(number), line)
        newest = kept_file(tmp_path)
        assert newest is not None
        os.utime(newest, (number, number))
    assert [kept(tmp_path, line) for line in lines] == [None, *map(float, range(1, KEEP_LINES + 1))]
    spool(tmp_path, 99.0, 1, lines[1])
    accept(tmp_path)
    assert (kept(tmp_path, lines[1]), kept(tmp_path, lines[2])) == (99.0, 2.0)


@pytest.mark.parametrize("damage", ["empty", "cut", "of another update", "a bit"])
def test_damage_to_what_an_accepted_update_leaves_leaves_what_was_kept_before(
    tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    begin(tmp_path, 1.0)
    file = tmp_path / "update.left"
    if damage == "of another update":
        spool(tmp_path, 9.0, 8)
        other = file.read_bytes()
        spool(tmp_path, 2.0, 1)
        file.write_bytes(other)
    elif damage == "a bit":
        spool(tmp_path, 2.0, 1)
        flip(file, 8 * (file.stat().st_size - 1))
    else:
        spool(tmp_path, 2.0, 1)
        os.truncate(file, 0 if damage == "empty" else file.stat().st_size - 1)
    accept(tmp_path)
    assert kept(tmp_path) == 1.0
    assert not file.exists()
    assert caplog.text.count("what was kept before it stays") == 1
    assert Spool(tmp_path, CLIENT).pending() is None


def test_what_an_update_leaves_that_is_refused_or_replaced_is_dropped(tmp_path: Path) -> None:
    begin(tmp_path, 1.0)
    spool(tmp_path, 2.0, 1).drop()
    assert not (tmp_path / "update.left").exists()
    assert kept(tmp_path) == 1.0
    spool(tmp_path, 3.0, 2)
    spool(tmp_path, 4.0, 3)
    accept(tmp_path)
    assert kept(tmp_path) == 4.0
    assert not (tmp_path / "update.left").exists()


def test_what_a_pending_update_leaves_outlives_the_first_values_of_another_job(tmp_path: Path) -> None:
    """A model of another job is evaluated while the update is still to be delivered."""
    begin(tmp_path, 1.0)
    pending = spool(tmp_path, 2.0, 1)
    other = Line("run", b"another" * 4, (0, 0))
    pending.kept.put(other.key, {PRIVATE: private(3.0, other)})
    accept(tmp_path)
    assert (kept(tmp_path), kept(tmp_path, other)) == (2.0, 3.0)


@pytest.mark.parametrize("damage", [b"", b"\x08\0\0\0\0\0\0\0{}      ", b"damaged"])
def test_a_damaged_file_is_dropped_and_counted(tmp_path: Path, damage: bytes, caplog: pytest.LogCaptureFixture) -> None:
    begin(tmp_path, 1.0)
    file = kept_file(tmp_path)
    assert file is not None
    file.write_bytes(damage)
    dropped: list[None] = []
    assert KeptFiles(tmp_path, CLIENT, lambda: dropped.append(None)).load(LINE.key) == {}
    assert (len(dropped), file.exists()) == (1, False)
    assert caplog.text.count("nothing is left of past updates") == 1
    assert kept(tmp_path) is None


def test_each_bit_that_flips_is_noticed_or_changes_nothing(tmp_path: Path) -> None:
    begin(tmp_path, 1.0)
    file = kept_file(tmp_path)
    assert file is not None
    sound, bits = file.read_bytes(), 8 * file.stat().st_size
    for place in random.Random(1).sample(range(bits), 400):
        file.write_bytes(sound)
        flip(file, place)
        assert kept(tmp_path) in (None, 1.0)
        assert not file.exists() or kept(tmp_path) == 1.0


def test_another_clients_file_is_dropped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    begin(tmp_path, 1.0)
    assert kept(tmp_path, client="bob") is None
    assert "it belongs to the client 'alice'" in caplog.text
    assert kept_file(tmp_path) is None


def test_a_file_under_the_name_of_another_line_is_not_used(tmp_path: Path) -> None:
    other = Line("run", b"another" * 4, (0, 0))
    begin(tmp_path, 1.0)
    first = kept_file(tmp_path)
    begin(tmp_path, 2.0, other)
    second = kept_file(tmp_path)
    assert first is not None
    assert second is not None
    shutil.copy(second, first)
    assert KeptFiles(tmp_path, CLIENT).load(LINE.key) == {}


def test_values_of_other_private_tensors_are_not_used(tmp_path: Path) -> None:
    begin(tmp_path, 1.0)
    assert kept(tmp_path, schema=schema_of(nn.Linear(2, 2))) is None


def test_a_section_is_forgotten_without_the_others(tmp_path: Path) -> None:
    files = KeptFiles(tmp_path, CLIENT)
    files.put(LINE.key, {PRIVATE: private(1.0), PERSONAL: private(2.0)})
    assert files.forget(LINE.key, PERSONAL)
    assert not files.forget(LINE.key, PERSONAL)
    assert (set(KeptFiles(tmp_path, CLIENT).load(LINE.key)), kept(tmp_path)) == ({PRIVATE}, 1.0)


def flip(file: Path, bit: int) -> None:
    """Flip one bit of a file."""
    data = bytearray(file.read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    file.write_bytes(data)


def test_values_that_were_checked_stay_when_their_file_changes(tmp_path: Path) -> None:
    begin(tmp_path, 3.0)
    section = KeptFiles(tmp_path, CLIENT).load(LINE.key)[PRIVATE]
    path = kept_file(tmp_path)
    assert path is not None
    data = path.read_bytes()
    with path.open("r+b") as file:
        file.write(data[:-20] + bytes(20))
    values = values_in({PRIVATE: section}, PRIVATE, LINE, SCHEMA)
    assert values is not None
    assert float(values["weight"][0]) == 3.0
    assert int(values["steps"]) == 7


def test_what_a_killed_process_was_writing_is_deleted(tmp_path: Path) -> None:
    begin(tmp_path, 1.0)
    for name in ("kept.part", ".tmpt1Fs7H"):  # safetensors writes to names like the second one
        (tmp_path / name).write_bytes(b"half of the private values")
    assert kept(tmp_path) == 1.0
    assert sorted(path.name for path in tmp_path.iterdir()) == [kept_file(tmp_path).name]  # type: ignore[union-attr]  # there is one


def test_what_a_precious_update_leaves_has_a_durable_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[Path] = []
    monkeypatch.setattr("fedring.client.transfer.kept.sync", synced.append)
    spool(tmp_path, 2.0, 1)
    assert synced == [tmp_path / "update.left", tmp_path]


def test_a_client_whose_folder_cannot_be_synced_does_not_go_on_with_what_it_had_read_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(tmp_path, 1.0)
    mine = spool(tmp_path, 2.0, 1)
    assert mine.kept.load(LINE.key)[PRIVATE].tensors["weight"][0] == 1.0
    pending = mine.pending()
    assert pending is not None
    real = os.fsync

    def failing(fd: int) -> None:
        if Path(f"/proc/self/fd/{fd}").readlink() == tmp_path.resolve():
            raise OSError("the disk lost a name")
        real(fd)

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing)
        with pytest.raises(OSError, match="lost a name"):
            mine.accept(pending)
    assert mine.kept.load(LINE.key)[PRIVATE].tensors["weight"][0] == kept(tmp_path) == 2.0
    mine.accept(pending)
    assert mine.pending() is None
    assert kept(tmp_path) == 2.0
