"""Where a verb is told to write: looked at before anything is done."""

from pathlib import Path
from tempfile import TemporaryFile

from fedring.ctl.failure import Failure
from fedring.daemon.exits import Exit


def make_folder(path: Path) -> None:
    """The folder that --out names is there, and files can be made in it."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise Failure(f"--out {path} cannot be a folder: {error.strerror or error}", Exit.USAGE) from error
    _check_writable(path, path)


def check_file(path: Path) -> None:
    """The file that --out names can be written: in a folder that is there."""
    if path.is_dir():
        raise Failure(f"--out {path} is a folder: name a file in it", Exit.USAGE)
    if not path.parent.is_dir():
        raise Failure(f"--out {path}: there is no folder {path.parent}: make it, or name another file", Exit.USAGE)
    _check_writable(path, path.parent)


def _check_writable(path: Path, folder: Path) -> None:
    try:
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        sentence = f"--out {path}: no file can be made in the folder {folder}: {error.strerror or error}"
        raise Failure(sentence, Exit.USAGE) from error
