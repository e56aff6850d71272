"""Kinds of rounds: what a kind adds to a round's phases, and a second kind that has no barrier but a buffer."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import pytest
from tests.journal_events import each_event
from tests.unit.host import Host, running, spec

from fedring.server.round.dispatch import Dispatch
from fedring.server.round.events import (
    Abandon,
    Aggregate,
    Closed,
    Delayed,
    Delivered,
    Effect,
    Event,
    Joined,
    MakeModel,
    Matched,
    Phase,
    Round,
    RoundOpened,
    RoundRules,
    RoundState,
    Start,
    Started,
    Stepped,
    Steps,
    TakeStep,
)
from fedring.server.round.machine import SYNCHRONOUS, apply, due, ready, wake_at
from fedring.server.round.open_round import KindMaker, OpenRound, RoundKind
from fedring.server.running.replacements import enlist

BUFFER = 3
"""Updates after which a buffered round publishes."""


@dataclass(frozen=True)
class Ask:
    """Let these clients, which have come late, train too."""

    clients: frozenset[str]


def due_waiting(state: RoundState, round_: Round, now: float) -> Effect | None:
    here = ready(state, round_.rules)
    return Start(frozenset(here)) if here else None


def due_training(state: RoundState, round_: Round, now: float) -> Effect | None:
    if len(round_.delivered) >= BUFFER:
        return Aggregate()
    late = frozenset(ready(state, round_.rules)) - round_.selected
    return TakeStep(Ask(late)) if late else None


waiting, training, *others = SYNCHRONOUS
BUFFERED = (replace(waiting, due=due_waiting), replace(training, due=due_training), *others)
"""Whoever comes trains at once, and the first updates make the next model: nobody waits for anybody."""


class BufferedRound(RoundKind):
    """The course of a round without a barrier."""

    phases = BUFFERED

    def __init__(self, open_: OpenRound, host: Host) -> None:
        super().__init__(open_)
        self._host = host

    async def perform(self, effect: object) -> None:
        host = self._host
        assert isinstance(effect, Ask)
        for client in sorted(effect.clients):
            await enlist(host.rounds, Dispatch(host.sessions), host.facts, self.open, client)


class BufferedRounds(KindMaker):
    """The kind of the rounds of jobs called "buffered"."""

    host: Host

    def kind_of(self, open_: OpenRound) -> RoundKind | None:
        return BufferedRound(open_, self.host) if open_.job.name == "buffered" else None


@pytest.fixture
async def host(tmp_path: Path) -> AsyncIterator[Host]:
    kind = BufferedRounds()
    async with running(tmp_path, [kind]) as host:
        kind.host = host
        yield host


async def test_a_buffered_round_starts_with_whoever_is_there_and_publishes_after_the_first_updates(host: Host) -> None:
    job, _ = await host.jobs.start(spec(name="buffered", min_clients=100, rounds=2), "")
    first = host.join("a")  # a plain round would wait for a hundred clients
    command = await host.command(first)
    assert not await host.offer(host.update(command, "a"))
    open_ = host.round
    assert (open_.phase, open_.row.selected) == (Phase.TRAINING, ("a",))
    late = {name: host.join(name) for name in ("b", "c", "d")}
    for name in ("d", "b"):  # "c" is slow, and nobody waits for it
        assert (await host.command(late[name])).round == command.round
        assert not await host.offer(host.update(command, name))
    assert (await host.command(first)).round == command.round + 1
    assert open_.made is not None
    assert set(open_.accepted) == {"a", "b", "d"}
    await host.jobs.stop(job.job_id)
    assert await host.ended(job.job_id) == "stopped"


async def test_a_plain_round_beside_it_still_has_its_barrier(host: Host) -> None:
    job, _ = await host.jobs.start(spec(min_clients=2), "")
    first = host.join("a")
    async with asyncio.timeout(60):
        async for event in each_event(host.journal, 1):
            if event.kind == "round_waits":
                break
    assert (host.round.phase, host.round.kind.phases) == (Phase.WAITING, ())
    second = host.join("b")
    for session in (first, second):
        await host.offer(host.update(await host.command(session), session.client_id))
    assert await host.ended(job.job_id) == "completed"


@dataclass(frozen=True)
class Counting:
    """Steps that want a word of each client that can answer, before the model is made."""

    said: frozenset[str] = frozenset()
    wanted: frozenset[str] | None = None  # known when the round closes
    until: float = 100.0

    @property
    def ended(self) -> bool:
        return self.wanted is not None and self.wanted <= self.said

    def happened(self, event: object, now: float) -> Steps:
        return replace(self, said=self.said | {str(event)})

    def closed(self, delivered: frozenset[str]) -> Steps:
        return replace(self, wanted=delivered)

    def delayed(self, seconds: float) -> Steps:
        return replace(self, until=self.until + seconds)

    def due(self, reachable: frozenset[str], now: float) -> Effect | None:
        if not reachable:
            return Abandon("all_gone", "nobody is left")
        return TakeStep("hurry") if now >= self.until and not self.ended else None

    def wake_at(self) -> float:
        return self.until


def after(*events: Event) -> RoundState:
    state = RoundState()
    for event in events:
        state = apply(state, event, 0.0)
    return state


STARTED = (
    *(kind(name) for name in "ab" for kind in (Joined, Matched)),
    RoundOpened(1, RoundRules(min_clients=2, deadline=600.0)),
    Started(frozenset("ab"), Counting()),
)


def test_the_steps_of_a_kind_stand_between_the_command_and_the_model() -> None:
    closed = after(*STARTED, Delivered({"a"}), Delivered({"b"}), Closed())
    assert due(closed, 0.0) is None  # the plain round would make its model now
    one = apply(closed, Stepped("a"), 0.0)
    assert due(one, 0.0) is None
    assert due(apply(one, Stepped("b"), 0.0), 0.0) == MakeModel()


def test_what_the_steps_make_due_comes_first_and_wakes_the_runner() -> None:
    training = after(*STARTED)
    assert (due(training, 0.0), wake_at(training, 0.0)) == (None, 100.0)
    assert due(training, 100.0) == TakeStep("hurry")
    late = apply(training, Delayed(50.0), 0.0)
    assert (due(late, 100.0), wake_at(late, 100.0)) == (None, 150.0)
    ended = apply(after(*STARTED, Delivered({"a"}), Closed()), Stepped("a"), 0.0)
    assert wake_at(ended, 0.0) == inf
