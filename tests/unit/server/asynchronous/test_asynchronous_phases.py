"""The phases of an asynchronous round, as a pure machine: who gets commands, and when the buffer closes."""

from dataclasses import replace
from math import inf

from fedring.server.asynchronous.phases import ASYNCHRONOUS, Command, Deadlines, Expire, Given, Over
from fedring.server.round.events import (
    Abandon,
    Aggregate,
    Closed,
    Delivered,
    Enlisted,
    Event,
    Failed,
    Joined,
    Left,
    Matched,
    RoundOpened,
    RoundRules,
    RoundState,
    Shared,
    Start,
    Started,
    Stepped,
    TakeStep,
)
from fedring.server.round.machine import apply, due, wake_at

RULES = RoundRules(
    phases=ASYNCHRONOUS, min_clients=2, buffer=2, concurrency=3, sample_clients=3, min_to_aggregate=1, grace=5.0
)


def after(*events: Event, here: str = "abcd", rules: RoundRules = RULES, now: float = 0.0) -> RoundState:
    state = RoundState()
    for name in here:
        for event in (Joined(name), Matched(name)):
            state = apply(state, event, 0.0)
    for each in (RoundOpened(7, rules), *events):
        state = apply(state, each, now)
    return state


def test_the_first_round_waits_for_its_clients_and_takes_as_many_as_may_train_at_once() -> None:
    assert due(after(here="a"), 0.0) is None
    effect = due(after(), 0.0)
    assert isinstance(effect, Start)
    assert len(effect.clients) == 3


def test_a_later_round_begins_at_once_and_leaves_the_clients_at_work_alone() -> None:
    state = after(rules=replace(RULES, carried=frozenset("cd"), min_clients=100))
    effect = due(state, 0.0)
    assert isinstance(effect, Start)
    assert effect.clients < frozenset("ab")
    assert len(effect.clients) == 1  # two of three places are taken
    full = after(rules=replace(RULES, carried=frozenset("bcd"), min_clients=100))
    assert due(full, 0.0) == Start(frozenset())


def test_a_later_round_waits_while_nobody_is_there_at_all() -> None:
    rules = replace(RULES, carried=frozenset("ab"), min_clients=100, barrier_timeout=30.0)
    gone = after(here="", rules=rules)  # as after a restart
    assert due(gone, 29.9) is None
    assert wake_at(gone, 0.0) == 30.0
    assert due(gone, 30.0) == Abandon("barrier_timeout")
    for came, drawn in (("a", ""), ("c", "c")):  # one that is at work, and a new one
        back = apply(apply(gone, Joined(came), 20.0), Matched(came), 20.0)
        assert due(back, 20.0) == Start(frozenset(drawn))


def test_a_later_round_whose_only_clients_other_jobs_have_waits_for_its_turn() -> None:
    state = after(here="c", rules=replace(RULES, carried=frozenset("ab"), barrier_timeout=30.0))
    busy = apply(state, Shared(frozenset("c")), 0.0)
    assert due(busy, 99.0) is None
    assert wake_at(busy, 99.0) == inf
    assert due(apply(busy, Shared(frozenset()), 99.0), 99.0) == Start(frozenset("c"))


def test_a_lost_client_frees_its_place_and_one_that_delivered_is_not_asked_again() -> None:
    state = after(Started(frozenset("abc")), Delivered({"a"}))
    assert due(state, 0.0) == TakeStep(Command(frozenset("d")))
    state = apply(apply(state, Enlisted("d"), 0.0), Left("b"), 1.0)
    for name in "ef":
        state = apply(apply(state, Joined(name), 1.0), Matched(name), 1.0)
    assert due(state, 5.9) is None  # "b" may come back
    assert wake_at(state, 1.0) == 6.0
    effect = due(state, 6.0)
    assert isinstance(effect, TakeStep)
    assert isinstance(effect.effect, Command)
    assert len(effect.effect.clients) == 1


def test_the_buffer_closes_when_it_is_full_or_when_nobody_could_fill_it() -> None:
    started = Started(frozenset("abc"))
    assert due(after(started, Delivered({"a"}), Delivered({"b"})), 0.0) == Aggregate()
    rest = (Failed("b", 7), Failed("c", 7))
    assert due(after(started, Delivered({"a"}), *rest, here="abc"), 0.0) == Aggregate()
    assert due(after(started, Failed("a", 7), *rest, here="abc"), 0.0) == Abandon("too_few_clients")


def test_each_command_has_a_deadline_of_its_own() -> None:
    state = after(Started(frozenset("ab"), Deadlines({"a": 10.0, "b": 20.0})), here="ab")
    assert wake_at(state, 0.0) == 10.0
    assert due(state, 10.0) == TakeStep(Expire(frozenset("a")))
    state = apply(state, Stepped(Over("a")), 10.0)
    state = apply(state, Stepped(Given({"c": 12.0})), 10.0)
    assert wake_at(state, 10.0) == 12.0
    closed = apply(state, Closed(), 11.0)
    assert due(closed, 15.0) != TakeStep(Expire(frozenset("c")))  # the next round looks after it
    assert Deadlines({"a": 1.0}).delayed(2.0) == Deadlines({"a": 3.0})
