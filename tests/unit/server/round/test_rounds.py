"""The state machine of a round: all ways through it, without a network and without a clock."""

from math import inf

import pytest

from fedring.server.round.events import (
    Abandon,
    Abandoned,
    Aggregate,
    Closed,
    Decided,
    Delayed,
    Delivered,
    Evaluated,
    Event,
    Failed,
    Finish,
    Finished,
    Held,
    Joined,
    Left,
    Lost,
    MakeModel,
    Matched,
    Phase,
    Published,
    Resumed,
    Round,
    RoundOpened,
    RoundRules,
    RoundState,
    Shared,
    Start,
    Started,
)
from fedring.server.round.machine import IllegalEvent, apply, due, is_held, pending, waits_until, wake_at

ALL = frozenset({"a", "b"})


def after(*events: Event, state: RoundState | None = None, now: float = 0.0) -> RoundState:
    state = state or RoundState()
    for event in events:
        state = apply(state, event, now)
    return state


def training(rules: RoundRules | None = None) -> RoundState:
    rules = rules or RoundRules(min_clients=2)
    return after(Matched("a"), Matched("b"), RoundOpened(1, rules), Started(ALL))


def test_a_round_goes_from_the_barrier_to_the_published_model() -> None:
    state = after(Matched("a"), RoundOpened(1, RoundRules(min_clients=2)))
    assert due(state, 0) is None
    state = after(Matched("b"), state=state)
    assert due(state, 0) == Start(ALL)
    state = after(Started(ALL), state=state)
    assert due(state, 0) is None
    state = after(Delivered({"a"}), state=state)
    assert pending(state, 0) == {"b"}
    state = after(Delivered({"b"}), state=state)
    assert due(state, 0) == Aggregate()
    state = after(Closed(), state=state)
    assert due(state, 0) == MakeModel()
    state = after(Published(ALL), state=state)
    assert due(state, 0) is None
    state = after(Evaluated("a"), Evaluated("b"), state=state)
    assert due(state, 0) == Finish()
    assert after(Finished(), state=state).round is None


@pytest.mark.parametrize(("barrier", "starts"), [("none", True), ("joined", True), ("matched", False)])
def test_each_barrier_waits_for_its_own_condition(barrier: str, starts: bool) -> None:
    state = after(Joined("a"), Joined("b"), RoundOpened(1, RoundRules(min_clients=2, barrier=barrier)))
    assert (due(state, 0) == Start(ALL)) is starts


def test_without_a_barrier_one_client_is_enough() -> None:
    state = after(RoundOpened(1, RoundRules(min_clients=5, barrier="none")))
    assert due(state, 0) is None
    assert due(after(Joined("a"), state=state), 0) == Start(frozenset("a"))


def test_a_round_is_abandoned_if_too_few_clients_reach_its_barrier_in_time() -> None:
    state = after(Matched("a"), RoundOpened(1, RoundRules(min_clients=2, barrier_timeout=30)))
    assert wake_at(state, 0) == 30
    assert due(state, 29.9) is None
    assert due(state, 30) == Abandon("barrier_timeout")


def test_a_round_waits_for_a_lost_client_only_during_its_grace_period() -> None:
    state = after(Delivered({"a"}), state=training(RoundRules(min_clients=2, grace=5)))
    state = apply(state, Left("b"), 10.0)
    assert wake_at(state, 10) == 15
    assert due(state, 14.9) is None
    assert due(state, 15) == Aggregate()


def test_a_round_waits_again_for_a_client_that_comes_back_within_its_grace_period() -> None:
    state = apply(after(Delivered({"a"}), state=training()), Left("b"), 10.0)
    state = apply(state, Matched("b"), 12.0)
    assert due(state, 20) is None


def test_the_deadline_closes_the_round_with_the_delivered_updates() -> None:
    state = after(Delivered({"a"}), state=training(RoundRules(min_clients=2, deadline=60)))
    assert due(state, 59) is None
    assert due(state, 60) == Aggregate()


def test_too_few_updates_at_the_deadline_abandon_the_round() -> None:
    rules = RoundRules(min_clients=2, min_to_aggregate=2, deadline=60)
    assert due(after(Delivered({"a"}), state=training(rules)), 60) == Abandon("too_few_clients")


def test_close_at_minimum_does_not_wait_for_the_rest() -> None:
    rules = RoundRules(min_clients=2, close_at_minimum=True)
    assert due(after(Delivered({"b"}), state=training(rules)), 0) == Aggregate()


def test_a_round_does_not_wait_for_a_client_that_has_failed() -> None:
    state = after(Delivered({"a"}), Failed("b", 1), state=training())
    assert due(state, 0) == Aggregate()


def test_a_failure_in_another_round_changes_nothing() -> None:
    state = after(Failed("b", 7), state=training())
    assert pending(state, 0) == ALL


def test_a_round_is_abandoned_when_all_its_clients_have_failed() -> None:
    state = after(Failed("a", 1), Failed("b", 1), state=training())
    assert due(state, 0) == Abandon("too_few_clients")


def test_evaluation_ends_at_its_deadline() -> None:
    state = training(RoundRules(min_clients=2, evaluate_timeout=9))
    state = after(Delivered({"a"}), Delivered({"b"}), Closed(), Published(ALL), Evaluated("a"), state=state)
    assert due(state, 8) is None
    assert due(state, 9) == Finish()


def test_the_evaluation_of_a_client_that_was_not_asked_does_not_replace_one_that_was() -> None:
    state = after(Delivered({"a"}), Delivered({"b"}), Closed(), Published(frozenset("a")), state=training())
    assert due(after(Evaluated("b"), state=state), 0) is None
    assert due(after(Evaluated("a"), state=state), 0) == Finish()


def test_the_same_seed_samples_the_same_clients_but_each_round_samples_again() -> None:
    members = [Matched(f"c{i}") for i in range(20)]
    rules = RoundRules(min_clients=20, sample_clients=5, seed=3)
    sampled = [due(after(*members, RoundOpened(number, rules)), 0) for number in range(1, 8)]
    assert all(isinstance(effect, Start) and len(effect.clients) == 5 for effect in sampled)
    assert sampled[0] == due(after(*reversed(members), RoundOpened(1, rules)), 0)
    assert len(set(sampled)) > 1


def test_a_ratio_of_the_clients_is_rounded_up_and_never_below_the_minimum() -> None:
    members = [Matched(f"c{i}") for i in range(10)]
    few = due(after(*members, RoundOpened(1, RoundRules(min_clients=10, sample_ratio=0.25))), 0)
    assert isinstance(few, Start)
    assert len(few.clients) == 3
    least = due(after(*members, RoundOpened(1, RoundRules(min_clients=10, sample_ratio=0.1, min_to_aggregate=4))), 0)
    assert isinstance(least, Start)
    assert len(least.clients) == 4


def test_a_resumed_round_gives_its_clients_time_to_come_back() -> None:
    round_ = Round(3, RoundRules(grace=5), Phase.TRAINING, 0.0, selected=ALL, delivered=frozenset("a"))
    state = after(Resumed(round_, grace=30, elapsed=0), now=100.0)
    assert pending(state, 100) == {"b"}
    assert due(state, 129.9) is None
    assert due(state, 130) == Aggregate()


def test_a_resumed_round_has_no_more_time_than_it_had_left() -> None:
    round_ = Round(3, RoundRules(grace=5, deadline=60), Phase.TRAINING, 0.0, selected=ALL, delivered=frozenset("a"))
    state = after(Resumed(round_, grace=30, elapsed=50), now=100.0)
    assert due(state, 109.9) is None
    assert due(state, 110) == Aggregate(), "10 s were left, and the grace lies within them"
    waiting = after(RoundOpened(3, RoundRules(barrier_timeout=60), elapsed=50), now=100.0)
    assert due(waiting, 109.9) is None
    assert due(waiting, 110) == Abandon("barrier_timeout")


def test_a_wait_for_people_or_for_its_turn_is_no_wait_for_clients() -> None:
    rules = RoundRules(min_clients=2, barrier_timeout=60, approval_timeout=1000, job_id=7)
    here = after(Matched("a"), Matched("b"))
    asked = after(RoundOpened(3, rules), *(Decided(name, frozenset({7})) for name in "ab"), state=here)
    second = after(RoundOpened(3, rules), Shared(frozenset("ab")), state=here)
    for state, until in ((asked, 1000), (second, inf)):
        assert state.round is not None
        assert (is_held(state), waits_until(state, state.round)) == (True, until)
        gone = after(Left("b"), state=state)
        assert (is_held(gone), due(gone, 300)) == (False, Abandon("barrier_timeout"))
        waits_for_it = after(Held(300.0), state=gone)
        assert due(waits_for_it, 359.9) is None
        assert due(waits_for_it, 360) == Abandon("barrier_timeout")
    assert due(asked, 999.9) is None
    assert due(asked, 1000) == Abandon("barrier_timeout")
    assert not is_held(here)


def test_time_in_which_no_client_could_continue_does_not_count() -> None:
    state = after(Delayed(500), state=training(RoundRules(deadline=60)), now=30)
    assert due(state, 559.9) is None
    assert due(state, 560) is not None


def test_an_accepted_update_that_was_lost_no_longer_counts_as_delivered() -> None:
    state = after(Delivered({"a"}), Delivered({"b"}), Closed(), Lost("a"), state=training())
    assert state.round is not None
    assert (sorted(state.round.delivered), sorted(state.round.failed)) == (["b"], ["a"])


def test_an_abandoned_round_finishes_at_once() -> None:
    state = after(Abandoned("stopped"), state=training())
    assert state.round is not None
    assert state.round.reason == "stopped"
    assert due(state, 0) == Finish()


def test_nothing_is_due_without_a_round() -> None:
    assert due(RoundState(), 0) is None
    assert wake_at(RoundState(), 0) == inf


@pytest.mark.parametrize(
    "event", [Closed(), Published(ALL), Started(ALL), Finished(), RoundOpened(2, RoundRules()), Delivered({"stranger"})]
)
def test_an_event_out_of_order_is_refused(event: Event) -> None:
    state = training()
    if isinstance(event, Closed):
        state = after(Closed(), state=state)
    with pytest.raises(IllegalEvent):
        apply(state, event, 0)
