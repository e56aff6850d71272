"""The groups of workers of open rounds."""

import asyncio
import time
from collections.abc import Callable, Mapping

from fedring.server.group import machine as gr
from fedring.server.group.rendezvous import Rendezvous
from fedring.server.round import machine as rd
from fedring.server.round.open_round import OpenRound
from fedring.server.round.plan import group_rules
from fedring.server.round.report import RoundJournal


class Groups:
    """The groups of workers of the open rounds.

    Args:
        rounds: the open ones, by their numbers.
        journal: is told what happens to them.
        slowest: returns how long a client may take to come back, in seconds.

    Attributes:
        moved: set whenever the state of a group has changed; whoever waits for it clears it.
        newest: the group that was made last, which outlives its round; None if there was none.
    """

    def __init__(self, rounds: Mapping[int, OpenRound], journal: RoundJournal, slowest: Callable[[], float]) -> None:
        self.moved = asyncio.Event()
        self.newest: Rendezvous | None = None
        self._rounds, self._journal, self._slowest = rounds, journal, slowest
        self._generation = 0  # the newest of the groups of rounds that have ended

    def gather(self, open_: OpenRound, *, resumed: bool = False) -> None:
        """Let the workers of a round gather, if it needs a group."""
        if not open_.job.training.grouped:
            return
        row = open_.row
        # Generations are numbered through all rounds: a worker of an older group is never taken for one of this.
        older = max([self._generation, *(group.generation for group in self._all)])
        self.newest = open_.group = Rendezvous(
            row.round,
            group_rules(open_.job, target=len(row.selected)),
            row.selected,
            open_.done,
            slowest=self._slowest,
            generation=older + 1,
            resumed=resumed,
        )
        self.moved.set()

    def handle(self, open_: OpenRound, event: gr.Event) -> None:
        """Take an event into the state of a round's group.

        Operators are told what follows from it.
        """
        if open_.group is not None:
            before = open_.group.moved
            for kind, text in open_.group.handle(event):
                self._journal.tell(open_, kind, text)
            if open_.group.moved is not before:
                self.moved.set()

    def expect(self, open_: OpenRound) -> None:
        """Tell a round's group whom the round still expects.

        The grace of a client may have ended.
        """
        if open_.group is not None and open_.group.active:
            self.handle(open_, gr.Expected(rd.pending(open_.state, time.monotonic())))

    def end(self, open_: OpenRound) -> None:
        """Note the group of a round that is not open any more."""
        if open_.group is not None:
            self._generation = max(self._generation, open_.group.generation)
        if self._all:  # one may have waited for a client of that round
            self.moved.set()

    @property
    def _all(self) -> list[Rendezvous]:
        return [open_.group for open_ in self._rounds.values() if open_.group is not None]
