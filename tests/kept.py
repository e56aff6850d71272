"""What the updates of a client have left in its state folder, as tests look at it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import safe_open
from safetensors.torch import load_file

from fedring.client.transfer.kept import Section


def kept_file(folder: Path) -> Path | None:
    """Return the file of the line of models of which an update was accepted last; None if there is none."""
    return max(folder.glob("kept-*.safetensors"), key=lambda path: path.stat().st_mtime_ns, default=None)


def sections_in(path: Path | None) -> dict[str, Section]:
    """Return the sections in a file, unchecked."""
    if path is None or not path.exists():
        return {}
    words = words_in(path)
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items()}  # a test may change the file
    own = {
        name: {key.partition("/")[2]: t for key, t in tensors.items() if key.startswith(f"{name}/")} for name in words
    }
    return {name: Section(own[name], words[name]) for name in words}


def words_in(path: Path) -> dict[str, Any]:
    """Return the words of each section in a file."""
    with safe_open(path, framework="numpy") as file:
        words: dict[str, Any] = json.loads(file.metadata()["words"])
        return words


def kept_of(folder: Path, section: str) -> Section | None:
    """Return a section of what the newest accepted update has left; None if there is none."""
    return sections_in(kept_file(folder)).get(section)


def kept_residuals(folder: Path) -> list[NDArray[np.float32]]:
    """Return the residuals of all lines of models, [num_parameters] each."""
    found = (sections_in(path).get("residual") for path in sorted(folder.glob("kept-*.safetensors")))
    return [section.tensors["residual"].numpy() for section in found if section is not None]


def kept_residual(folder: Path) -> NDArray[np.float32] | None:
    """Return the residual, [num_parameters]; None if there is none."""
    section = kept_of(folder, "residual")
    if section is None:
        return None
    values: NDArray[np.float32] = section.tensors["residual"].numpy()
    return values
