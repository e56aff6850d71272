"""How rounds of several jobs share the clients.

A client takes part in a round from the command to the round's end, and in as many rounds at once as its `max_jobs`
says. Of the rounds that wait for clients, the one whose job has had the fewest updates has the first claim to those
that are free. It keeps it until it begins, so no job waits for ever; a round for which too few clients are here claims
none, so it holds up nobody. Nothing here reads a clock or changes a round.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from fedring.server.round import machine as rd
from fedring.server.round.events import Phase
from fedring.server.round.open_round import OpenRound
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
