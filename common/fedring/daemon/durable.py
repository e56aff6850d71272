"""Durable writes to files and folders.

After a durable write, the bytes are on the disk: others may rely on them.
"""

import contextlib
import hashlib
import os
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from typing import Any


def sync(path: Path) -> None:
    """Make a file's bytes, or the names in a folder, durable."""
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def make_folder(path: Path) -> None:
    """Make a folder durably, with the folders above it.

    Only its owner may use it. One that is there is synced, too: an earlier process may have been killed before that.

    Raises:
        OSError: If that is impossible.
    """
    missing = [each for each in (path, *path.absolute().parents) if not each.exists()]
    path.mkdir(mode=0o700, parents=True, exist_ok=True)
    for each in missing or [path]:
        # Who may not read the folder above has not made this one: whoever made it has seen to it.
        with suppress(PermissionError):
            sync(each.absolute().parent)


def delete(path: Path) -> None:
    """Delete a file, or a folder with its contents, if it exists."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def create(path: Path) -> Any:
    """Open a file for writing, readable by its owner alone.

    A file that is there is emptied.
    """
    return os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600), "wb")


def private_opener(path: str, flags: int) -> int:
    """Open a file that only its owner may read, for open(opener=)."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    os.fchmod(fd, 0o600)  # An earlier version may have made it.
    return fd


def make_private(path: Path) -> None:
    """Make an empty file that only its owner may read."""
    os.close(private_opener(str(path), os.O_WRONLY | os.O_CREAT | os.O_TRUNC))


def close_to_others(folder: Path, *globs: str) -> None:
    """Let only the owner read these files and folders in a folder."""
    for path in (path for glob in globs for path in folder.glob(glob)):
        with suppress(OSError):
            path.chmod(0o700 if path.is_dir() else 0o600)


def write_durably(path: Path, data: bytes) -> None:
    """Write a whole file and sync it.

    Its name is durable once its folder has been synced, too.
    """
    with create(path) as file:
        file.write(data)
        make_durable(file)


def make_durable(file: Any) -> None:
    """Make all that was written to an open file durable."""
    file.flush()
    os.fsync(file.fileno())


def create_durably(path: Path, data: bytes) -> None:
    """Write a whole new file durably, with its folder.

    A file that is there already stays.
    """
    new = path.with_name(f"{path.name}.{secrets.token_hex(8)}.new")
    try:
        make_folder(path.parent)
        write_durably(new, data)
        with contextlib.suppress(FileExistsError):  # another process was faster
            os.link(new, path)
        sync(path.parent)
    finally:
        new.unlink(missing_ok=True)


def replace_durably(path: Path, data: bytes) -> None:
    """Write or replace a whole file durably and atomically.

    If this fails, the earlier file is as it was.
    """
    new = path.with_name(f"{path.name}.new")
    write_durably(new, data)
    # The bytes are synced before the rename, and the rename after it: a power cut leaves the old file or the new one.
    new.replace(path)
    sync(path.parent)


def with_digest(text: bytes) -> bytes:
    """Return a line with the SHA-256 of a text, and the text."""
    return hashlib.sha256(text).hexdigest().encode() + b"\n" + text


def replace_with_digest(path: Path, text: bytes) -> None:
    """Replace a file durably by `with_digest` of a text."""
    replace_durably(path, with_digest(text))


def text_after_digest(data: bytes) -> bytes:
    """Return the text from the output of `with_digest`.

    Raises:
        ValueError: If the digest is that of another text.
    """
    digest, _, text = data.partition(b"\n")
    if hashlib.sha256(text).hexdigest().encode() != digest:
        raise ValueError("its digest is another one")
    return text
