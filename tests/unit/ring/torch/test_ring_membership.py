"""Who becomes which rank of the next generation, and who may decide it."""

from tests.ring_groups import candidate

from fedring.ring.torch.meeting import Membership


def test_without_survivors_ranks_are_in_the_order_of_slots() -> None:
    after = Membership(base=7).next([candidate("c", 2), candidate("a", 0), candidate("b", 1)])
    assert [one.worker for one in after.members] == ["a", "b", "c"]
    assert (after.attempt, after.generation) == (0, 7)


def test_the_survivor_with_the_most_finished_steps_becomes_rank_0() -> None:
    first = Membership(base=0).next([candidate("a", 0), candidate("b", 1), candidate("c", 2)])
    after = first.next(
        [candidate("new", 0, step=99), candidate("b", 1, step=6, formed=0), candidate("c", 2, step=7, formed=0)]
    )
    assert [one.worker for one in after.members] == ["c", "b", "new"]
    assert after.survivors == 2


def test_a_worker_whose_first_generation_was_not_formed_is_no_survivor() -> None:
    first = Membership(base=0).next([candidate("a", 0), candidate("b", 1)])
    second = first.next([candidate("b", 1, formed=0), candidate("new", 0)])
    assert second.has_survivor(candidate("b", 1, formed=0))
    assert not second.has_survivor(candidate("new", 0))


def test_a_worker_that_was_left_behind_is_no_survivor() -> None:
    first = Membership(base=0).next([candidate("a", 0), candidate("frozen", 1)])
    second = first.next([candidate("a", 0, formed=0), candidate("new", 1)])
    assert not second.has_survivor(candidate("frozen", 1, formed=0))


def test_a_survivor_stays_one_if_the_next_generations_form_only_for_others() -> None:
    first = Membership(base=0).next([candidate("a", 1), candidate("b", 2), candidate("dead", 0)])
    second = first.next([candidate("a", 1, step=6, formed=0), candidate("b", 2, step=6, formed=0), candidate("new", 0)])
    # "new" and "a" see the second generation form, "b" does not; then it fails, before "new" gets the state.
    seats = [candidate("a", 1, step=6, formed=1), candidate("b", 2, step=6, formed=0), candidate("new", 0, formed=1)]
    third = second.next(seats)
    assert [one.worker for one in third.members] == ["a", "b", "new"]
    assert not third.has_survivor(seats[2])
    after = third.next([seats[2], seats[1]])
    assert [one.worker for one in after.members] == ["b", "new"]  # and not "new", which has no state


def test_a_worker_that_has_not_got_the_state_is_no_survivor() -> None:
    first = Membership(base=0).next([candidate("a", 0), candidate("b", 1)])
    second = first.next([candidate("a", 0, step=6, formed=0), candidate("new", 1)])
    assert not second.has_survivor(candidate("new", 1, step=0, formed=1))
    assert second.has_survivor(candidate("new", 1, step=6, formed=1))


def test_only_survivors_decide_that_fewer_workers_are_enough() -> None:
    first = Membership(base=0).next([candidate("a", 0), candidate("b", 1), candidate("c", 2)])
    survivor, new = candidate("a", 0, formed=0), candidate("new", 1)
    both, may = [survivor, new], first.may_close
    assert may(both, survivor, min_size=2, last_call_over=True)
    assert not may(both, survivor, min_size=2, last_call_over=False)
    assert not may(both, survivor, min_size=3, last_call_over=True)
    assert not may(both, new, min_size=2, last_call_over=True)
    assert may([*both, candidate("c", 2)], new, min_size=3, last_call_over=False)
