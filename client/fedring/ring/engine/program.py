"""Programs of collectives, and the stepper that runs one; no I/O.

Nothing here takes a lock.

A program is a generator that says what it sends and what it waits for, and never how. It first yields what it
`Expect`s, before anything happens; then `Send`s, which never wait, and `Receive`s, each of which is answered with the
bytes that came. So an algorithm reads from top to bottom, runs on whatever thread brings the data, and is tested
without a network. Between a `Send` and the moment its bytes are copied the memory behind it must not change: a program
sends a copy of what it may overwrite before the receiver can have answered.
"""

from collections.abc import Generator, Iterable, Mapping
from typing import NamedTuple

from fedring.ring.errors import BadFrame, Mismatch
from fedring.ring.transport.frames import FRAME_BYTES, Bytes, Frame

_NOWHERE = (-1, 0, 0)  # a place of no rank, at which nothing arrives


class Expect(NamedTuple):
    """The most that a rank may send ahead of the program.

    Frames beyond it end the generation, since they would take memory without end. A rank that is not named sends
    nothing.
    """

    data: Mapping[int, int]  # bytes by rank; a rank that tells the total of its parts must tell this number
    frames: int  # in which each rank sends them


class Send(NamedTuple):
    """Give `data`, at most MAX_PAYLOAD bytes, to a rank."""

    to: int
    data: Bytes
    tag: int = 0
    part: int = 0
    total: int = 0  # bytes of all parts, for a receiver that may expect another number; 0 = it cannot


class Receive(NamedTuple):
    """Wait for a rank's data with the same tag and part."""

    source: int
    size: int  # exact number of bytes; -1 = any
    tag: int = 0
    part: int = 0

    @property
    def place(self) -> tuple[int, int, int]:
        """The source, the tag and the part, unique within the operation."""
        return self.source, self.tag, self.part

    @property
    def is_first(self) -> bool:
        """Whether the source may not have begun.

        A source that has sent before may itself wait for others.
        """
        return self.tag == 0 and self.part == 0


Program = Generator[Expect | Send | Receive, memoryview, None]


class Stepper:
    """Runs one rank's program as far as the arrived frames allow.

    The caller holds a lock around it.

    Args:
        program: The program, which has not begun.
        what: The operation's description, equal on all ranks; for errors.
        key: The operation's key; for errors.
        rank: This worker's rank; for errors.
        signature: The number that every frame of the operation must carry.
    """

    def __init__(self, program: Program, *, what: str, key: str, rank: int, signature: int) -> None:
        self.waiting: Receive | None = None  # what the program waits for
        self._place = _NOWHERE  # of what it waits for
        self.ended = False
        self._program = program
        self._what, self._key, self._rank, self._signature = what, key, rank, signature
        expected = next(program)
        assert isinstance(expected, Expect), "a program first says what it expects"
        self._expected = expected.data
        self._room = {source: size + expected.frames * FRAME_BYTES for source, size in expected.data.items()}
        self._inbox: dict[tuple[int, int, int], memoryview] = {}

    @property
    def has_what_it_waits_for(self) -> bool:
        """Whether the program waits for something, and that is there."""
        return self._place in self._inbox

    def keep(self, source: int, frame: Frame) -> None:
        """Keep a frame until the program asks for it.

        Raises:
            Mismatch: The source runs another operation, or has another number of bytes for it.
            BadFrame: The source has sent this part before, or more than the program expects of it.
        """
        head = frame.head
        place = (source, head.tag, head.part)
        if head.signature != self._signature:
            raise other_operation(source, frame, what=self._what, key=self._key, rank=self._rank)
        if place in self._inbox:
            raise sent_twice(source, frame, self._what)
        # Parts of equal sizes do not show that there are more of them, or fewer.
        if head.total and head.total != (size := self._expected.get(source, 0)):
            raise other_size(source, head.total, size, what=self._what, key=self._key)
        room = self._room.get(source, 0) - frame.cost
        if room < 0 and place != self._place:  # a part that is waited for leaves at once
            raise BadFrame(f"rank {source} sent more than {self._what} can take (key {self._key})", rank=source)
        self._room[source] = room
        self._inbox[place] = frame.payload

    def step(self) -> Send | None:
        """Run the program until it sends, waits or ends.

        The frame that it waits for must be there.

        Returns:
            The data to send now, or None: the program waits, or has ended.

        Raises:
            Mismatch: The data that the program waited for has another size.
        """
        answer: memoryview | None = None  # a generator takes None first, and after a Send
        if (waited := self.waiting) is not None:
            answer = self._inbox.pop(self._place)
            self._room[waited.source] += FRAME_BYTES + len(answer)
            if 0 <= waited.size != len(answer):
                raise other_size(waited.source, len(answer), waited.size, what=self._what, key=self._key)
            self.waiting, self._place = None, _NOWHERE
        try:
            step = self._program.send(answer)  # type: ignore[arg-type]  # None first, see above
        except StopIteration:
            self.ended = True
            return None
        if isinstance(step, Send):
            return step
        assert isinstance(step, Receive), "a program says once what it expects"
        self.waiting, self._place = step, step.place
        return None

    def close(self) -> None:
        """End the program, and release the memory of its tensors."""
        self._program.close()
        self._inbox.clear()
        self.waiting, self._place, self.ended = None, _NOWHERE, True

    def without_frames(self, ranks: Iterable[int]) -> list[int]:
        """Return those of `ranks` that have sent no unread frame."""
        senders = {source for source, _, _ in self._inbox}
        return [rank for rank in ranks if rank not in senders]


def other_operation(source: int, frame: Frame, *, what: str, key: str, rank: int) -> Mismatch:
    """Return the error of a frame of another operation with the key."""
    here = f"rank {rank} runs {what} (key {key})"
    return Mismatch(f"rank {source} runs {frame.what or 'another operation'}, and {here}", rank=source)


def other_size(source: int, sent: int, size: int, *, what: str, key: str) -> Mismatch:
    """Return the error of data that has another size, in bytes."""
    return Mismatch(f"rank {source} sent {sent} bytes where {what} has {size} (key {key})", rank=source)


def sent_twice(source: int, frame: Frame, what: str) -> BadFrame:
    """Return the error of a frame that has come before."""
    return BadFrame(f"rank {source} sent part {frame.head.part} of step {frame.head.tag} of {what} twice", rank=source)
