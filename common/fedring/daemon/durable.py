"""Durability: what must be on the disk before anybody relies on it."""

import os
from pathlib import Path


def sync(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
