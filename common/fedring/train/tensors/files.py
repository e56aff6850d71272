"""Models as files.

They are safetensors, state dicts written by torch.save, and the model versions that an fl-server keeps.
"""

import sqlite3
from collections.abc import Container
from contextlib import closing, suppress
from pathlib import Path
from secrets import token_hex

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fedring.codec.digest import Digest
from fedring.codec.schema import Schema, Vectors
from fedring.train.errors import SeamError
from fedring.train.tensors.state import dtype_of, tensors_of, values_of

_READ_BYTES = 1 << 20  # read at a time


def load_model(
    source: str | Path | int,
    model: nn.Module,
    *,
    state_dir: str | Path = "fl-server-state",
    partial: bool = False,
) -> nn.Module:
    """Fill a model from a file or an fl-server's model version.

    Args:
        source: A file, safetensors or a state dict of torch.save; or the number of a model version, 0 for the newest.
        model: Takes the values, in its own dtypes. It is unchanged if an error is raised.
        state_dir: The state folder of the fl-server that keeps the version; the server may be running.
        partial: The file may hold a part of the model only, such as the shared tensors of a job; the rest keeps its
            values.

    Returns:
        The same model.

    Raises:
        SeamError: With the reason no_file or bad_file, if a file cannot be read; no_state, unknown_model or
            damaged_blob, if a version cannot be read; or wrong_schema, if a tensor's name or shape differs.
    """
    path = _version(Path(state_dir), source) if isinstance(source, int) else Path(source)
    # A file of the user's may be any file, but a version is named by its digest: a damaged one is noticed.
    if isinstance(source, int):
        _check_digest(path)
    fill_from(path, model, optional={name for name, _ in tensors_of(model)} if partial else ())
    return model


def fill_from(path: Path, model: nn.Module, *, optional: Container[str] = ()) -> None:
    """Fill a model from a file.

    Args:
        path: The file, safetensors or a state dict of torch.save.
        model: Takes the values, in its own dtypes. It is unchanged if an error is raised.
        optional: The tensors that the file may lack, by their names in the schema; they keep their values.

    Raises:
        SeamError: With the reason no_file or bad_file, if the file cannot be read; or wrong_schema, if a tensor's name
            or shape differs, or if the file has none of the model's tensors.
    """
    stored = read_tensors(path)
    names: dict[int, list[str]] = {}  # a tied tensor may be stored under any of its names
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(id(tensor), []).append(name)
    own = list(tensors_of(model))
    found = [next((n for n in names[id(tensor)] if n in stored), "") for _, tensor in own]
    wanted = [(names[id(t)], t, n) for (name, t), n in zip(own, found, strict=True) if n or name not in optional]
    difference = _difference(wanted, stored)
    if not difference and own and not any(found):
        difference = f"it has no tensor {own[0][0]}"
    if difference:
        raise SeamError("wrong_schema", f"{path} does not fit the model: {difference}.")
    with torch.no_grad():
        for (_, tensor), name in zip(own, found, strict=True):
            if name:
                tensor.copy_(stored[name])


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Return the tensors of a file by name, on the CPU.

    Code in the file is never run.

    Raises:
        SeamError: With the reason no_file, if it cannot be read, or bad_file, if it is neither safetensors nor a state
            dict of torch.save.
    """
    try:
        with path.open("rb") as file:
            is_safetensors = file.read(9)[8:] == b"{"  # after 8 bytes of length there is a header of JSON
        stored = load_file(path) if is_safetensors else torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise SeamError("no_file", f"{path} cannot be read: {error.strerror or error}.") from error
    except Exception as error:  # torch's reader of pickles raises whatever the damage leads to: IndexError, KeyError
        raise SeamError("bad_file", f"{path} is neither a safetensors file nor a state dict of torch.save.") from error
    if not isinstance(stored, dict) or not all(isinstance(tensor, Tensor) for tensor in stored.values()):
        raise SeamError("bad_file", f"{path} does not hold a state dict: save model.state_dict() into it.")
    return stored


def save_model(model: nn.Module, path: str | Path) -> None:
    """Write the tensors of `model` to the safetensors file `path`.

    They keep their dtypes. Readers never see half of the file.
    """
    _write({name: tensor.detach() for name, tensor in tensors_of(model)}, Path(path))


def save_vectors(schema: Schema, vectors: Vectors, path: str | Path) -> None:
    """Write a model's values to the safetensors file `path`.

    They are written in the dtypes of the schema.
    """
    _write({entry.name: values.to(dtype_of(entry.dtype)) for entry, values in values_of(schema, vectors)}, Path(path))


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    # Renamed at the end, so that no reader sees half a file. No other process that writes the same one has this name.
    part = path.with_name(f"{path.name}.{token_hex(8)}.part")
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part, metadata={"format": "pt"})
        part.replace(path)
    except BaseException:
        with suppress(OSError):
            part.unlink(missing_ok=True)  # which some versions of safetensors leave, on a full disk
        raise


def _version(state_dir: Path, version: int) -> Path:
    """Return the file of a model version in a server's state folder.

    fedring.server.aggregation.modelfile writes it.
    """
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
    """Check that the blob's content has the digest that is its name."""
    digest = Digest(like=blob.name)
    try:
        with blob.open("rb", buffering=0) as file:
            while data := file.read(_READ_BYTES):
                digest.update(data)
    except OSError as error:
        raise SeamError("damaged_blob", f"{blob} cannot be read: {error.strerror or error}.") from error
    if digest.name != blob.name:
        raise SeamError("damaged_blob", f"{blob} is damaged: load another version, or restore a backup.")


def _difference(wanted: list[tuple[list[str], Tensor, str]], stored: dict[str, Tensor]) -> str:
    """Return a clause that names the first difference, or an empty text.

    Args:
        wanted: For each tensor of the model: all its names, the tensor, and the name that the file has for it, if any.
        stored: The tensors of the file.
    """
    for names, tensor, name in wanted:
        if not name:
            return f"it has no tensor {names[0]}"
        if stored[name].shape != tensor.shape:
            return f"{name} is {list(stored[name].shape)} in the file and {list(tensor.shape)} in the model"
    known = {name for names, _, _ in wanted for name in names}
    extra = next((name for name in stored if name not in known), "")
    return f"the model has no tensor {extra}" if extra else ""
