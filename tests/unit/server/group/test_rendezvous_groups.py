"""The state machine of a group of workers: all ways through it, without a network and without a clock."""

from math import inf

from fedring.server.group.machine import (
    MOST_FRUITLESS,
    Broken,
    Entered,
    Event,
    Expected,
    GroupClosed,
    GroupPhase,
    GroupRules,
    GroupState,
    Ready,
    Slow,
    Tick,
    WorkerDone,
    WorkerJoined,
    WorkerLeft,
    apply,
    wake_at,
)
from fedring.server.group.rendezvous import view

NAMES = ("a", "b", "c")


def new_group(minimum: int = 1, patience: float = 10.0) -> GroupState:
    return GroupState(GroupRules(3, minimum, patience), frozenset(NAMES))


def after(state: GroupState, *events: Event, now: float = 0.0) -> GroupState:
    for event in events:
        state = apply(state, event, now)
    return state


def entered(state: GroupState, *names: str) -> GroupState:
    return after(state, *(Entered(name) for name in names))


def ready(state: GroupState, *names: str, steps: int = 0, now: float = 0.0) -> GroupState:
    return after(state, *(Ready(name, state.generation, f"{name}:1", steps) for name in names), now=now)


def running(minimum: int = 1, patience: float = 10.0) -> GroupState:
    state = ready(entered(new_group(minimum, patience), *NAMES), *NAMES)
    return after(state, *(WorkerJoined(name, state.generation) for name in state.members))


def message_to(state: GroupState, name: str) -> str | None:
    """Return the kind of the message that a worker receives in this state."""
    return view(state, name).WhichOneof("message")


def test_a_group_forms_when_all_are_ready_and_runs_when_all_have_joined() -> None:
    state = entered(new_group(), *NAMES)
    assert [message_to(state, name) for name in NAMES] == ["prepare"] * 3
    state = ready(state, "c", "a")
    assert state.phase is GroupPhase.GATHERING
    state = ready(state, "b")
    assert (state.phase, state.members) == (GroupPhase.JOINING, NAMES)
    assert list(view(state, "b").group.members) == ["a:1", "b:1", "c:1"]
    assert [view(state, name).group.rank for name in NAMES] == [0, 1, 2]
    state = after(state, WorkerJoined("a", 1), WorkerJoined("c", 1))
    assert state.phase is GroupPhase.JOINING
    state = after(state, WorkerJoined("b", 1))
    assert [message_to(state, name) for name in NAMES] == ["start"] * 3


def test_the_first_member_delivers_once_all_are_done() -> None:
    state = after(running(), WorkerDone("b", 1, b"same"), WorkerDone("a", 1, b"same"))
    assert state.phase is GroupPhase.RUNNING
    state = after(state, WorkerDone("c", 1, b"same"))
    assert [message_to(state, name) for name in NAMES] == ["deliver", "wait", "wait"]
    assert [message_to(after(state, WorkerLeft("a")), name) for name in ("b", "c")] == ["deliver", "wait"]
    assert view(after(state, GroupClosed()), "c").ended.reason == ""


def test_a_member_that_comes_back_without_the_result_does_not_deliver() -> None:
    state = after(running(), *(WorkerDone(name, 1, b"same") for name in NAMES), WorkerLeft("a"), Entered("a"))
    assert [message_to(state, name) for name in NAMES] == ["wait", "deliver", "wait"]
    state = after(state, WorkerLeft("b"), WorkerLeft("c"))
    assert (state.phase, state.generation) == (GroupPhase.GATHERING, 2)


def test_results_that_differ_end_the_round() -> None:
    state = after(running(), WorkerDone("a", 1, b"one"), WorkerDone("b", 1, b"one"), WorkerDone("c", 1, b"other"))
    assert (state.phase, state.reason) == (GroupPhase.ENDED, "diverged")
    state = after(running(), Broken("b", 1, "diverged"))
    assert (state.phase, state.reason) == (GroupPhase.ENDED, "diverged")


def test_a_lost_member_ends_the_generation_and_the_next_waits_for_a_replacement() -> None:
    state = after(running(), WorkerLeft("b"), now=100)
    assert (state.phase, state.generation, state.members) == (GroupPhase.GATHERING, 2, ())
    assert [message_to(state, name) for name in ("a", "c")] == ["prepare", "prepare"]
    state = ready(state, "a", "c", steps=7, now=101)
    assert state.phase is GroupPhase.GATHERING
    assert wake_at(state, 101) == 110
    replaced = ready(entered(state, "d"), "d", now=102)
    assert replaced.members == ("a", "c", "d")


def test_without_a_replacement_the_group_continues_with_fewer_members() -> None:
    state = ready(after(running(), WorkerLeft("b"), now=100), "a", "c", now=101)
    assert after(state, Tick(), now=109.9).phase is GroupPhase.GATHERING
    assert after(state, Tick(), now=110).members == ("a", "c")


def test_the_round_ends_when_too_few_workers_are_left() -> None:
    state = ready(after(running(minimum=3), WorkerLeft("b"), now=100), "a", "c", now=101)
    state = after(state, Expected(frozenset({"a", "c"})), now=105)
    assert state.phase is GroupPhase.GATHERING
    state = after(state, Tick(), now=110)
    assert (state.phase, state.reason) == (GroupPhase.ENDED, "too_few_clients")


def test_a_group_waits_for_a_worker_that_is_back_but_not_ready() -> None:
    state = after(running(minimum=3), WorkerLeft("c"))
    state = after(state, Expected(frozenset(NAMES)), now=1.0)  # its daemon has joined again, and loads the data
    state = ready(entered(state, "a", "b"), "a", "b")
    assert after(state, Tick(), now=500.0).phase is GroupPhase.GATHERING
    gone = after(state, Expected(frozenset({"a", "b"})), now=501.0)
    assert (gone.phase, gone.reason) == (GroupPhase.ENDED, "too_few_clients")


def test_a_group_waits_longer_if_clients_take_long_to_come_back() -> None:
    state = ready(entered(after(running(minimum=3), WorkerLeft("c")), "a", "b"), "a", "b")
    state = after(state, Slow(40.0), Slow(20.0), Expected(frozenset({"a", "b"})))
    assert after(state, Tick(), now=39.0).phase is GroupPhase.GATHERING
    assert after(state, Tick(), now=40.0).phase is GroupPhase.ENDED
    assert after(state, Slow(5.0)) == state


def test_a_member_that_notices_a_lost_peer_late_is_not_left_out() -> None:
    state = ready(after(running(patience=0), WorkerLeft("b"), now=100), "a", now=100)
    state = after(state, Tick(), now=101)
    assert state.phase is GroupPhase.GATHERING
    assert wake_at(state, 101) == 130
    assert ready(state, "c", now=104).members == ("a", "c")
    assert after(state, Tick(), now=130).members == ("a",)


def test_the_first_group_waits_for_workers_that_still_load() -> None:
    state = ready(entered(new_group(minimum=2), "a"), "a")
    assert wake_at(state, 0) == inf
    state = after(state, Expected(frozenset({"a", "c"})), now=50)  # b has failed
    assert after(state, Tick(), now=500).phase is GroupPhase.GATHERING
    assert ready(entered(state, "c"), "c", now=600).members == ("a", "c")
    state = after(state, Expected(frozenset({"a"})), now=600)
    assert (state.phase, state.reason) == (GroupPhase.ENDED, "too_few_clients")


def test_a_member_that_reports_a_lost_peer_ends_the_generation_once() -> None:
    state = after(running(), Broken("a", 1, "peer_lost"))
    assert (state.generation, state.reason) == (2, "a: peer_lost")
    assert after(state, Broken("c", 1, "peer_lost")).generation == 2


def test_events_of_an_earlier_generation_are_ignored() -> None:
    state = after(running(), WorkerLeft("b"))
    late = after(state, Ready("a", 1, "a:1"), WorkerJoined("a", 1), WorkerDone("a", 1, b"same"))
    assert late == state


def test_a_worker_that_comes_late_waits_for_the_next_generation() -> None:
    state = entered(running(), "d")
    assert message_to(state, "d") == "wait"
    state = ready(after(state, WorkerLeft("a")), "b", "c", "d", now=1)
    assert state.members == ("b", "c", "d")


def test_the_workers_with_the_most_steps_become_members_when_there_are_too_many() -> None:
    state = entered(after(running(), WorkerLeft("c"), now=0), "d", "e")
    state = ready(state, "d", "e", now=1)
    state = ready(state, "b", steps=9, now=2)
    assert state.members == ("b", "d", "e")
    state = after(state, WorkerLeft("e"), now=3)
    state = ready(state, "a", "b", steps=9, now=3)
    assert ready(state, "d", now=3).members == ("a", "b", "d")


def test_a_member_whose_stream_was_replaced_is_a_new_worker() -> None:
    state = after(running(), Entered("b", 1))
    assert (state.phase, state.generation) == (GroupPhase.GATHERING, 2)
    assert message_to(state, "b") == "prepare"


def test_a_restarted_server_begins_above_the_generation_of_its_workers() -> None:
    state = after(new_group(), Entered("a", 7))
    assert state.generation == 8
    assert after(state, Entered("b", 7)).generation == 8


def test_members_that_do_not_join_are_left_out() -> None:
    state = ready(entered(new_group(), *NAMES), *NAMES)
    state = after(state, WorkerJoined("a", 1), WorkerJoined("b", 1))
    assert wake_at(state, 0) == 30
    state = after(state, Tick(), now=30)
    assert (state.generation, state.reason) == (2, "c did not join")
    assert view(state, "c").ended.reason == "too_late"


def test_a_group_that_can_never_connect_ends_the_round() -> None:
    state = entered(new_group(), *NAMES)
    for _ in range(MOST_FRUITLESS):
        state = ready(state, *NAMES)
        state = after(state, Broken("a", state.generation, "peer_lost"))
        assert state.phase is GroupPhase.GATHERING
    state = ready(state, *NAMES)
    state = after(state, Broken("a", state.generation, "peer_lost"))
    assert (state.phase, state.reason) == (GroupPhase.ENDED, "no_group")


def test_groups_that_make_steps_may_break_any_number_of_times() -> None:
    state = running()
    for step in range(1, 3 * MOST_FRUITLESS):
        state = ready(after(state, Broken("a", state.generation, "peer_lost")), *NAMES, steps=step)
        state = after(state, *(WorkerJoined(name, state.generation) for name in NAMES))
    assert state.phase is GroupPhase.RUNNING


def test_groups_that_break_before_their_first_step_end_the_round() -> None:
    state = running()
    for _ in range(MOST_FRUITLESS):
        state = ready(after(state, Broken("a", state.generation, "mismatch")), *NAMES)
        state = after(state, *(WorkerJoined(name, state.generation) for name in NAMES))
        assert state.phase is GroupPhase.RUNNING
    state = after(state, Broken("a", state.generation, "mismatch"))
    assert (state.phase, state.reason) == (GroupPhase.ENDED, "no_group")


def test_an_ended_group_stays_ended() -> None:
    state = after(running(), GroupClosed("stopped"), Entered("a"), WorkerLeft("b"))
    assert view(state, "a").ended.reason == "stopped"


def test_only_a_worker_that_holds_the_update_delivers_it() -> None:
    state = running()
    generation = state.generation
    state = after(state, *(WorkerDone(name, generation, b"d" * 32, name != "a") for name in NAMES))
    assert (state.phase, state.deliverer) == (GroupPhase.DONE, "b")
    state = after(state, WorkerLeft("b"))
    assert (state.phase, state.deliverer) == (GroupPhase.DONE, "c")
    state = after(state, WorkerLeft("c"))
    assert (state.phase, state.generation) == (GroupPhase.GATHERING, generation + 1)
    assert state.reason == "all members that hold the update are lost"
