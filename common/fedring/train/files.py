"""Models as files: safetensors, state dicts that torch.save wrote, and the versions that an fl-server keeps."""

import pickle
import sqlite3
from contextlib import closing
from pathlib import Path
from zipfile import BadZipFile

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedring.codec.digest import Digest
from fedring.codec.schema import Schema, Vectors
from fedring.train.errors import SeamError
from fedring.train.state import tensors_of, values_of

_STEP = 1 << 20  # bytes that are read at a time


def load_model(source: str | Path | int, model: nn.Module, *, state_dir: str | Path = "fl-server-state") -> nn.Module:
    """`model`, filled from the file `source`; if a name or a shape differs, SeamError names it and nothing changes.

    A number is a version, 0 the newest, that the fl-server with this `state_dir` keeps; the server may be running.
    """
    path = _version(Path(state_dir), source) if isinstance(source, int) else Path(source)
    if isinstance(source, int):
        _check_digest(path)
    stored = read_tensors(path)
    names: dict[int, list[str]] = {}  # a tied tensor may be stored under any of its names
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    tensors = [tensor for _, tensor in tensors_of(model)]
    found = [next((n for n in names[id(tensor)] if n in stored), "") for tensor in tensors]
    if difference := _difference([(names[id(t)], t, n) for t, n in zip(tensors, found, strict=True)], stored):
        raise SeamError("wrong_schema", f"{path} does not fit the model: {difference}.")
    with torch.no_grad():
        for tensor, name in zip(tensors, found, strict=True):
            tensor.copy_(stored[name])
    return model


def read_tensors(path: Path) -> dict[str, Tensor]:
    """The tensors of the file by name; SeamError if it is neither safetensors nor a state dict of torch.save."""
    try:
        with path.open("rb") as file:
            is_safetensors = file.read(9)[8:] == b"{"  # a header of JSON after its length
        stored = load_file(path) if is_safetensors else torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise SeamError("no_file", f"{path} cannot be read: {error.strerror or error}.") from error
    except (SafetensorError, pickle.UnpicklingError, RuntimeError, EOFError, ValueError, BadZipFile) as error:
        raise SeamError("bad_file", f"{path} is neither a safetensors file nor a state dict of torch.save.") from error
    if not isinstance(stored, dict) or not all(isinstance(tensor, Tensor) for tensor in stored.values()):
        raise SeamError("bad_file", f"{path} holds something else than a state dict: save model.state_dict().")
    return stored


def keeps_a_model(state_dir: Path) -> bool:
    """Whether a model version lies in this state folder of an fl-server; False, too, where there is no such folder."""
    try:
        _version(state_dir, 0)
    except SeamError:
        return False
    return True


def save_model(model: nn.Module, path: str | Path) -> None:
    """Afterwards `path` is a safetensors file of the tensors of `model`, in their dtypes."""
    _write({name: tensor.detach() for name, tensor in tensors_of(model)}, Path(path))


def save_vectors(schema: Schema, vectors: Vectors, path: str | Path) -> None:
    """Afterwards `path` is a safetensors file of the model that `schema` and `vectors` describe, in its dtypes."""
    _write(
        {entry.name: values.to(getattr(torch, entry.dtype)) for entry, values in values_of(schema, vectors)}, Path(path)
    )


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    part = path.with_name(path.name + ".part")  # so that no reader meets half a file
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, metadata={"format": "pt"})
    part.replace(path)


def _version(state_dir: Path, version: int) -> Path:
    """The file of that model version in a server's state: safetensors, as fedring.server.model.modelfile writes it."""
    query = "SELECT blob FROM models WHERE ?1 IN (0, version) ORDER BY version DESC LIMIT 1"
    facts = (state_dir / "facts.sqlite").absolute()
    try:
        with closing(sqlite3.connect(f"{facts.as_uri()}?mode=ro", uri=True)) as database:
            found = database.execute(query, (version,)).fetchone()
    except sqlite3.Error as error:
        raise SeamError("no_state", f"{state_dir} is not the state folder of an fl-server: {error}.") from error
    if found is None:
        raise SeamError("unknown_model", f"{state_dir} keeps no model {version or 'yet'}.")
    return state_dir / "blobs" / str(found[0])


def _check_digest(blob: Path) -> None:
    """Return if the blob is what its name says."""
    digest = Digest(like=blob.name)
    try:
        with blob.open("rb", buffering=0) as file:
            while data := file.read(_STEP):
                digest.update(data)
    except OSError as error:
        raise SeamError("damaged_blob", f"{blob} cannot be read: {error.strerror or error}.") from error
    if digest.name != blob.name:
        raise SeamError("damaged_blob", f"{blob} is damaged: load another version, or restore a backup.")


def _difference(wanted: list[tuple[list[str], Tensor, str]], stored: dict[str, Tensor]) -> str:
    """One clause that names the first difference, if any."""
    for names, tensor, name in wanted:
        if not name:
            return f"it has no tensor {names[0]}"
        if stored[name].shape != tensor.shape:
            return f"{name} is {list(stored[name].shape)} in the file and {list(tensor.shape)} in the model"
    known = {name for names, _, _ in wanted for name in names}
    extra = next((name for name in stored if name not in known), "")
    return f"the model has no tensor {extra}" if extra else ""
