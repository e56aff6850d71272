"""A model as a schema, as vectors and as files."""

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import fedring.train
from fedring.codec.schema import Schema, Vectors
from fedring.train.errors import SeamError
from fedring.train.models import digits_mlp
from fedring.train.tensors.files import load_model, save_model, save_vectors
from fedring.train.tensors.state import read_vectors, schema_of, write_vectors


class Tied(nn.Module):
    """Two layers that share a weight, a buffer of integers, and a buffer that is not in the state dict."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.norm = nn.BatchNorm1d(3)
        self.second = nn.Linear(3, 3, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scratch", torch.zeros(5), persistent=False)


def test_the_schema_follows_the_state_dict_and_counts_a_tied_tensor_once() -> None:
    entries = [(e.name, e.shape, e.dtype, e.role) for e in schema_of(Tied()).entries]
    assert entries == [
        ("first.weight", (3, 3), "float32", "parameter"),
        ("first.bias", (3,), "float32", "parameter"),
        ("norm.weight", (3,), "float32", "parameter"),
        ("norm.bias", (3,), "float32", "parameter"),
        ("norm.running_mean", (3,), "float32", "buffer"),
        ("norm.running_var", (3,), "float32", "buffer"),
        ("norm.num_batches_tracked", (), "int64", "buffer"),
    ]


def test_vectors_read_from_one_model_and_written_to_another_make_them_equal() -> None:
    model, other = Tied(), Tied()
    model.norm(torch.randn(4, 3))
    write_vectors(other, schema_of(model), read_vectors(model))
    for mine, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)
    assert other.second.weight is other.first.weight
    assert int(other.norm.num_batches_tracked or 0) == 1


def test_read_vectors_are_copies_in_row_major_order() -> None:
    model = nn.Conv2d(2, 2, 2, bias=False).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    vectors = read_vectors(model)
    assert vectors.parameters.dtype == np.float32
    assert vectors.buffers.dtype == np.float64
    np.testing.assert_array_equal(vectors.parameters, model.weight.detach().contiguous().flatten().numpy())
    before = vectors.parameters.copy()
    model.weight.data.zero_()
    np.testing.assert_array_equal(vectors.parameters, before)


def test_values_are_cast_to_the_dtype_of_each_tensor_and_integers_are_rounded() -> None:
    model = Tied().half()
    schema = schema_of(model)
    vectors = Vectors(np.full(schema.num_parameters, 1 / 3, np.float32), np.full(schema.num_buffers, 2.6))
    write_vectors(model, schema, vectors)
    assert model.first.weight.dtype == torch.float16
    assert model.first.weight[0, 0].item() == pytest.approx(1 / 3, rel=1e-3)
    assert int(model.norm.num_batches_tracked or 0) == 3


def test_integers_that_float32_cannot_hold_are_kept_exactly() -> None:
    model = nn.BatchNorm1d(1)
    model.num_batches_tracked = torch.tensor(2**53 - 1)
    vectors = read_vectors(model)
    model.num_batches_tracked.zero_()
    write_vectors(model, schema_of(model), vectors)
    assert int(model.num_batches_tracked) == 2**53 - 1


def test_read_only_vectors_can_be_written_to_a_model() -> None:
    model = nn.Linear(2, 1)
    frozen = np.frombuffer(np.arange(3, dtype=np.float32).tobytes(), np.float32)
    write_vectors(model, schema_of(model), Vectors(frozen, np.zeros(0)))
    assert model.weight.tolist() == [[0.0, 1.0]]
    assert model.bias.tolist() == [2.0]


def test_vectors_of_another_model_are_refused_with_the_difference() -> None:
    model, other = nn.Linear(2, 1), nn.Linear(3, 1)
    with pytest.raises(SeamError, match=r"weight float32\[1, 3\]") as caught:
        write_vectors(model, schema_of(other), read_vectors(other))
    assert caught.value.reason == "wrong_schema"
    with pytest.raises(SeamError, match="parameter vector"):
        write_vectors(model, schema_of(model), read_vectors(other))


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.complex64), torch.zeros(2, dtype=torch.int32)])
def test_parameters_that_cannot_be_averaged_are_refused(tensor: torch.Tensor) -> None:
    model = nn.Module()
    model.register_parameter("odd", nn.Parameter(tensor, requires_grad=False))
    with pytest.raises(SeamError, match="odd") as caught:
        schema_of(model)
    assert caught.value.reason == "unsupported_dtype"


def test_a_parameter_without_a_shape_is_refused() -> None:
    with pytest.raises(SeamError) as caught:
        schema_of(nn.LazyLinear(2))
    assert caught.value.reason == "lazy_parameter"


@pytest.mark.parametrize("suffix", ["safetensors", "pt", ""])
def test_a_saved_model_loads_again_whatever_its_file_is_called(tmp_path: Path, suffix: str) -> None:
    model, other = Tied(), Tied()
    path = tmp_path / f"model.{suffix}"
    if suffix == "pt":
        torch.save(model.state_dict(), path)
    else:
        save_model(model, path)
    assert fedring.train.load_model(str(path), other) is other
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


def test_vectors_are_saved_in_the_dtypes_of_the_model(tmp_path: Path) -> None:
    model = Tied().to(torch.bfloat16)
    save_vectors(schema_of(model), read_vectors(model), tmp_path / "model.safetensors")
    stored = load_file(tmp_path / "model.safetensors")
    assert {name: t.dtype for name, t in stored.items()} == {
        e.name: getattr(torch, e.dtype) for e in schema_of(model).entries
    }
    assert torch.equal(stored["first.weight"], model.first.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["model.safetensors"]


def test_a_tied_tensor_is_found_under_its_other_name(tmp_path: Path) -> None:
    model = Tied()
    tensors = {name: t.clone() for name, t in model.state_dict().items() if name != "first.weight"}
    tensors["second.weight"].fill_(9)
    save_file(tensors, tmp_path / "model.safetensors")
    assert load_model(tmp_path / "model.safetensors", model).state_dict()["first.weight"].eq(9).all()


@pytest.mark.parametrize(
    ("stored", "says"),
    [
        (nn.Linear(5, 1), r"weight is \[1, 5\] in the file and \[1, 2\] in the model"),
        (nn.Linear(2, 1, bias=False), "it has no tensor bias"),
        (digits_mlp(), "it has no tensor weight"),
        (nn.Bilinear(2, 2, 1), "weight is"),
    ],
)
def test_the_first_difference_is_named_and_nothing_is_changed(tmp_path: Path, stored: nn.Module, says: str) -> None:
    model = nn.Linear(2, 1)
    before = read_vectors(model).digest()
    save_model(stored, tmp_path / "model.safetensors")
    with pytest.raises(SeamError, match=says) as caught:
        load_model(tmp_path / "model.safetensors", model)
    assert caught.value.reason == "wrong_schema"
    assert read_vectors(model).digest() == before


def test_an_error_names_a_tensor_that_the_model_lacks(tmp_path: Path) -> None:
    save_model(nn.Linear(2, 1), tmp_path / "model.safetensors")
    with pytest.raises(SeamError, match="the model has no tensor bias"):
        load_model(tmp_path / "model.safetensors", nn.Linear(2, 1, bias=False))


class Evil:
    """An object whose unpickling would create a file."""

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (Path("evil"),)  # type: ignore[return-value]  # only pickle would call it


def test_loading_a_file_never_runs_its_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({"weight": Evil()}, "model.pt")
    with pytest.raises(SeamError) as caught:
        load_model("model.pt", nn.Linear(2, 1))
    assert caught.value.reason == "bad_file"
    assert not Path("evil").exists()


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04 not a zip", b"\x08\0\0\0\0\0\0\0{ broken", bytes(100)])
def test_a_file_that_holds_no_model_is_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(data)
    with pytest.raises(SeamError) as caught:
        load_model(path, nn.Linear(2, 1))
    assert caught.value.reason == "bad_file"


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(SeamError, match=r"none\.safetensors cannot be read") as caught:
        load_model(tmp_path / "none.safetensors", nn.Linear(2, 1))
    assert caught.value.reason == "no_file"


def test_a_model_without_tensors_is_empty() -> None:
    assert schema_of(nn.ReLU()) == Schema(())
    assert read_vectors(nn.ReLU()).parameters.shape == (0,)
