"""Properties of schedules for any number of stages and micro-batches: they end, are complete, and keep their bounds."""

from collections import Counter
from dataclasses import replace
from math import lcm

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedring.schedules.routes import BATCH, Routes, chain
from fedring.schedules.schedule import (
    NAMES,
    Action,
    Kind,
    Schedule,
    ScheduleError,
    Versions,
    default_interval,
    forwards,
    gpipe,
    interleaved,
    make,
    one_forward_one_backward,
    pipedream,
)
from fedring.schedules.simulation import Costs, Needs, check, simulate
from fedring.schedules.traffic import Lane, Traffic

STAGES, MICRO_BATCHES = st.integers(1, 6), st.integers(1, 24)
ONE = Costs(forward=1.0, backward=1.0)


@given(STAGES, MICRO_BATCHES, st.sampled_from([1, 2, 5]))
def test_gpipe_and_1f1b_end_with_the_ideal_bubble_with_any_credits(stages: int, count: int, credits: int) -> None:
    for schedule in (gpipe(stages, count), one_forward_one_backward(stages, count)):
        check(schedule, credits=credits)
        timeline = simulate(schedule, ONE)
        assert timeline.bubble == pytest.approx((stages - 1) / (count + stages - 1))


@given(STAGES, MICRO_BATCHES)
def test_1f1b_keeps_one_activation_for_each_stage_from_its_own_on(stages: int, count: int) -> None:
    needs = check(one_forward_one_backward(stages, count))
    assert needs == [Needs(min(count, stages - stage), 1) for stage in range(stages)]
    assert check(gpipe(stages, count)) == [Needs(count, 1)] * stages


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 4))
def test_interleaving_divides_the_bubble_by_the_stages_of_a_worker(workers: int, chunks: int, many: int) -> None:
    count = many * workers
    schedule = interleaved(workers * chunks, count, workers=workers)
    check(schedule)
    timeline = simulate(schedule, ONE)
    assert timeline.bubble == pytest.approx((workers - 1) / (count * chunks + workers - 1))


@given(STAGES, MICRO_BATCHES, st.integers(1, 7), st.sampled_from(Versions))
def test_pipedream_keeps_within_its_bounds(stages: int, count: int, interval: int, versions: Versions) -> None:
    every = max(interval, stages) if versions is Versions.MACROBATCH else interval
    needs = check(pipedream(stages, count, interval=every, versions=versions), credits=1)
    for stage, need in enumerate(needs):
        ahead = stages - 1 - (0 if versions is Versions.VERTICAL else stage)
        most = 2 if versions is Versions.MACROBATCH else -(-ahead // every) + 1
        assert need.versions <= most
        assert need.activations == min(count, stages - stage)


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), MICRO_BATCHES, st.integers(0, 3), st.sampled_from(Versions))
def test_replicas_of_pipedream_make_the_same_updates_and_never_wait_for_ever(
    counts: list[int], count: int, many: int, versions: Versions
) -> None:
    least = default_interval(counts, versions)
    schedule = pipedream(len(counts), count, interval=many * least, versions=versions, replicas=counts)
    needs = check(schedule, credits=1)
    every = max(1, many) * least
    assert schedule.interval == every
    for stage, workers in enumerate(counts):
        assert needs[stage].versions <= (2 if versions is Versions.MACROBATCH else -(-(sum(counts) - 1) // every) + 1)
        assert needs[stage].activations <= -(-sum(counts[stage:]) // workers)
        for worker in schedule.owners(stage):
            updates = [action for action in schedule.of_stage(stage, worker) if action.kind is Kind.UPDATE]
            assert [update.version for update in updates] == list(range(1, -(-count // every) + 1))
            assert updates[-1].micro_batch == count - 1


@given(st.lists(st.integers(1, 3), min_size=1, max_size=4), MICRO_BATCHES)
def test_a_replica_uses_the_newest_weights_for_which_its_own_backwards_are_done(counts: list[int], count: int) -> None:
    every = lcm(*counts)
    schedule = pipedream(len(counts), count, replicas=counts)
    for actions in schedule.workers:
        for action in actions:
            workers, ahead = counts[action.stage], sum(counts[action.stage :]) - 1
            if action.kind is Kind.FORWARD:
                turn = action.micro_batch % workers
                done = [m for m in range(action.micro_batch - ahead) if m % workers == turn]
                assert action.version == len([m for m in done if m % every == every - workers + turn])


@given(st.lists(st.integers(0, 8), min_size=1, max_size=5), MICRO_BATCHES)
def test_pipedream_takes_any_warm_ups_that_do_not_increase(warmups: list[int], count: int) -> None:
    ordered = sorted(warmups, reverse=True)
    needs = check(pipedream(len(ordered), count, warmups=ordered))
    assert [need.activations for need in needs] == [min(count, ahead + 1) for ahead in ordered]


@given(STAGES, st.integers(1, 12))
def test_vertical_sync_uses_the_same_version_for_a_micro_batch_on_all_stages(stages: int, count: int) -> None:
    schedule = pipedream(stages, count, versions=Versions.VERTICAL)
    used = {(action.micro_batch, action.version) for actions in schedule.workers for action in actions
            if action.kind is Kind.FORWARD}  # fmt: skip
    assert len(used) == count


@given(st.integers(1, 4), st.integers(1, 4), MICRO_BATCHES)
def test_forwards_alone_end_with_a_single_credit(workers: int, chunks: int, count: int) -> None:
    trained = interleaved(workers * chunks, workers, workers=workers)
    schedule = forwards(trained, count)
    done = [span.action for span in simulate(schedule, credits=1).spans]
    assert set(done) == {Action(Kind.FORWARD, stage, m) for stage in range(trained.stages) for m in range(count)}
    assert len(done) == trained.stages * count
    assert all(schedule.owners(stage) == trained.owners(stage) for stage in range(trained.stages))


REPLICAS = st.lists(st.integers(1, 4), min_size=1, max_size=5)


@given(REPLICAS, MICRO_BATCHES, st.sampled_from(["gpipe", "1f1b"]), st.sampled_from([1, 2, 5]))
def test_replicas_take_the_micro_batches_of_their_stage_by_turns(
    replicas: list[int], count: int, name: str, credits: int
) -> None:
    schedule = make(name, len(replicas), count, replicas=replicas)
    check(schedule, credits=credits)
    assert len(schedule.workers) == sum(replicas)
    whole = make(name, len(replicas), count)
    for worker, actions in enumerate(schedule.workers):
        (stage,) = schedule.stages_of(worker)
        replica = worker - sum(replicas[:stage])
        done = [action.micro_batch for action in actions if action.kind is Kind.FORWARD]
        assert done == list(range(replica, count, replicas[stage]))
        assert [action.kind for action in actions].count(Kind.UPDATE) == 1
        if set(replicas) == {1}:
            assert actions == whole.workers[worker]
    assert simulate(forwards(schedule, count), credits=credits).spans


def test_with_replicas_as_many_micro_batches_are_in_flight_as_there_are_workers_from_the_stage_on() -> None:
    schedule = make("1f1b", 3, 40, replicas=[1, 2, 1])
    assert [str(action) for action in schedule.workers[2][:6]] == ["F1", "F3", "B1", "F5", "B3", "F7"]
    assert [need.activations for need in check(schedule)] == [4, 2, 1]  # of each worker


def test_an_update_of_replicas_waits_for_all_of_them() -> None:
    schedule = make("gpipe", 2, 3, replicas=[2, 1])  # replica 0 has two micro-batches, replica 1 has one
    spans = [
        span for span in simulate(schedule, ONE).spans if span.action.kind is Kind.UPDATE and not span.action.stage
    ]
    assert {span.worker for span in spans} == {0, 1}
    assert spans[0].start == spans[1].start
    late = list(schedule.workers)
    late[1] = late[1][:-1]
    with pytest.raises(ScheduleError, match="the replicas of stage 0 do not make the same updates"):
        check(replace(schedule, workers=tuple(late)))


@given(st.integers(2, 6), st.data(), MICRO_BATCHES, st.sampled_from([1, 2, 5]))
def test_schedules_end_over_any_routes(stages: int, data: st.DataObject, count: int, credits: int) -> None:
    sources = [dict(inputs) for inputs in chain(stages).sources]
    for target in range(2, stages):
        for source in data.draw(st.sets(st.integers(BATCH, target - 1))):
            sources[target]["batch" if source == BATCH else f"skip{source}"] = source
    routes = Routes(tuple(sources))
    for schedule in (gpipe(stages, count), one_forward_one_backward(stages, count), pipedream(stages, count)):
        check(schedule, routes=routes, credits=credits)
    replicas = data.draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    check(one_forward_one_backward(stages, count, replicas=replicas), routes=routes, credits=credits)


def test_a_lane_over_several_stages_has_credits_for_the_micro_batches_on_their_way() -> None:
    routes = Routes(({"inputs": BATCH}, {"stage0": 0}, {"stage1": 1}, {"stage2": 2, "mask": 0}))
    traffic = Traffic(one_forward_one_backward(4, 12), routes)
    lanes = traffic.lanes(0)
    assert {traffic.edges[lane.edge].tensor: traffic.credits(lane, 1) for lane in lanes} == {"stage0": 1, "mask": 3}
    assert set(lanes.values()) == {12}
    free, tight = (simulate(traffic.schedule, ONE, routes=routes, credits=credits) for credits in (0, 1))
    assert tight.makespan == free.makespan  # the skip does not hold the first stage up


def most_ahead(traffic: Traffic, credits: int, order: list[int]) -> int:
    """Return by how many messages a lane exceeds its credits at most, if only receipts hold its sender back.

    Of all workers that could go on, the first one in `order` does.
    """
    lanes = {lane for worker in order for lane in traffic.lanes(worker)}
    limits = {lane: traffic.credits(lane, credits) for lane in lanes}
    receipts = {lane: traffic.receipts(lane, limits[lane]) for lane in lanes}
    sent, taken, arrived = Counter[Lane](), Counter[Lane](), set[tuple[Lane, int]]()
    position, unsent = dict.fromkeys(order, 0), {worker: list[tuple[Lane, int]]() for worker in order}
    worst = 0

    def goes_on(worker: int) -> bool:
        nonlocal worst
        if unsent[worker]:
            lane, micro_batch = unsent[worker][0]
            freed = sent[lane] - limits.get(lane, 0)  # the message whose credit this one uses
            if lane in lanes and freed in receipts[lane] and taken[lane] <= freed:
                return False
            unsent[worker].pop(0)
            arrived.add((lane, micro_batch))
            sent[lane] += 1
            if lane in lanes:
                worst = max(worst, sent[lane] - taken[lane] - limits[lane])
            return True
        if position[worker] == len(traffic.schedule.workers[worker]):
            return False
        action = traffic.schedule.workers[worker][position[worker]]
        into = [traffic.lane(action.kind, edge, action.micro_batch) for edge in traffic.received(action)]
        if not all((lane, action.micro_batch) in arrived for lane in into):
            return False
        taken.update(into)
        position[worker] += 1
        for edge in traffic.sent(action):
            unsent[worker].append((traffic.lane(action.kind, edge, action.micro_batch), action.micro_batch))
        return True

    while any(goes_on(worker) for worker in order):
        pass
    assert all(position[worker] == len(traffic.schedule.workers[worker]) for worker in order)
    return worst


@given(st.integers(2, 4), MICRO_BATCHES, st.integers(1, 5), st.booleans(), st.data())
def test_messages_without_a_receipt_never_exceed_the_credits(
    stages: int, count: int, credits: int, skips: bool, data: st.DataObject
) -> None:
    sources = [dict(inputs) for inputs in chain(stages).sources]
    if skips:
        sources[-1]["skip"] = 0
    replicas = data.draw(st.lists(st.integers(1, 3), min_size=stages, max_size=stages))
    schedules = [gpipe(stages, count), pipedream(stages, count), one_forward_one_backward(stages, count)]
    schedules += [one_forward_one_backward(stages, count, replicas=replicas), interleaved(2 * stages, 4, workers=2)]
    for schedule in schedules:
        traffic = Traffic(schedule, Routes(tuple(sources)) if schedule.stages == stages else chain(2 * stages))
        order = data.draw(st.permutations(range(len(schedule.workers))))
        assert most_ahead(traffic, credits, order) <= 0


def test_receipts_are_for_messages_whose_answers_come_too_late() -> None:
    both = [Lane(Kind.FORWARD, 0, 0, 1), Lane(Kind.BACKWARD, 0, 1, 0)]
    in_turn, flushed = (Traffic(make(name, 2, 8), chain(2)) for name in ("1f1b", "gpipe"))
    assert [in_turn.receipts(lane, 2) for lane in both] == [frozenset(), frozenset()]
    assert [in_turn.receipts(lane, 1) for lane in both] == [frozenset(range(7)), frozenset(range(7))]
    assert [flushed.receipts(lane, 2) for lane in both] == [frozenset(range(6)), frozenset(range(6))]
    without_answers = Traffic(forwards(in_turn.schedule, 8), chain(2))
    assert without_answers.receipts(both[0], 2) == frozenset(range(6))


@pytest.mark.parametrize(
    ("routes", "sentence"),
    [
        (chain(3), "routes of 3 stages were given for a schedule of 2 stages"),
        (Routes(({"inputs": BATCH}, {"inputs": BATCH})), "no later stage uses what stage 0 makes"),
    ],
)
def test_routes_that_do_not_fit_are_refused(routes: Routes, sentence: str) -> None:
    with pytest.raises(ScheduleError, match=sentence):
        check(gpipe(2, 2), routes=routes)


def test_pipedream_has_bubbles_only_at_its_beginning_and_end() -> None:
    short, long = (simulate(pipedream(4, count), ONE).makespan for count in (10, 110))
    assert long - short == pytest.approx(200)


@given(st.sampled_from(NAMES), st.integers(2, 4), st.integers(0, 60))
def test_a_missing_action_is_always_noticed(name: str, stages: int, victim: int) -> None:
    schedule = make(name, stages, 2 * stages)
    worker = victim % stages
    actions = schedule.workers[worker]
    missing = victim % len(actions)
    workers = list(schedule.workers)
    workers[worker] = actions[:missing] + actions[missing + 1 :]
    with pytest.raises(ScheduleError):
        check(replace(schedule, workers=tuple(workers)))


def test_two_stages_that_wait_for_each_other_are_a_deadlock() -> None:
    first = tuple(Action(kind, 0, m, 0) for m in range(2) for kind in (Kind.FORWARD, Kind.BACKWARD))
    second = tuple(Action(kind, 1, m, 0) for kind in (Kind.FORWARD, Kind.BACKWARD) for m in range(2))
    ends = [(*actions, Action(Kind.UPDATE, stage, 1, 1)) for stage, actions in enumerate((first, second))]
    with pytest.raises(ScheduleError, match="deadlocks: worker 0 at B0 of stage 0, worker 1 at F1 of stage 1"):
        check(Schedule("mine", 2, 2, 2, tuple(ends)))


def test_a_backward_with_other_weights_than_its_forward_is_refused() -> None:
    schedule = pipedream(2, 4)
    wrong = [a._replace(version=1) if a.kind is Kind.BACKWARD and a.micro_batch == 1 else a
             for a in schedule.workers[0]]  # fmt: skip
    with pytest.raises(ScheduleError, match="has no forward with the same weights"):
        check(replace(schedule, workers=(tuple(wrong), schedule.workers[1])))


def test_a_schedule_that_exceeds_its_bounds_is_refused() -> None:
    with pytest.raises(ScheduleError, match="stage 0 needs"):
        check(gpipe(2, 8), bounds=[Needs(2, 1), Needs(2, 1)])


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: make("zigzag", 2, 4), "no schedule 'zigzag'"),
        (lambda: make("gpipe", 4, 4, workers=2), "one stage per worker"),
        (lambda: pipedream(2, 4, replicas=[1, 2], interval=3), "3 micro-batches cannot be divided .* among 2 workers"),
        (lambda: pipedream(2, 4, replicas=[2]), r"replicas=\[2\] do not fit 2 stages"),
        (lambda: make("interleaved_1f1b", 2, 4, replicas=[2, 2]), "do not work with interleaved_1f1b"),
        (lambda: gpipe(2, 4, replicas=[1]), r"replicas=\[1\] do not fit 2 stages"),
        (lambda: gpipe(2, 4, replicas=[1, 0]), r"replicas=\[1, 0\] do not fit 2 stages"),
        (lambda: interleaved(4, 3, workers=2), "must be a multiple of 2"),
        (lambda: interleaved(5, 4, workers=2), "evenly"),
        (lambda: gpipe(0, 1), "at least one"),
        (lambda: forwards(gpipe(2, 1), -1), "at least one"),
        (lambda: pipedream(2, 4, warmups=[0, 1]), "deadlock"),
        (
            lambda: pipedream(4, 8, interval=2, versions=Versions.MACROBATCH),
            "interval of at least 3",
        ),
    ],
)
def test_numbers_that_make_no_schedule_are_refused(build: object, text: str) -> None:
    assert callable(build)
    with pytest.raises(ScheduleError, match=text):
        build()
