"""Chained logs: JSON lines, each with the digest of the one before.

Whoever changes, removes or adds a line in the middle must write all later lines anew, which changes the last digest,
the *head*. Somebody else who has noted an earlier head sees that. Lines that are cut off at the end are only seen so.

    {"at":"2026-11-27T08:50:01.123Z","before":"<64 hexadecimal digits>","n":7,"salt":"<32>","what":"accepted", ...}

`before` is the SHA-256 of the line before, without its end of line; empty in the first. `salt` is 32 random hexadecimal
digits: whoever has two heads could otherwise guess what the lines between them say, and find out. There is a file for
each month, and the chain goes on from one to the next.
"""

import hashlib
import json
import os
import re
import secrets
import threading
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, BinaryIO

from fedring.daemon.crash import crashpoint
from fedring.daemon.durable import make_folder, private_opener, sync
from fedring.untrusted import parse_json

MAX_LINE_BYTES = 1 << 16

_FILE = re.compile(r"\d{4}-\d{2}\.jsonl")
_OWN = frozenset({"at", "before", "n"})
_SALT_BYTES = 16  # lines of 1.0.0 have no salt


class DamagedChain(Exception):
    """A chain was changed after it was written.

    The text is one sentence."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a chain.

    Attributes:
        number: Its place in the chain, from 1.
        before: The digest of the line before; empty in the first.
        head: Its own digest: 64 hexadecimal digits of SHA-256.
        facts: All of its keys.
    """

    number: int
    before: str
    head: str
    facts: Mapping[str, Any]


class Chain:
    """A chain in a folder, to which one process adds lines.

    Any thread may use it.

    Args:
        folder: The folder, which is made when needed.
        keep_days: After how many days without a new line a file is deleted; 0 = never.

    Raises:
        DamagedChain: If the newest file with a line is damaged.
        OSError: If it cannot be read.
    """

    def __init__(self, folder: Path, *, keep_days: float = 0) -> None:
        self._folder, self._keep_days = folder, keep_days
        self._lock = threading.Lock()
        self._file: BinaryIO | None = None
        self._name = ""
        self._number, self._head = 0, ""
        for path in reversed(files_of(folder)):
            _cut_torn(path)
            for line in read_lines(path):
                self._number, self._head = line.number, line.head
            if self._number:
                break  # A month's first line may have been lost: then the chain goes on from the one before.

    @property
    def head(self) -> str:
        """The digest of the newest line; empty if there is none."""
        return self._head

    def add(self, *entries: Mapping[str, Any]) -> str:
        """Add lines durably, and return the head.

        Args:
            entries: The keys of each line; the chain adds its own.

        Raises:
            OSError: If that is impossible. Then nothing was added.
            ValueError: If a line would be too long.
        """
        with self._lock:
            now = datetime.now(UTC)
            number, head, lines = self._number, self._head, []
            for entry in entries:
                number += 1
                at = now.isoformat(timespec="milliseconds").replace("+00:00", "Z")
                own = {"at": at, "before": head, "n": number, "salt": secrets.token_hex(_SALT_BYTES)}
                line = json.dumps({**entry, **own}, sort_keys=True, separators=(",", ":"))
                if len(line) >= MAX_LINE_BYTES:
                    raise ValueError(f"a line of {len(line)} bytes is too long")
                head = _digest(line.encode())
                lines.append(line.encode() + b"\n")
            if lines:
                crashpoint(f"chain_line_{number}_begun")
                self._write(f"{now:%Y-%m}.jsonl", b"".join(lines))
                crashpoint(f"chain_line_{number}_written")
                self._number, self._head = number, head
            return self._head

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file is not None:
                self._file.close()
                self._file = None

    def _write(self, name: str, data: bytes) -> None:
        name = max(name, self._name or max((path.name for path in files_of(self._folder)), default=""))
        if self._file is None or name != self._name:
            if self._file is not None:
                self._file.close()
            make_folder(self._folder)
            self._file = open(self._folder / name, "ab", buffering=0, opener=private_opener)  # noqa: SIM115
            self._name = name
            sync(self._folder)
            self._forget()
        size = os.fstat(self._file.fileno()).st_size
        try:
            self._file.write(data)
            os.fdatasync(self._file.fileno())
        except OSError:
            os.ftruncate(self._file.fileno(), size)  # what is there in part must not come before the next line
            raise

    def _forget(self) -> None:
        if not self._keep_days:
            return
        oldest = time.time() - self._keep_days * 86_400
        for path in files_of(self._folder):
            if path.name != self._name and path.stat().st_mtime < oldest:
                path.unlink(missing_ok=True)


def files_of(path: Path) -> list[Path]:
    """Return the files of a chain, the oldest first.

    The path is its folder, or one file."""
    if path.is_dir():
        return sorted(each for each in path.iterdir() if _FILE.fullmatch(each.name))
    return [path] if path.is_file() else []


def read_chain(path: Path) -> list[Line]:
    """Return all lines of a chain, checked.

    Args:
        path: Its folder, or one file of it.

    Raises:
        DamagedChain: If a line was changed, removed or added.
        OSError: If a file cannot be read.
    """
    lines: list[Line] = []
    for file in files_of(path):
        for line in read_lines(file):
            if lines and (line.number, line.before) != (lines[-1].number + 1, lines[-1].head):
                raise DamagedChain(f"{file}: line {line.number} does not follow line {lines[-1].number}")
            lines.append(line)
    return lines


def read_lines(path: Path) -> list[Line]:
    """Return the lines of one file, checked.

    The first one may follow a line of another file.

    Raises:
        DamagedChain: If a line was changed, removed or added.
        OSError: If the file cannot be read.
    """
    with path.open("rb") as file:
        try:
            return parse_lines(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""))
        except ValueError as error:
            raise DamagedChain(f"{path} is not what was written: {error}") from error


def parse_lines(raw: Iterable[bytes]) -> list[Line]:
    """Return the lines of one file, checked.

    Args:
        raw: Its lines, each with the end of line.

    Raises:
        ValueError: If a line was changed, removed or added.
    """
    lines: list[Line] = []
    for count, text in enumerate(raw, 1):
        if not text.endswith(b"\n"):
            raise ValueError(f"the line {count} of the file has no end")
        facts = parse_json(text)
        if not isinstance(facts, dict) or not facts.keys() >= _OWN:
            raise ValueError(f"the line {count} of the file is none of a chain")
        number, before = facts["n"], facts["before"]
        if type(number) is not int or not isinstance(before, str):
            raise ValueError(f"the line {count} of the file has another form")
        wanted = (lines[-1].number + 1, lines[-1].head) if lines else (max(1, number), before)
        if (number, before) != wanted or (number == 1) != (before == ""):
            raise ValueError(f"the line {count} of the file does not follow the one before it")
        lines.append(Line(number, before, _digest(text[:-1]), facts))
    return lines


def _digest(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def _cut_torn(path: Path) -> None:
    """Cut off a line whose writing was interrupted.

    Nobody has seen its digest."""
    data = path.read_bytes()
    if whole := data.rfind(b"\n") + 1:
        if whole < len(data):
            os.truncate(path, whole)
    elif data:
        os.truncate(path, 0)
