"""For whom a round does not wait: clients that are stalled, and those that are much slower than the others."""

from dataclasses import replace
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedring.server.round.events import (
    Abandon,
    Aggregate,
    Closed,
    Delayed,
    Delivered,
    Effect,
    Event,
    Failed,
    Left,
    Matched,
    Moved,
    Phase,
    Round,
    RoundOpened,
    RoundRules,
    RoundState,
    Stalled,
    Started,
)
from fedring.server.round.machine import apply, due, pending, sample, stalls_at, stragglers_at, updates_needed, wake_at
from fedring.server.round.plan import rules_of
from fedring.train.jobs.job import Job

NAMES = "abcdef"
Timed = tuple[float, Event]


def after(*events: Timed, clients: int = 4, **rules: float) -> RoundState:
    """Return the state of a round that was sent to so many clients at 0 s, after these events."""
    names = NAMES[:clients]
    state = RoundState()
    chosen = RoundRules(min_clients=clients, deadline=600, **rules)  # type: ignore[arg-type]  # the numbers among the rules
    begun: list[Event] = [*map(Matched, names), RoundOpened(1, chosen), Started(frozenset(names))]
    for now, event in [*((0.0, event) for event in begun), *events]:
        state = apply(state, event, now)
    return state


STALLS: list[tuple[list[Timed], dict[str, float], Effect | None]] = [
    ([(1, Delivered({"a"}))], {}, None),
    ([(1, Delivered({"a"})), (9, Stalled("b"))], {}, Aggregate()),
    ([(9, Stalled("b")), (9, Delivered({"a"}))], {}, Aggregate()),
    ([(9, Stalled("b")), (9, Moved("b")), (9, Delivered({"a"}))], {}, None),  # it is waited for again
    ([(9, Stalled("b")), (9, Delivered({"b"}))], {}, None),  # its update counts, and now "a" is waited for
    ([(9, Stalled("b")), (9, Delivered({"b"})), (9, Delivered({"a"}))], {}, Aggregate()),
    ([(9, Stalled("a")), (9, Stalled("b"))], {}, Abandon("too_few_clients")),
    ([(1, Delivered({"a"})), (9, Stalled("b"))], {"min_to_aggregate": 2}, Abandon("too_few_clients")),
    ([(1, Delivered({"a"})), (9, Stalled("a"))], {}, None),  # who has delivered cannot be stalled
    ([(1, Failed("b", 1)), (9, Stalled("b")), (9, Moved("b")), (9, Delivered({"a"}))], {}, Aggregate()),
    ([(9, Stalled("b")), (9, Left("b")), (9, Matched("b")), (9, Delivered({"a"}))], {}, Aggregate()),
]


@pytest.mark.parametrize(("events", "rules", "effect"), STALLS)
def test_a_round_does_not_wait_for_stalled_clients(
    events: list[Timed], rules: dict[str, float], effect: Effect | None
) -> None:
    state = after(*events, clients=2, **rules)
    assert due(state, 10.0) == effect
    assert state.round is not None
    assert not state.round.stalled & (pending(state, 10.0) | state.round.delivered)


def test_a_client_is_stalled_a_while_after_it_last_moved_or_after_the_command() -> None:
    state = after((5, Delivered({"a"})), clients=2, stalled_after=30.0)
    assert state.round is not None
    assert stalls_at(state.round, "b", moved=-100.0) == 30.0
    assert stalls_at(state.round, "b", moved=7.0) == 37.0
    assert stalls_at(state.round, "a", moved=7.0) == inf  # it has delivered
    assert stalls_at(state.round, "stranger", moved=7.0) == inf
    assert stalls_at(apply(state, Stalled("b"), 40.0).round, "b", moved=7.0) == inf  # it is told once
    assert stalls_at(apply(state, Delayed(10.0), 40.0).round, "b", moved=7.0) == 40.0
    assert stalls_at(apply(state, Closed(), 40.0).round, "b", moved=7.0) == inf
    assert stalls_at(after(clients=2).round, "b", moved=7.0) == inf  # off
    assert stalls_at(None, "b", moved=7.0) == inf


STRAGGLERS: list[tuple[float, list[float], float]] = [
    (0.0, [1, 1, 1], inf),
    (3.0, [], inf),
    (3.0, [1.0], inf),  # less than half of the clients
    (3.0, [1.0, 2.0], 4.5),
    (3.0, [1.0, 2.0, 10.0], 6.0),
    (1.0, [4.0, 4.0], 4.0),
]


@pytest.mark.parametrize(("factor", "seconds", "at"), STRAGGLERS)
def test_a_round_ends_after_a_multiple_of_the_median_time(factor: float, seconds: list[float], at: float) -> None:
    events = [(second, Delivered({name})) for name, second in zip(NAMES, seconds, strict=False)]
    state = after(*events, straggler_factor=factor)
    assert state.round is not None
    assert stragglers_at(state.round) == at
    last = max(seconds, default=0.0)
    if at < inf:
        assert wake_at(state, last) == (at if at > last else 600)
        late = frozenset(NAMES[len(seconds) : 4])
        assert due(state, max(at, last)) == Aggregate(late)
        assert at <= last or due(state, at - 0.01) is None
    else:
        assert due(state, 599) is None


def test_stragglers_do_not_shorten_a_round_that_needs_more_updates() -> None:
    state = after((1, Delivered({"a"})), (1, Delivered({"b"})), straggler_factor=2.0, min_to_aggregate=3)
    assert due(state, 599) is None
    assert due(apply(state, Delivered({"c"}), 3.0), 3.0) == Aggregate(frozenset("d"))


@given(
    st.lists(st.sampled_from([(kind, name) for kind in (Delivered, Stalled, Moved, Left, Matched) for name in "abc"]))
)
def test_nobody_is_waited_for_who_is_stalled_and_no_delivery_is_lost(steps: list[tuple[type, str]]) -> None:
    events = [(float(now), kind({name} if kind is Delivered else name)) for now, (kind, name) in enumerate(steps)]
    state = after(*events, clients=3, stalled_after=5.0, straggler_factor=2.0)
    round_ = state.round
    assert round_ is not None
    delivered = {name for kind, name in steps if kind is Delivered}
    assert round_.delivered == delivered
    assert len(round_.delivery_seconds) == len(delivered)
    assert not round_.stalled & (delivered | pending(state, float(len(steps))))


def test_the_workers_of_a_group_and_trainers_of_users_are_not_taken_for_stalled() -> None:
    keys = {"stalled_after_seconds": 30, "straggler_factor": 2}
    assert rules_of(Job.model_validate(keys), grace=5).stalled_after == 30
    assert rules_of(Job.model_validate({**keys, "trainer": "mine:train"}), grace=5).stalled_after == 0
    grouped = rules_of(Job.model_validate({**keys, "mode": "data_parallel"}), grace=5)
    assert (grouped.stalled_after, grouped.straggler_factor) == (0, 0)


@pytest.mark.parametrize(
    "rules", [{"sample_clients": 4}, {"sample_ratio": 0.4}, {"sample_ratio": 0.2, "min_to_aggregate": 4}]
)
def test_more_clients_are_drawn_than_a_round_needs_and_it_ends_with_those(rules: dict[str, float]) -> None:
    chosen = RoundRules(select_factor=1.5, **rules)  # type: ignore[arg-type]  # the numbers among the rules
    opened = Round(1, chosen, Phase.TRAINING, 0.0)
    drawn = sample([f"client-{number}" for number in range(10)], opened)
    assert len(drawn) == 6
    assert updates_needed(Round(1, chosen, Phase.TRAINING, 0.0, frozenset(drawn))) == 4


@given(st.integers(1, 60), st.floats(1, 5), st.one_of(st.integers(1, 60), st.floats(0.01, 1)))
def test_as_many_updates_are_needed_as_would_have_been_drawn_without_the_factor(
    candidates: int, factor: float, wanted: float
) -> None:
    plain = RoundRules(sample_clients=wanted) if isinstance(wanted, int) else RoundRules(sample_ratio=wanted)
    more = replace(plain, select_factor=factor)
    names = [str(number) for number in range(candidates)]
    drawn = sample(names, Round(1, more, Phase.WAITING, 0.0))
    assert len(drawn) <= factor * updates_needed(Round(1, more, Phase.TRAINING, 0.0, frozenset(drawn))) + 1
    assert updates_needed(Round(1, more, Phase.TRAINING, 0.0, frozenset(drawn))) == len(
        sample(names, Round(1, plain, Phase.WAITING, 0.0))
    )


def test_a_round_that_has_what_it_needs_ends_and_names_those_that_it_goes_on_without() -> None:
    events: list[Timed] = [(1, Delivered({"a"})), (1, Failed("b", 1)), (2, Delivered({"c"}))]
    assert due(after(*events[:2], select_factor=2, sample_clients=2), 2) is None
    assert due(after(*events, select_factor=2, sample_clients=2), 2) == Aggregate(frozenset("d"))
    assert due(after(*events, sample_clients=4), 2) is None  # without the factor it waits
