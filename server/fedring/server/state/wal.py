"""SQLite's write-ahead log, read without SQLite: is there a commit that SQLite would forget in silence?

    header | frame | frame | ...               a frame is a header of its own and one page of the database

    header        magic u32 | version u32 | page bytes u32 | number u32 | salts 2 u32 | checksum 2 u32
    frame header  page u32 | size u32 | salts 2 u32 | checksum 2 u32

The size is that of the database in pages if the frame ends a commit, else 0. All numbers are big-endian. Each checksum
goes on from the one before. SQLite reads up to the first frame that does not fit, takes it for the end, and writes over
what follows. So one flipped bit undoes every later commit.

Three kinds of frames may follow the end of a sound log: old ones with other salts, because a log is written again from
its beginning; those of a transaction that was rolled back, none of which ends a commit; and those of the last commit,
if the power failed before its sync. Everything else was committed, and is lost.
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
    """What a scan of a log has found."""

    commits: int  # that SQLite reads
    damage: str = ""  # the place of the damage, for people; empty = the log is sound


def scan(read: Read, size: int) -> Scan:
    """Read a log once, and return whether SQLite reads all its commits but perhaps the last one.

    Args:
        read: returns so many bytes at an offset.
        size: of the log, in bytes.
    """
    if size <= _HEADER.size:  # SQLite syncs the header before it writes a frame
        return Scan(0)
    if (log := _Log.of(read(0, _HEADER.size))) is None:
        return Scan(0, "its header")
    commits, before, end, after_commit = 0, log.checksum, 0, False
    for number in range(1, (size - _HEADER.size) // log.frame_bytes + 1):
        frame = _Frame(read(_HEADER.size + (number - 1) * log.frame_bytes, log.frame_bytes))
        fits = log.fits(frame, before)
        if not end and fits:
            commits += frame.ends_commit
        elif not end:
            end = number
            # A power loss leaves half a frame, or none of it, but not all except one bit.
            if log.is_one_bit_off(frame, before):
                return Scan(commits, f"frame {end}")
        elif fits and after_commit:  # a commit is synced before the next one is written
            return Scan(commits, f"frame {end}")
        after_commit = log.ends_commit(frame)
        before = frame.checksum  # as it is written there, so that frames after the end are found to fit each other
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
    """What a log's header says."""

    page_bytes: int
    salts: tuple[int, int]
    checksum: Checksum
    words: str  # the numpy type of what checksums add up

    @classmethod
    def of(cls, header: bytes) -> Self | None:
        """Return what a header says; None if SQLite would not accept it."""
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

    def ends_commit(self, frame: _Frame) -> bool:
        """Whether a frame ends a commit, and is none of an earlier log in the same file."""
        return frame.ends_commit and frame.salts == self.salts

    def fits(self, frame: _Frame, before: Checksum) -> bool:
        """Whether a frame is sound behind one with the checksum `before`."""
        return frame.has_page and frame.salts == self.salts and frame.checksum == _sums(self._summed(frame), before)

    def is_one_bit_off(self, frame: _Frame, before: Checksum) -> bool:
        """Whether a frame would fit after `before` if one of its bits was the other one."""
        words = self._summed(frame)
        computed = _sums(words, before)
        salts, checksum = _distance(frame.salts, self.salts), _distance(frame.checksum, computed)
        if salts + checksum == 1:
            return True
        if salts:
            return False
        # A bit adds its power of two, or takes it away, times the word's weight in each sum.
        first, second = ((ours - found) & _MASK for ours, found in zip(frame.checksum, computed, strict=True))
        weights = _weights(len(words))
        for power in range(32):
            bit = np.uint32(1 << power)
            changes = np.where(words & bit, np.uint32(-(1 << power) & _MASK), bit)
            if np.any((weights[0] * changes == first) & (weights[1] * changes == second)):
                return True
        return False

    def _summed(self, frame: _Frame) -> NDArray[np.uint32]:
        """Return the words of a frame that its checksum covers, [2 + page_bytes / 4]."""
        covered = frame.data[:8] + frame.data[_FRAME.size :]
        return np.frombuffer(covered, self.words).astype(np.uint32)


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
    """Return how often each of `count` words counts in the first and in the second sum, modulo 2 to the 32."""
    numbers = [0, 1]
    while len(numbers) <= count:
        numbers.append((numbers[-1] + numbers[-2]) & _MASK)
    fibonacci = np.array(numbers[: count + 1], np.uint32)[::-1]
    return fibonacci[1:], fibonacci[:-1]


def _distance(one: tuple[int, int], other: tuple[int, int]) -> int:
    """Return in how many bits two pairs of words differ."""
    return sum((a ^ b).bit_count() for a, b in zip(one, other, strict=True))
