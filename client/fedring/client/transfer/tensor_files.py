"""Writes tensors to files that only their owner may read."""

import errno
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from fedring.daemon.durable import make_private


def save_private(
    save_file: Callable[..., None], path: Path, tensors: Mapping[str, Any], metadata: dict[str, str]
) -> None:
    """Write a safetensors file; it is not synced.

    Args:
        save_file: That of safetensors.numpy or of safetensors.torch.
        path: The file.
        tensors: By name.
        metadata: Of the file.

    Raises:
        OSError: If the disk is full or fails, which safetensors reports by an error of its own.
    """
    make_private(path)
    try:
        save_file(dict(tensors), path, metadata)
    except SafetensorError as error:
        raise OSError(errno.EIO, f"{path} cannot be written: {error}") from error
