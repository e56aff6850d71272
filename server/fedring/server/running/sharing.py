"""How rounds of several jobs share the clients.

A client takes part in a round from the command to the round's end, and in as many rounds at once as its `max_jobs`
says. Of the rounds that wait for clients, the one whose job has had the fewest updates has the first claim to those
that are free. It keeps it until it begins, so no job waits for ever; a round for which too few clients are here claims
none, so it holds up nobody. Nothing here reads a clock.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fedring.server.round import machine as rd
from fedring.server.round.events import Phase, RoundState, Shared
from fedring.server.round.open_round import OpenRound
from fedring.server.running.carried import Carried, Interrupted
from fedring.server.state.rows import RoundRow


@dataclass(slots=True)
class Holders:
    """The rounds that have each client, open or to be resumed.

    Attributes:
        jobs: of each client, the jobs that have it now.
        alone: clients that belong to one round wholly.
    """

    jobs: dict[str, list[int]] = field(default_factory=lambda: defaultdict(list))
    alone: set[str] = field(default_factory=set)

    def add(self, job_id: int, clients: Iterable[str], *, alone: bool) -> None:
        """Note that a round has these clients."""
        for client in clients:
            self.jobs[client].append(job_id)
            if alone:
                self.alone.add(client)

    def hold_back(self, client: str, most: int, *, alone: bool) -> bool:
        """Return whether a round cannot have a client besides.

        Args:
            client: the client.
            most: its max_jobs.
            alone: whether the round wants it wholly.
        """
        known = len(self.jobs[client]) if client in self.jobs else 0
        return known >= most or (known > 0 and (alone or client in self.alone))


def holders_of(
    rounds: Iterable[OpenRound],
    interrupted: Iterable[RoundRow],
    carried: Iterable[OpenRound] = (),
    *,
    but: OpenRound | None = None,
) -> Holders:
    """Return who has which clients.

    Args:
        rounds: that are open.
        interrupted: that a restart has interrupted, and that are not open again yet.
        carried: that have ended, while clients still work on their commands, and whose jobs have none open.
        but: a round that does not count.
    """
    held = Holders()
    for open_ in rounds:
        if open_ is not but:
            held.add(open_.row.job_id, open_.members, alone=open_.alone)
    for row in interrupted:
        held.add(row.job_id, row.selected, alone=True)  # nobody knows yet what it needs
    for told in carried:
        held.add(told.row.job_id, told.outstanding, alone=told.alone)
    return held


def shares(
    rounds: Sequence[OpenRound],
    interrupted: Iterable[RoundRow],
    served: Mapping[int, int],
    carried: Iterable[OpenRound] = (),
) -> list[tuple[OpenRound, frozenset[str]]]:
    """Return the drawing rounds, each with the clients of others.

    Args:
        rounds: that are open.
        interrupted: as in `holders_of`.
        served: how many updates each job has had.
        carried: as in `holders_of`.
    """
    drawing = [open_ for open_ in rounds if open_.draws]  # one that has drawn its clients keeps them
    held = holders_of(rounds, interrupted, carried)
    found = []
    for open_ in sorted(drawing, key=lambda each: (served.get(each.row.job_id, 0), each.row.round)):
        state, round_ = open_.state, open_.state.round
        if round_ is None:
            continue
        here = rd.unhindered(state, round_.rules)
        members = state.members
        busy = frozenset(c for c in here if held.hold_back(c, members[c].max_jobs, alone=open_.alone))
        found.append((open_, busy))
        if open_.phase is Phase.WAITING and len(here) >= rd.needed(round_.rules):
            held.add(open_.row.job_id, (c for c in here if c not in busy), alone=open_.alone)
    return found


class Turns:
    """Shares the clients among the open rounds that want them.

    Args:
        rounds: the open ones, by their numbers.
        carried: those that have ended, while clients still work on their commands.
        interrupted: those that wait to be resumed.
        here: returns the clients that are here, as a state without a round.
        handle: takes an event into the state of a round.
    """

    def __init__(
        self,
        rounds: Mapping[int, OpenRound],
        carried: Carried,
        interrupted: Interrupted,
        *,
        here: Callable[[], RoundState],
        handle: Callable[[OpenRound, Shared], None],
    ) -> None:
        self._rounds, self._carried, self._interrupted = rounds, carried, interrupted
        self._here, self._handle = here, handle
        self._served: dict[int, int] = {}  # by job: updates since it runs, and before it those of the least served one

    @property
    def jobs(self) -> Mapping[str, Sequence[int]]:
        """The jobs whose rounds each client takes part in now."""
        return holders_of(self._open, self._interrupted.rows.values(), self._between).jobs

    def has_room(self, open_: OpenRound, client: str) -> bool:
        """Return whether a client can take part in one more round."""
        member = self._here().members.get(client)
        if member is None or not member.max_jobs:
            return False
        held = holders_of(self._open, self._interrupted.rows.values(), self._between, but=open_)
        return not held.hold_back(client, member.max_jobs, alone=open_.alone)

    def draw(self, open_: OpenRound, clients: Iterable[str]) -> None:
        """Let this round alone have these clients from now on."""
        open_.drawn = frozenset(clients)
        self.share()

    def share(self) -> None:
        """Say to each round that waits which clients it can draw."""
        waiting = self._interrupted.rows.values()
        if len(self._rounds) + len(waiting) + len(between := self._between) > 1:
            for open_, busy in shares(self._open, waiting, self._served, between):
                if busy != open_.state.busy:
                    self._handle(open_, Shared(busy))
        else:
            for open_ in self._open:
                if open_.state.busy:
                    self._handle(open_, Shared(frozenset()))

    def begin(self, job_id: int) -> None:
        """Give a new job the claim of the least served one."""
        self._served.setdefault(job_id, min(self._served.values(), default=0))

    def serve(self, job_id: int, count: int) -> None:
        """Count updates that a job has had."""
        self._served[job_id] = self._served.get(job_id, 0) + count

    def end(self, job_id: int) -> None:
        """Forget a job that has ended."""
        self._served.pop(job_id, None)

    @property
    def _open(self) -> tuple[OpenRound, ...]:
        return tuple(self._rounds.values())

    @property
    def _between(self) -> list[OpenRound]:
        """The rounds with commands whose job has no round open just now."""
        jobs = {open_.row.job_id for open_ in self._rounds.values()}
        return [told for told in self._carried.of() if told.row.job_id not in jobs]
