"""Payloads between ranks of one host: in memory that both see, while frames say where.

The sender owns an anonymous file: a page of flags, one a slot, then the slots. It takes a slot whose flag is 0 and
sets it; the receiver clears it once nothing refers to the payload. Nobody waits: without a free slot a payload
travels in its frame. The file is sealed against a change of its size, and vanishes with its two processes.
"""

import fcntl
import mmap
import os
import stat
import weakref
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fedring.ring.errors import BadFrame
from fedring.ring.frames import MAX_PAYLOAD
from fedring.ring.program import Bytes

SMALLEST = 32 << 10
"""Payloads of fewer bytes are sooner there in their frames."""

_SLOTS = 8
_PAGE = 4096
_SIZE = _PAGE + _SLOTS * MAX_PAYLOAD
_NAME = "fedring-ring"
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)  # Linux only, as memfd is


class Outbox:
    """The sender's side; `name` tells the receiver where it is."""

    def __init__(self) -> None:
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, _SIZE)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
        self._bytes = _mapped(self._file)
        self.name = f"{os.getpid()}:{self._file}"

    def put(self, payload: Bytes) -> int | None:
        """The slot that holds a copy of `payload` now; None if all are taken."""
        free = np.flatnonzero(self._bytes[:_SLOTS] == 0)
        if len(free) == 0:
            return None
        slot = int(free[0])
        start = _PAGE + slot * MAX_PAYLOAD
        np.copyto(self._bytes[start : start + len(payload)], np.frombuffer(payload, np.uint8))
        self._bytes[slot] = 1
        return slot

    def close(self) -> None:
        """The name leads nowhere any more; who has it mapped keeps it."""
        os.close(self._file)


class Inbox:
    """The receiver's side; BadFrame unless `name` leads to an outbox, OSError if this process may not see it."""

    def __init__(self, name: str) -> None:
        process, _, number = name.partition(":")
        if not (process.isdecimal() and number.isdecimal()):
            raise BadFrame(f"{name[:40]!r} names no shared memory")
        path = Path("/proc", process, "fd", number)
        if not str(path.readlink()).startswith(f"/memfd:{_NAME}"):  # before anything is opened
            raise BadFrame(f"{path} is no shared memory of a worker")
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if not (stat.S_ISREG(status.st_mode) and status.st_size == _SIZE and sealed):
                raise BadFrame(f"{path} is no shared memory of a worker")
            self._bytes = _mapped(file)
        finally:
            os.close(file)

    def get(self, slot: int, length: int) -> memoryview:
        """The payload in a slot; the slot is free again once nothing refers to it."""
        if slot >= _SLOTS or not 0 < length <= MAX_PAYLOAD:
            raise BadFrame(f"there are no {length} bytes in slot {slot}")
        start = _PAGE + slot * MAX_PAYLOAD
        payload = self._bytes[start : start + length]
        payload.flags.writeable = False
        weakref.finalize(payload, self._bytes.__setitem__, slot, 0).atexit = False
        return payload.data


def _mapped(file: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(file, _SIZE), np.uint8)
