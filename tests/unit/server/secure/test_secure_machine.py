"""The state machine of secure aggregation: all ways through it, without a network and without a clock."""

import random
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedring.secure.limits import MAX_GROUP, MIN_GROUP, threshold
from fedring.server.round.machine import IllegalEvent
from fedring.server.secure.events import (
    Answered,
    Combined,
    CombineShares,
    FormGroups,
    GiveUp,
    Grouped,
    GroupFailed,
    PeersChosen,
    ProtocolState,
    SecureRules,
    SecureStep,
    SignersChosen,
    StepsDelayed,
    SurvivorsChosen,
    UpdatesClosed,
)
from fedring.server.secure.machine import apply, due, form_groups, lost, out, wake_at

NAMES = ("a", "b", "c", "d", "e")
ALL = frozenset(NAMES)
STEPS = (SecureStep.KEYS, SecureStep.SHARES, SecureStep.UPDATES, SecureStep.SURVIVORS, SecureStep.UNMASK)


def begun(needed: int = 4, group_size: int = 0, names: frozenset[str] = ALL) -> ProtocolState:
    return ProtocolState(SecureRules(30.0, needed, group_size), names, 0.0)


def after(state: ProtocolState, *events: object, now: float = 0.0) -> ProtocolState:
    for event in events:
        state = apply(state, event, now)  # type: ignore[arg-type]  # tests give events only
    return state


def answers(step: SecureStep, *names: str) -> list[Answered]:
    return [Answered(step, name) for name in names]


def grouped(needed: int = 4) -> ProtocolState:
    return after(begun(needed), *answers(SecureStep.KEYS, *NAMES), Grouped((NAMES,)))


def masking(peers: tuple[str, ...] = NAMES) -> ProtocolState:
    return after(grouped(), *answers(SecureStep.SHARES, *peers), PeersChosen(0, peers))


def test_a_round_goes_from_the_keys_to_the_masks() -> None:
    state = begun()
    assert due(state, ALL, 1) is None
    state = after(state, *answers(SecureStep.KEYS, *NAMES))
    assert due(state, ALL, 1) == FormGroups(ALL)
    state = after(state, Grouped((NAMES,)))
    assert due(state, ALL, 1) is None
    state = after(state, *answers(SecureStep.SHARES, *NAMES))
    assert due(state, ALL, 1) == PeersChosen(0, NAMES)
    state = after(state, PeersChosen(0, NAMES))
    assert due(state, ALL, 1_000_000) is None
    state = after(state, UpdatesClosed(frozenset("abcd")))
    assert due(state, ALL, 1) == SurvivorsChosen((("a", "b", "c", "d"),))
    state = after(state, SurvivorsChosen((("a", "b", "c", "d"),)), *answers(SecureStep.SURVIVORS, "d", "c", "b", "a"))
    assert due(state, ALL, 1) == SignersChosen(0, ("a", "b", "c", "d"))
    state = after(state, SignersChosen(0, ("a", "b", "c", "d")), *answers(SecureStep.UNMASK, "a", "b", "c", "d"))
    assert due(state, ALL, 1) == CombineShares(0)
    state = after(state, Combined(0))
    assert due(state, ALL, 1) is None
    assert (state.step, state.ended, wake_at(state)) == (SecureStep.DONE, True, inf)
    assert {step: count for step, count in lost(state).items() if count} == {"updates": 1}


def test_a_step_ends_without_clients_that_cannot_answer_any_more() -> None:
    state = after(begun(), *answers(SecureStep.KEYS, "a", "b", "c", "d"))
    assert due(state, ALL, 1) is None
    assert due(state, ALL - {"e"}, 1) == FormGroups(ALL - {"e"})


def test_a_step_ends_after_its_time() -> None:
    state = after(begun(), *answers(SecureStep.KEYS, "a", "b", "c", "d"))
    assert wake_at(state) == 30
    assert due(state, ALL, 29) is None
    assert due(state, ALL, 30) == FormGroups(ALL - {"e"})
    state = after(state, StepsDelayed(5))
    assert due(state, ALL, 34) is None
    state = after(state, Grouped((("a", "b", "c", "d"),)), *answers(SecureStep.SHARES, "a", "b", "c"), now=40)
    assert (wake_at(state), due(state, ALL, 69)) == (70, None)
    assert due(state, ALL, 70) == PeersChosen(0, ("a", "b", "c"))


def test_a_client_that_has_failed_is_in_no_group_even_if_its_keys_have_come() -> None:
    state = after(begun(), *answers(SecureStep.KEYS, *NAMES))
    assert due(state, ALL - {"b"}, 1) == FormGroups(ALL - {"b"})


@pytest.mark.parametrize(
    ("needed", "group_size", "keys", "enough"),
    [(1, 0, 2, False), (1, 0, 3, True), (4, 0, 3, False), (1, 5, 3, False), (1, 5, 4, True)],
)
def test_too_few_keys_end_the_round(needed: int, group_size: int, keys: int, enough: bool) -> None:
    state = after(begun(needed, group_size), *answers(SecureStep.KEYS, *NAMES[:keys]))
    effect = due(state, ALL, 30)
    assert effect == (FormGroups(frozenset(NAMES[:keys])) if enough else GiveUp("too_few_for_threshold"))


def test_too_few_shares_end_the_group_and_with_the_last_group_the_round() -> None:
    state = after(grouped(), *answers(SecureStep.SHARES, "a", "b", "c"))
    assert due(state, ALL, 30) == GroupFailed(0, "too_few_for_threshold")
    state = after(state, GroupFailed(0, "too_few_for_threshold"))
    assert due(state, ALL, 30) == GiveUp("too_few_for_threshold")
    assert out(state) == ALL


def test_too_few_survivors_end_the_round() -> None:
    state = after(masking(), UpdatesClosed(frozenset("abc")), SurvivorsChosen((("a", "b", "c"),)))
    assert due(state, ALL, 1) == GiveUp("too_few_to_unmask")
    assert lost(state)["updates"] == 2


@pytest.mark.parametrize("step", [SecureStep.SURVIVORS, SecureStep.UNMASK])
def test_too_few_answers_to_unmask_end_the_round(step: SecureStep) -> None:
    state = after(masking(), UpdatesClosed(ALL), SurvivorsChosen((NAMES,)))
    if step is SecureStep.UNMASK:
        state = after(state, *answers(SecureStep.SURVIVORS, *NAMES), SignersChosen(0, NAMES))
    state = after(state, *answers(step, "a", "b", "c"))
    assert due(state, ALL, 1) is None
    assert due(state, frozenset("abcd"), 1) is None
    assert due(state, frozenset("abc"), 1) == GroupFailed(0, "too_few_to_unmask")
    state = after(state, GroupFailed(0, "too_few_to_unmask"))
    assert due(state, ALL, 1) == GiveUp("too_few_to_unmask")
    assert lost(state)[step] == 2


def test_a_round_goes_on_with_the_groups_that_are_left() -> None:
    groups = (("a", "b", "c"), ("d", "e", "f"))
    names = frozenset("abcdef")
    state = after(begun(3, 3, names), *answers(SecureStep.KEYS, *names), Grouped(groups))
    state = after(state, *answers(SecureStep.SHARES, *"abcde"))
    assert due(state, names - {"f"}, 1) == PeersChosen(0, groups[0])
    state = after(state, PeersChosen(0, groups[0]))
    assert due(state, names - {"f"}, 1) == GroupFailed(1, "too_few_for_threshold")
    state = after(state, GroupFailed(1, "too_few_for_threshold"))
    assert due(state, names, 1) is None
    assert out(state) == frozenset("def")
    state = after(state, UpdatesClosed(frozenset("abc")))
    assert due(state, names, 1) == SurvivorsChosen((groups[0], ()))


def test_late_answers_change_nothing() -> None:
    state = masking(("a", "b", "c", "d"))
    assert (
        after(state, Answered(SecureStep.KEYS, "e"), Answered(SecureStep.SHARES, "e"), Answered(SecureStep.UNMASK, "a"))
        == state
    )
    assert out(state) == {"e"}


def test_whose_updates_count_is_decided_once() -> None:
    state = after(masking(), UpdatesClosed(ALL), SurvivorsChosen((NAMES,)))
    with pytest.raises(IllegalEvent):
        apply(state, SurvivorsChosen((("a", "b", "c", "d"),)), 0)
    with pytest.raises(IllegalEvent):
        apply(masking(), SurvivorsChosen((NAMES,)), 0)  # the round still takes updates
    with pytest.raises(IllegalEvent):
        apply(state, PeersChosen(0, NAMES), 0)


@given(st.integers(MIN_GROUP, 250), st.one_of(st.just(0), st.integers(MIN_GROUP, MAX_GROUP)), st.integers(0, 99))
def test_groups_are_of_nearly_equal_size_and_hold_each_client_once(count: int, size: int, seed: int) -> None:
    names = [f"client-{number:03}" for number in range(count)]
    groups = form_groups(names, size, random.Random(seed))
    assert sorted(name for group in groups for name in group) == names
    assert all(group == tuple(sorted(group)) for group in groups)
    sizes = {len(group) for group in groups}
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= MAX_GROUP
    if not size:
        assert len(groups) == -(-count // MAX_GROUP)
    elif size <= count and -(-count // (count // size)) <= MAX_GROUP:
        assert min(sizes) >= size


@settings(max_examples=300)
@given(st.integers(3, 12), st.integers(0, 2**32), st.data())
def test_any_order_of_answers_and_any_losses_come_to_an_end(count: int, seed: int, data: st.DataObject) -> None:
    """Losses up to k - t in total end in masks, more in a failure; survivors never change; nothing waits for ever."""
    names = tuple(f"c{number:02}" for number in range(count))
    losses = data.draw(st.integers(0, min(count, count - threshold(count) + 2)), label="losses")
    noticed = data.draw(st.booleans(), label="losses are noticed at once")
    rng = random.Random(seed)
    lost_in = {name: rng.choice(STEPS) for name in rng.sample(names, losses)}
    state, now, given_up = begun(1, 0, frozenset(names)), 0.0, ""
    survivors: list[tuple[str, ...]] = []
    for _ in range(10 * len(STEPS)):
        step = state.step
        here = [name for name in names if name not in lost_in or STEPS.index(lost_in[name]) > STEPS.index(step)]
        if step is SecureStep.UPDATES and state.accepted is None:
            state = apply(state, UpdatesClosed(frozenset(here)), now)
        wrong = [Answered(rng.choice([other for other in STEPS if other is not step]), name) for name in names]
        events = [Answered(step, name) for name in rng.sample(here, rng.randint(0, len(here)))] + wrong
        for event in rng.sample(events, len(events)):
            assert after(state, event) == state or event.step is step
            state = apply(state, event, now)
        if set(here) <= (state.keys if step is SecureStep.KEYS else state.groups[0].answered) and wake_at(state) < inf:
            now = wake_at(state)  # only those that are lost are still waited for
        while (effect := due(state, frozenset(here if noticed else names), now)) is not None:
            if isinstance(effect, GiveUp):
                given_up = effect.reason
                break
            match effect:
                case FormGroups(clients):
                    state = apply(state, Grouped(form_groups(clients, 0, rng)), now)
                case CombineShares(place):
                    state = apply(state, Combined(place), now)
                case _:
                    state = apply(state, effect, now)
        chosen = [group.survivors for group in state.groups if group.survivors]
        assert survivors in ([], chosen)
        survivors = chosen
        if given_up or state.ended:
            break
    else:
        pytest.fail("the round waits for ever")
    in_keys = sum(step is SecureStep.KEYS for step in lost_in.values())  # the threshold is that of the others
    members = count - in_keys
    enough = members >= MIN_GROUP and losses - in_keys <= members - threshold(members)
    assert enough is not bool(given_up)
    if enough:
        assert state.step is SecureStep.DONE
        assert sum(lost(state).values()) == losses
