"""A job's first weights from a file.

These are checks of which files a job may name, and of their content.
"""

from difflib import get_close_matches
from pathlib import Path

import torch
from torch import nn

from fedring.train.errors import SeamError
from fedring.train.tensors.files import fill_from
from fedring.train.tensors.state import Parts, tensors_of


def load_initial(file: Path, model: nn.Module, parts: Parts) -> None:
    """Fill a model, or only its shared tensors, from a file.

    Args:
        file: The file.
        model: The model, as its callable has made it.
        parts: What of it is shared.

    Raises:
        SeamError: As fill_from() raises it, or with the reason bad_sharing, if the file has other values for a tensor
            that is not shared than the model's callable: clients would never get them.
    """
    kept = {name: tensor.detach().clone() for name, tensor in tensors_of(model) if name not in parts.shared.names}
    fill_from(file, model, optional=kept)
    for name, tensor in tensors_of(model):
        if name in kept and not torch.equal(tensor, kept[name]):
            frozen = name in parts.frozen.names
            way = ", or set send_frozen = true" if frozen else ""
            raise SeamError(
                "bad_sharing",
                f"{file} has other values for {name} than the job's model, and clients would not get them because "
                f"this tensor is {'frozen' if frozen else 'private'}: let the model's callable load them{way}.",
            )


def find_file(allowed: Path | None, name: str) -> Path:
    """Return the file that a job names, if it is allowed.

    The server's operator allows files. Whoever may start jobs could otherwise have the server read any file of its
    machine.

    Args:
        allowed: The configuration's `init_path`: the only file that jobs may name, or the folder of such files.
        name: The path that the job names. A relative path is relative to that folder.

    Raises:
        SeamError: "not_allowed" if the file is not allowed, "no_file" if it is not there, or if `init_path` is gone.
    """
    if allowed is None:
        raise SeamError(
            "not_allowed",
            f"start names the file {name}, but this server allows none: set its init_path to that file, or to a "
            "folder of such files.",
        )
    root = allowed.resolve()
    folder = root if root.is_dir() else root.parent
    try:
        path = (folder / name).resolve()  # follows links, so that none leads out of the folder
        is_file = path.is_file()
    except (OSError, RuntimeError) as error:  # RuntimeError: a circle of links
        raise SeamError("no_file", f"start names a file that cannot be looked up: {type(error).__name__}.") from error
    if path != root and not (root.is_dir() and path.is_relative_to(root)):
        raise SeamError("not_allowed", f"start names the file {name}, which is not in init_path = {allowed}.")
    if not is_file:
        try:
            names = [file.name for file in folder.iterdir() if file.is_file()]
        except OSError as error:
            raise SeamError("no_file", f"init_path = {allowed} cannot be read: {error.strerror or error}.") from error
        near = get_close_matches(path.name, names, n=1)
        hint = f"did you mean {near[0]}?" if near else "see its init_path."
        raise SeamError("no_file", f"start names the file {name}, which is not on the server's machine: {hint}")
    return path
