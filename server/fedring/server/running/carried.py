"""Rounds that are neither open nor over.

Their clients still work on a command, or they wait to be resumed.
"""

import asyncio
from collections.abc import Callable, Iterable, Mapping

from fedring.rpc.errors import Unavailable
from fedring.server.round.events import Presence
from fedring.server.round.open_round import OpenRound
from fedring.server.state.rows import RoundRow


class Carried:
    """Ended rounds whose commands are not over for all clients.

    Attributes:
        over: the ended rounds whose commands are over by now, and whose partial uploads are to be deleted.
    """

    def __init__(self) -> None:
        self.over: set[int] = set()
        self._rounds: dict[int, OpenRound] = {}

    def get(self, number: int) -> OpenRound | None:
        """Return the round of this number, or None."""
        return self._rounds.get(number)

    def of(self, job_id: int = 0) -> list[OpenRound]:
        """Return those of a job; of all jobs if `job_id` is 0."""
        return [told for told in tuple(self._rounds.values()) if job_id in (0, told.row.job_id)]

    def keep(self, told: OpenRound) -> None:
        """Keep an ended round until its command is over for all."""
        if told.outstanding:
            self._rounds[told.row.round] = told
        elif told.kind.lasting:
            self.over.add(told.row.round)

    def release(self, told: OpenRound, client: str) -> None:
        """Note that a round's command is over for a client."""
        told.outstanding.pop(client, None)
        if not told.outstanding and self._rounds.pop(told.row.round, None) is not None:
            self.over.add(told.row.round)

    def drop(self, told: OpenRound) -> None:
        """Note that a round's command is over for everybody."""
        del self._rounds[told.row.round]
        self.over.add(told.row.round)

    def note_absent(self, open_: OpenRound) -> None:
        """Note the absent clients that go on after a round."""
        away = {name: each for name, each in open_.state.members.items() if each.presence is Presence.AWAY}
        for told in (open_, *self.of(open_.row.job_id)):
            told.absent = {name: away[name] for name in told.outstanding if name in away}


class Interrupted:
    """The rounds that a restart interrupted, and that wait to be resumed.

    Args:
        changed: is called when there are others.

    Attributes:
        rows: theirs, by their numbers.
        all_resumed: set while there are none.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self.rows: Mapping[int, RoundRow] = {}
        self.all_resumed = asyncio.Event()
        self.all_resumed.set()

    def set(self, rows: Iterable[RoundRow]) -> None:
        """Note which rounds wait to be resumed."""
        self.rows = {row.round: row for row in rows}
        # A round that has ended is among them if clients still work on its command: no charge is open for that.
        if all(row.ended_at is not None for row in self.rows.values()):
            self.all_resumed.set()
        else:
            self.all_resumed.clear()
        self._changed()

    def drop(self, job_id: int) -> None:
        """Forget the rounds of a job."""
        self.set(row for row in self.rows.values() if row.job_id != job_id)

    def check(self, number: int) -> None:
        """Check that a round does not wait to be resumed.

        Raises:
            Unavailable: if it does, because the server has just started.
        """
        if number in self.rows:
            raise Unavailable("the server has just started: try again")
