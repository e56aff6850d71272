"""The block in which torch coalesces operations."""

from fedring.ring.engine.group import Group
from fedring.ring.errors import NotSupported
from fedring.ring.torch.work import RingWork, together


class CoalescingBlock:
    """A group's block that coalesces, while there is one.

    Its operations start at once. One work at its end waits for all of them.

    Args:
        group: The group in which they run.
    """

    def __init__(self, group: Group) -> None:
        self._group = group
        self._works: list[RingWork] | None = None  # None = there is no block

    def begin(self) -> None:
        """Have the works that follow wait for the end."""
        self._works = []

    def add(self, work: RingWork) -> RingWork:
        """Return `work`, and have a block that coalesces wait for it."""
        if self._works is not None:
            self._works.append(work)
        return work

    def break_off(self) -> bool:
        """End the block, as one of its operations is refused.

        After an error, torch does not end it itself.

        Returns:
            Whether there was such a block.
        """
        works, self._works = self._works, None
        return works is not None

    def end(self) -> RingWork:
        """End the block, and return one work for all of its operations.

        Raises:
            NotSupported: It was broken off.
        """
        works, self._works = self._works, None
        if works is None:
            raise NotSupported("an operation of this block was refused, so nothing has waited for the others")
        return together(self._group, works)
