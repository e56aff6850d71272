"""What a collective is made of: a program says what it sends and what it waits for, and never how.

A program is a generator. It yields `Send`s, which never wait, and `Receive`s, each of which is answered with the bytes
that came. So an algorithm reads from top to bottom, runs on whatever thread brings the data, and is tested without
a network. Between a `Send` and the moment its bytes are on the wire the memory behind it must not change: a program
sends a copy of what it may overwrite before the receiver can have answered.
"""

from collections.abc import Generator
from typing import NamedTuple

Bytes = bytes | memoryview


class Send(NamedTuple):
    """Give `data`, at most `frames.MAX_PAYLOAD` bytes, to a rank."""

    to: int
    data: Bytes
    tag: int = 0
    part: int = 0


class Receive(NamedTuple):
    """Wait for what a rank sent with the same tag and part."""

    source: int
    size: int  # exact number of bytes; -1 = any
    tag: int = 0
    part: int = 0

    @property
    def place(self) -> tuple[int, int, int]:
        """What names the bytes within the operation."""
        return self.source, self.tag, self.part


Program = Generator[Send | Receive, memoryview, None]
