"""The phases of an asynchronous round, and the deadlines of commands.

All of it is pure. A round begins with whoever is there, once the first one of its job has had its barrier; while nobody
is, it waits. It gives commands to clients that come, up to `concurrency`, and closes at `buffer` updates. If nobody is
left who could fill the buffer, a smaller one is published: each update counts 1 / `buffer` in any case.
"""

import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from math import inf
from types import MappingProxyType

from fedring.server.round.events import (
    Abandon,
    Aggregate,
    Effect,
    Presence,
    Round,
    RoundRules,
    RoundState,
    Start,
    Steps,
    TakeStep,
)
from fedring.server.round.machine import SYNCHRONOUS, given_up, pending, ready
from fedring.train.jobs.asynchronous_table import Asynchronous


@dataclass(frozen=True, slots=True)
class Command:
    """Let these clients, which have come or were free again, train too."""

    clients: frozenset[str]


@dataclass(frozen=True, slots=True)
class Expire:
    """End the commands of these clients: their time is over."""

    clients: frozenset[str]


@dataclass(frozen=True, slots=True)
class Given:
    """Clients have got commands, with the ends of their time (monotonic seconds)."""

    until: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class Over:
    """A client's command is over."""

    client: str


@dataclass(frozen=True, slots=True)
class Deadlines:
    """The steps of an asynchronous round: each client's own deadline."""

    until: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    closed_: bool = False

    @property
    def ended(self) -> bool:
        """See Steps. Once the buffer is closed, the model waits for nobody."""
        return self.closed_

    def happened(self, event: object, now: float) -> Steps:
        """See Steps."""
        match event:
            case Given(until):
                return replace(self, until={**self.until, **until})
            case Over(client):
                return replace(self, until={name: at for name, at in self.until.items() if name != client})
        return self

    def closed(self, delivered: frozenset[str]) -> Steps:
        """See Steps. The next round looks after the clients that go on."""
        return replace(self, closed_=True)

    def delayed(self, seconds: float) -> Steps:
        """See Steps."""
        return replace(self, until={name: at + seconds for name, at in self.until.items()})

    def due(self, reachable: frozenset[str], now: float) -> Effect | None:
        """See Steps."""
        late = frozenset(name for name, at in self.until.items() if now >= at)
        return TakeStep(Expire(late)) if late and not self.closed_ else None

    def wake_at(self) -> float:
        """See Steps."""
        return inf if self.closed_ else min(self.until.values(), default=inf)


def _due_waiting(state: RoundState, round_: Round, now: float) -> Effect | None:
    if not round_.rules.carried:
        return _WAITING.due(state, round_, now)
    grace = round_.rules.grace
    here = sum(1 for name in round_.rules.carried if not _is_lost(state, name, now - grace))
    drawn = _drawn(state, round_, here)
    # A round that began with nobody would be over at once, and the job with it after a few of them.
    return Start(drawn) if here or drawn else given_up(state, round_, now)


def _due_training(state: RoundState, round_: Round, now: float) -> Effect | None:
    rules, count = round_.rules, len(round_.delivered)
    if count >= rules.buffer:
        return Aggregate()
    at_work = pending(state, now)
    if drawn := _drawn(state, round_, len(at_work)):
        return TakeStep(Command(drawn))
    if at_work:
        return None
    return Aggregate() if count >= rules.min_to_aggregate else Abandon("too_few_clients")


def _drawn(state: RoundState, round_: Round, at_work: int) -> frozenset[str]:
    """Return clients for the free places.

    Each client has at most one update in a buffer, so one that was asked in this round is not asked again.
    """
    rules = round_.rules
    free = [name for name in ready(state, rules) if name not in round_.selected and name not in rules.carried]
    places = max(0, rules.concurrency - at_work)
    if places < len(free):
        free = random.Random(f"{rules.seed}:{round_.number}:{len(round_.selected)}").sample(free, places)
    return frozenset(free)


def _is_lost(state: RoundState, client: str, since: float) -> bool:
    member = state.members.get(client)
    return member is None or (member.presence is Presence.AWAY and member.since <= since)


_WAITING, _TRAINING, *_OTHERS = SYNCHRONOUS

ASYNCHRONOUS = (
    replace(_WAITING, due=_due_waiting),
    replace(_TRAINING, due=_due_training, limit=lambda rules: inf),
    *_OTHERS,
)
"""Nobody waits for anybody: clients come and go, and the first updates make the next version."""


def asynchronous_rules(rules: RoundRules, table: Asynchronous, carried: frozenset[str]) -> RoundRules:
    """Return the rules of a round of an asynchronous job.

    Args:
        rules: of the job's rounds.
        table: of the job.
        carried: the clients that still work on commands of earlier rounds.
    """
    return replace(
        rules,
        phases=ASYNCHRONOUS,
        buffer=table.buffer,
        concurrency=table.concurrency,
        sample_clients=table.concurrency,
        carried=carried,
    )
