"""SQLite's write-ahead log, read without SQLite.

Is there a commit that SQLite would forget in silence?

    header | frame | frame | ...               a frame is a header of its own and one page of the database

    header        magic u32 | version u32 | page bytes u32 | number u32 | salts 2 u32 | checksum 2 u32
    frame header  page u32 | size u32 | salts 2 u32 | checksum 2 u32

The size is that of the database in pages if the frame ends a commit, else 0. All numbers are big-endian. Each checksum
goes on from the one before. SQLite reads up to the first frame that does not fit, takes it for the end, and writes over
what follows. So one flipped bit undoes every later commit.

Three kinds of frames may follow the end of a sound log: old ones with other salts, because a log is written again from
its beginning; those of a transaction that was rolled back, none of which ends a commit; and those of the last commit,
if the power failed before its sync. Everything else was committed, and is lost.

So the last commit tells nothing. Even a single wrong bit there may be a write that was cut short: below it lies what
was written there before, such as the same page with another number in it.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

Read = Callable[[int, int], bytes]
Checksum = tuple[int, int]

_HEADER = struct.Struct(">6I2I")
_FRAME = struct.Struct(">2I2I2I")
_MAGIC = 0x377F0682  # one more if the checksums are those of big-endian words
_VERSION = 3007000
_PAGE_BYTES = [1 << power for power in range(9, 17)]
_MASK = 0xFFFFFFFF


@dataclass(frozen=True, slots=True)
class Scan:
    """The result of a scan of a log."""

    commits: int  # that SQLite reads
    damage: str = ""  # the place of the damage, for people; empty = the log is sound


def scan(read: Read, size: int) -> Scan:
    """Read a log once, and check that SQLite reads its commits.

    The last commit may be missing.

    Args:
        read: returns so many bytes at an offset.
        size: of the log, in bytes.
    """
    if size <= _HEADER.size:  # SQLite syncs the header before it writes a frame
        return Scan(0)
    if (log := _Log.of(read(0, _HEADER.size))) is None:
        return Scan(0, "its header")
    commits, end = 0, 0
    before = expected = log.checksum
    after_commit = False
    for number in range(1, (size - _HEADER.size) // log.frame_bytes + 1):
        frame = _Frame(read(_HEADER.size + (number - 1) * log.frame_bytes, log.frame_bytes))
        fits = log.fits(frame, before)
        # A commit is synced before the next one is written, which goes on from the checksum at its end. If the damage
        # is in that checksum, it goes on from the one that should be there.
        if end and after_commit and (fits or log.fits(frame, expected)):
            return Scan(commits, f"frame {end}")
        if not fits:
            end = end or number
        commits += fits and frame.ends_commit and not end
        # Frames after the end go on from what is written there, so that they are found to fit each other.
        before, expected, after_commit = frame.checksum, log.sums(frame, before), frame.ends_commit
    return Scan(commits)


class _Frame:
    """One frame of a log."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        page, pages, salt, other, first, second = _FRAME.unpack_from(data)
        self.has_page, self.ends_commit = page != 0, pages != 0
        self.salts, self.checksum = (salt, other), (first, second)


@dataclass(frozen=True, slots=True)
class _Log:
    """The header of a log."""

    page_bytes: int
    salts: tuple[int, int]
    checksum: Checksum
    words: str  # the numpy type of what checksums add up

    @classmethod
    def of(cls, header: bytes) -> Self | None:
        """Return the header's values, or None.

        None if SQLite would not accept it.
        """
        magic, version, page_bytes, _, salt, other, *checksum = _HEADER.unpack(header)
        if magic & ~1 != _MAGIC or page_bytes not in _PAGE_BYTES or version != _VERSION:
            return None
        words = ">u4" if magic & 1 else "<u4"
        log = cls(page_bytes, (salt, other), (checksum[0], checksum[1]), words)
        found = _sums(np.frombuffer(header, words, 6), (0, 0))
        return log if found == log.checksum else None

    @property
    def frame_bytes(self) -> int:
        """The length of a frame."""
        return _FRAME.size + self.page_bytes

    def fits(self, frame: _Frame, before: Checksum) -> bool:
        """Whether a frame is sound behind one with the checksum `before`."""
        return frame.has_page and frame.salts == self.salts and frame.checksum == self.sums(frame, before)

    def sums(self, frame: _Frame, before: Checksum) -> Checksum:
        """Return the checksum of a frame behind one with the checksum `before`."""
        return _sums(np.frombuffer(frame.data[:8] + frame.data[_FRAME.size :], self.words), before)


def _sums(words: NDArray[np.uint32], before: Checksum) -> Checksum:
    """Return the two sums of words, [n], that go on from `before`.

    SQLite adds, for each pair of words x, y: s += x + t; t += y + s. So each word counts a Fibonacci number of times.
    """
    s, t = before
    seeded = np.concatenate([np.array([s, (t - s) & _MASK], np.uint32), words.astype(np.uint32)])
    first, second = (int((weights * seeded).sum(dtype=np.uint32)) for weights in _weights(len(seeded)))
    return first, second


@cache
def _weights(count: int) -> tuple[NDArray[np.uint32], NDArray[np.uint32]]:
    """Return the weights of `count` words in the two checksum sums.

    They say how often each word counts in the first and in the second sum, modulo 2 to the 32.
    """
    numbers = [0, 1]
    while len(numbers) <= count:
        numbers.append((numbers[-1] + numbers[-2]) & _MASK)
    fibonacci = np.array(numbers[: count + 1], np.uint32)[::-1]
    return fibonacci[1:], fibonacci[:-1]
