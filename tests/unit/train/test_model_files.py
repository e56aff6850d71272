"""Models as files: a reader sees a whole one, whoever else writes it, and a full disk is given its bytes back."""

import resource
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tests.unit.gate import Gate
from torch import nn

from fedring.train.models import vector
from fedring.train.tensors import files
from fedring.train.tensors.files import load_model, save_model

SIZE = 1000


def of(value: float) -> nn.Module:
    """Return a model whose values are all the same."""
    model = vector(SIZE)
    with torch.no_grad():
        for tensor in model.parameters():
            tensor.fill_(value)
    return model


def value_in(path: Path) -> float:
    """Return the value of a model in a file."""
    (tensor,) = load_model(path, vector(SIZE)).parameters()
    value = float(tensor[0].detach())
    assert torch.equal(tensor, torch.full((SIZE,), value))
    return value


@contextmanager
def room(size: int) -> Iterator[None]:
    """Let no file of this process become longer."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_disk_that_is_full_keeps_the_file_before_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_model(of(1.0), path)
    with room(SIZE), pytest.raises((OSError, SafetensorError)):
        save_model(of(2.0), path)
    assert (value_in(path), [entry.name for entry in tmp_path.iterdir()]) == (1.0, [path.name])


def test_two_who_write_the_same_file_at_once_leave_a_whole_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, gate = tmp_path / "model.safetensors", Gate()

    def slow(tensors: dict[str, Any], part: Path, **keys: Any) -> None:
        save_file(tensors, part, **keys)
        gate.pass_(threading.current_thread().name)

    monkeypatch.setattr(files, "save_file", slow)
    gate.close("the first")
    failed = list[Exception]()

    def write() -> None:
        try:
            save_model(of(1.0), path)
        except Exception as error:  # noqa: BLE001  # a thread's error is told here
            failed.append(error)

    first = threading.Thread(target=write, name="the first")
    first.start()
    assert gate.arrived()
    save_model(of(2.0), path)
    assert value_in(path) == 2.0
    gate.open()
    first.join()
    assert failed == []
    assert (value_in(path), [entry.name for entry in tmp_path.iterdir()]) == (1.0, [path.name])
