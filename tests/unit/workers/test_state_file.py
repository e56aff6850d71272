"""Files of tensors: what is written is read, and nothing else is."""

import errno
import json
import struct
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fedring.train.errors import TrainError
from fedring.workers.state_file import TensorFile, pieces, write_tensors

TENSORS = {
    "weight": torch.arange(6.0).view(2, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "count": torch.tensor(7),
    "none": torch.empty(0, 4),
    "mask": torch.tensor([True, False]),
}


@pytest.mark.parametrize("step", ["replace", "open"])
def test_a_disk_that_refuses_a_file_leaves_the_one_before_and_nothing_else(
    path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise OSError(errno.EDQUOT, "no quota is left")

    before = path.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(Path, step, refuse)
        with pytest.raises(TrainError, match="cannot be written") as caught:
            write_tensors(path, {"weight": torch.ones(2)}, {})
    assert caught.value.reason == "disk_failed"
    assert [(entry.name, entry.read_bytes()) for entry in path.parent.iterdir()] == [("file", before)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    write_tensors(tmp_path / "file", TENSORS, {"step": "3"})
    return tmp_path / "file"


def test_a_file_gives_back_its_tensors_and_is_a_safetensors_file(path: Path) -> None:
    with TensorFile(path) as file:
        assert (file.metadata, list(file.tensors)) == ({"step": "3"}, list(TENSORS))
        for name, expected in TENSORS.items():
            tensor = torch.empty_like(expected)
            file.read_into(name, tensor)
            assert torch.equal(tensor, expected)
    assert torch.equal(load_file(path)["weight"], TENSORS["weight"])
    assert [entry.name for entry in path.parent.iterdir()] == ["file"]


def test_a_flipped_bit_in_any_byte_is_noticed(path: Path) -> None:
    whole, missed = path.read_bytes(), list[bytes]()
    for place in range(len(whole)):
        data = bytearray(whole)
        data[place] ^= 1 << place % 8
        path.write_bytes(data)
        with suppress(TrainError), TensorFile(path) as file:
            file.check()
            missed.append(bytes(data))
    # Only the digest's name may be another one: then it is a text like others.
    assert all(b'"blake3":' not in data for data in missed)
    path.write_bytes(whole)
    with TensorFile(path) as file:
        file.check()


def test_a_file_of_1_0_0_which_has_no_digest_can_be_read(path: Path) -> None:
    save_file({"weight": torch.ones(2)}, path, metadata={"step": "3"})
    tensor = torch.zeros(2)
    with TensorFile(path) as file:
        file.check()
        file.read_into("weight", tensor)
    assert torch.equal(tensor, torch.ones(2))


def test_a_tensor_that_is_not_contiguous_is_filled_too(path: Path) -> None:
    tensor = torch.zeros(3, 2).t()
    with TensorFile(path) as file:
        file.read_into("weight", tensor)
    assert torch.equal(tensor, TENSORS["weight"])


@pytest.mark.parametrize(
    ("name", "tensor"),
    [("missing", torch.empty(1)), ("weight", torch.empty(3, 2)), ("weight", torch.empty(2, 3, dtype=torch.float64))],
)
def test_a_tensor_of_another_name_shape_or_dtype_is_refused(path: Path, name: str, tensor: Tensor) -> None:
    with TensorFile(path) as file, pytest.raises(TrainError, match=f"{name} must be"):
        file.read_into(name, tensor)


def test_a_disk_that_is_full_is_named_and_nothing_is_left_on_it(tmp_path: Path) -> None:
    (tmp_path / "file.part").symlink_to("/dev/full")
    with pytest.raises(TrainError, match=r"file\.part cannot be written: No space left on device") as caught:
        write_tensors(tmp_path / "file", TENSORS, {})
    assert caught.value.reason == "disk_failed"
    assert list(tmp_path.iterdir()) == []


def test_a_value_that_is_not_finite_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path / "file", {"weight": torch.tensor([1.0, torch.nan])}, {})
    with TensorFile(tmp_path / "file") as file, pytest.raises(TrainError, match="not finite"):
        file.read_into("weight", torch.empty(2))


def row(**changes: object) -> dict[str, object]:
    return {"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4], **changes}}


@pytest.mark.parametrize(
    "header",
    [
        [],
        row(dtype="F99"),
        row(shape=[-1]),
        row(shape=[True]),
        row(shape=[1 << 40], data_offsets=[0, 1 << 42]),
        row(data_offsets=[4, 8]),
        {"w": 3},
        {"__metadata__": 3},
        3,
    ],
)
def test_a_header_that_does_not_fit_the_file_is_refused(tmp_path: Path, header: object) -> None:
    text = json.dumps(header).encode()
    (tmp_path / "file").write_bytes(struct.pack("<Q", len(text)) + text + b"1234")
    with pytest.raises(TrainError) as caught:
        TensorFile(tmp_path / "file")
    assert caught.value.reason == "bad_checkpoint"


@pytest.mark.parametrize("cut", [0, 4, 8, 40, -1])
def test_a_file_that_was_cut_short_is_refused(path: Path, cut: int) -> None:
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(TrainError, match="header cannot be used"):
        TensorFile(path)


def test_a_length_beyond_the_file_is_not_read(path: Path) -> None:
    path.write_bytes(struct.pack("<Q", 1 << 62) + b"{}")
    with pytest.raises(TrainError, match="a length of"):
        TensorFile(path)


def test_pieces_have_all_values_in_order() -> None:
    tensor = torch.arange(200_000, dtype=torch.float64).view(2, -1)
    parts = list(pieces(tensor, torch.float32))
    assert len(parts) > 1
    assert torch.equal(torch.cat(parts), tensor.view(-1).float())
