"""The log of what programs did to their disks: made by layer.c, and read here.

Tests add notes to the same log, so that what somebody was told stands in one order with the changes of the disks.
"""

import fcntl
import json
import os
import struct
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOG, ROOT = "FEDRING_DISK_LOG", "FEDRING_DISK_ROOT"
_HEAD = struct.Struct("<IIHHHHQQ")
_SOURCE = Path(__file__).with_name("layer.c")


@dataclass(frozen=True, slots=True)
class Record:
    """One change of the disk, one message sent, or one note.

    Attributes:
        kind: C creates a file; W writes; T sets the size; R renames; L links; U removes; D makes a folder; B and E
            begin to sync a file and a folder, F has synced it; P maps a file; S sends something; N is a note.
        pid: The process.
        inode: The file.
        number: An offset, a size, or the number of a sync.
        name: A path.
        other: The second path of R and L.
        data: What was written, or the note.
    """

    kind: str
    pid: int
    inode: int
    number: int
    name: str
    other: str
    data: bytes


def build_layer(folder: Path, source: Path = _SOURCE) -> Path | None:
    """Compile a layer, by default that of this package, into a folder; return None where that is impossible."""
    library = folder / "layer.so"
    compiler = ["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source), "-ldl", "-lpthread"]
    try:
        built = subprocess.run(compiler, capture_output=True, check=False)
    except OSError:
        return None
    return None if built.returncode else library


def layered(library: Path, log: Path, root: Path) -> dict[str, str]:
    """Return the variables with which a program's changes below `root` are logged."""
    return {"LD_PRELOAD": str(library), LOG: str(log), ROOT: str(root.resolve())}


def note(log: Path, **words: Any) -> None:
    """Add a note to the log, behind all that has happened."""
    data = json.dumps(words).encode()
    head = _HEAD.pack(len(data), os.getpid(), ord("N"), 0, 0, 0, 0, 0)
    with log.open("ab", buffering=0) as file:
        file.write(head + data)


@contextmanager
def all_logged(log: Path) -> Iterator[None]:
    """Let no process be between a change of its disk and the record of it, inside the `with` block."""
    with log.open("ab") as file:  # a lock of this file object: another one of this program may be closed meanwhile
        fcntl.fcntl(file, fcntl.F_OFD_SETLKW, struct.pack("@hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0))
        yield


def read_records(log: Path) -> Iterator[Record]:
    """Yield the records of a log, in order."""
    with log.open("rb") as file:
        while head := file.read(_HEAD.size):
            count, pid, kind, name, other, _, inode, number = _HEAD.unpack(head)
            names = file.read(name + other).decode()
            yield Record(chr(kind), pid, inode, number, names[:name], names[name:], file.read(count))


@dataclass(frozen=True, slots=True)
class Told:
    """What somebody was told by a machine, and when at the latest.

    Attributes:
        at: Behind this many records, the machine had sent it.
        machine: The name of the machine.
        words: What it said.
    """

    at: int
    machine: str
    words: Mapping[str, Any]


def told(records: list[Record]) -> list[Told]:
    """Return what machines have told, in order.

    A note comes when a message was received. The machine had sent it by then: with the last thing that it sent.
    """
    sent: dict[int, int] = {}
    found = []
    for at, record in enumerate(records):
        if record.kind == "S":
            sent[record.pid] = at
        elif record.kind == "N":
            words = json.loads(record.data)
            found.append(Told(sent.get(words["pid"], at), words["machine"], words))
    return found
