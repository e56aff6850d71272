"""A layer between a daemon and its operating system: its syncs and writes can fail, and its clock can jump.

layer.c is the layer. It is in each process whose environment has `PRELOAD`, and in forks of such a process; a daemon is
told by a page, a file that both sides map.
"""

import errno
import mmap
import os
import struct
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

from tests.power.records import build_layer

PRELOAD, PAGE = "LD_PRELOAD", "FL_CAMPAIGN_PAGE"
FULL, FAILING = errno.ENOSPC, errno.EIO
SOURCE, _NAME = Path(__file__).with_name("layer.c"), "campaign-layer.so"
_JUMP, _ERRORS, _COUNTS, _BYTES = struct.Struct("<q"), struct.Struct("<ii"), struct.Struct("<qq"), 4096
_ROOT = _JUMP.size + _ERRORS.size + _COUNTS.size


class Page:
    """Says how the operating system treats one daemon.

    Args:
        path: Of the page, which is made.
        root: The folder in which files fail.
    """

    def __init__(self, path: Path, root: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(_BYTES))
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), _BYTES)
        name = os.fsencode(root.resolve())
        if len(name) >= _BYTES - _ROOT:
            raise ValueError(f"{root} is too long a name")
        self._bytes[_ROOT : _ROOT + len(name)] = name
        self.variables = {PAGE: str(path.resolve())}

    @property
    def jump(self) -> int:
        """The seconds that the daemon's clock is ahead of the right time."""
        (seconds,) = _JUMP.unpack_from(self._bytes)
        return int(seconds)

    @jump.setter
    def jump(self, seconds: int) -> None:
        _JUMP.pack_into(self._bytes, 0, seconds)

    def fail(self, *, syncs: int = 0, writes: int = 0) -> None:
        """Let syncs and writes fail with these errors from now on; 0 = they work."""
        _ERRORS.pack_into(self._bytes, _JUMP.size, syncs, writes)

    @property
    def failed(self) -> int:
        """How many syncs and writes have failed so far, but for those of trials of the disk."""
        return sum(_COUNTS.unpack_from(self._bytes, _JUMP.size + _ERRORS.size))


def is_loaded() -> bool:
    """Whether this process, and the forks of its fork server, have the layer."""
    return os.environ.get(PRELOAD, "").endswith(f"/{_NAME}")


def load(folder: Path, module: str, arguments: Sequence[str]) -> None:
    """Begin this program anew with the layer, which is built in a folder; return where that is impossible."""
    folder.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=folder) as made:
        library = build_layer(Path(made), SOURCE)
        if library is not None:
            library = library.replace(folder / _NAME)  # a new file: another run may be using the old one
    if library is not None:
        variables = {**os.environ, PRELOAD: str(library.resolve())}
        os.execve(sys.executable, [sys.executable, "-m", module, *arguments], variables)
