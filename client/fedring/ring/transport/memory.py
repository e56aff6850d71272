"""Payloads in memory that two ranks of one host share.

The frames say where each payload lies.

The sender owns an anonymous file: a page of flags, one for each slot, then the slots. It takes a slot whose flag is 0
and sets the flag; the receiver clears it once nothing refers to the payload. Nobody waits: without a free slot a
payload travels in its frame. The file is sealed against a change of its size, and vanishes with its two processes.
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
from fedring.ring.transport.frames import MAX_PAYLOAD, Bytes

MIN_SHARED_BYTES = 32 << 10
"""Payloads of fewer bytes arrive sooner in their frames."""

_SLOTS = 8
_PAGE = 4096
_SIZE = _PAGE + _SLOTS * MAX_PAYLOAD
_NAME = "fedring-ring"
_SEALS = getattr(fcntl, "F_SEAL_SHRINK", 0) | getattr(fcntl, "F_SEAL_GROW", 0)  # Linux only, as memfd is


class Outbox:
    """The sender's side of the shared memory.

    `name` tells the receiver where it is.
    """

    def __init__(self) -> None:
        self._file = os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self._file, _SIZE)
        fcntl.fcntl(self._file, fcntl.F_ADD_SEALS, _SEALS)
        self._bytes = _mapped(self._file)
        self.name = f"{os.getpid()}:{self._file}"

    def put(self, payload: Bytes) -> int | None:
        """Copy 1 to MAX_PAYLOAD bytes into a free slot.

        Returns:
            The slot, or None if all slots are taken.
        """
        free = np.flatnonzero(self._bytes[:_SLOTS] == 0)
        if len(free) == 0:
            return None
        slot = int(free[0])
        start = _PAGE + slot * MAX_PAYLOAD
        np.copyto(self._bytes[start : start + len(payload)], np.frombuffer(payload, np.uint8))
        self._bytes[slot] = 1
        return slot

    def close(self) -> None:
        """Close the file, so that nobody else can map it.

        A receiver that has mapped it keeps it.
        """
        os.close(self._file)


class Inbox:
    """The receiver's side of the memory that `name` leads to.

    Raises:
        BadFrame: The name is not that of an outbox.
        OSError: This process may not open it.
    """

    def __init__(self, name: str) -> None:
        process, _, number = name.partition(":")
        if not (process.isdecimal() and number.isdecimal()):
            raise BadFrame(f"{name[:40]!r} does not name shared memory")
        path = Path("/proc", process, "fd", number)
        if not str(path.readlink()).startswith(f"/memfd:{_NAME}"):  # before anything is opened
            raise BadFrame(f"{path} is not the shared memory of a worker")
        file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        try:
            status = os.fstat(file)
            sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & _SEALS == _SEALS
            if not (stat.S_ISREG(status.st_mode) and status.st_size == _SIZE and sealed):
                raise BadFrame(f"{path} is not the shared memory of a worker")
            self._bytes = _mapped(file)
        finally:
            os.close(file)

    def get(self, slot: int, length: int) -> memoryview:
        """Return a slot's payload, read-only.

        The slot is free again once nothing refers to the payload.

        Raises:
            BadFrame: There is no such slot, or its length cannot be `length`.
        """
        if slot >= _SLOTS or not 0 < length <= MAX_PAYLOAD:
            raise BadFrame(f"slot {slot} cannot hold {length} bytes: there are {_SLOTS} slots of {MAX_PAYLOAD} bytes")
        start = _PAGE + slot * MAX_PAYLOAD
        payload = self._bytes[start : start + length]
        payload.flags.writeable = False
        weakref.finalize(payload, self._bytes.__setitem__, slot, 0).atexit = False
        return payload.data


def _mapped(file: int) -> NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(file, _SIZE), np.uint8)
