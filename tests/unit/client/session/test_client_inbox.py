"""Commands: which repeat the current assignment, and which are new work."""

import asyncio
import time

import pytest

from fedring.client.session.inbox import Assignment, EvaluationOrder, WorkInbox
from fedring.codec.digest import name_of
from fedring.train.bounds import MAX_SECONDS
from fedring.v1 import federation_pb2 as pb

BASE, OTHER_BASE = name_of(b"a model"), name_of(b"another model")
MINE, ANOTHERS = name_of(b"my update"), name_of(b"another update")
NOTHING = pb.LastAccepted()  # from a server that knows of no update


def command(**fields: object) -> pb.TrainCmd:
    """Return a command to train, always the same except for `fields`."""
    given = {"run_id": "run", "epoch": 1, "round": 7, "model_digest": BASE, "deadline_seconds": 600.0}
    return pb.TrainCmd(**given | fields)  # type: ignore[arg-type]  # fields of one test each


def known(name: str = MINE, *, epoch: int = 1, round_: int = 7) -> pb.LastAccepted:
    """Return what a server says that has accepted that update."""
    return pb.LastAccepted(epoch=epoch, round=round_, name=name)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"deadline_seconds": 5.0},  # less time is left whenever it is repeated
        {"model_version": 9},  # the version is for people only
        {"model": pb.SmallModel(payload=b"it comes once")},
    ],
    ids=lambda fields: " ".join(fields) or "nothing",
)
def test_a_repeated_command_is_the_current_assignment(fields: dict[str, object]) -> None:
    inbox = WorkInbox()
    first = inbox.train(command(), NOTHING)
    assert inbox.train(command(**fields), NOTHING) is first
    assert (inbox.current, first.end_reason) == (first, "")


@pytest.mark.parametrize(
    "fields",
    [{"run_id": "other"}, {"epoch": 2}, {"epoch": 0}, {"round": 8}, {"round": 6}, {"model_digest": OTHER_BASE}],
    ids=lambda fields: " ".join(f"{name}={value}"[:20] for name, value in fields.items()),
)
def test_a_command_of_another_run_epoch_round_or_model_replaces_the_current_one(
    fields: dict[str, object],
) -> None:
    inbox = WorkInbox()
    first = inbox.train(command(), NOTHING)
    second = inbox.train(command(**fields), NOTHING)
    assert (inbox.current, first.end_reason, second.end_reason) == (second, "next_round", "")
    assert second is not first


def test_a_round_whose_update_was_accepted_is_not_trained_again() -> None:
    inbox = WorkInbox()
    first = inbox.train(command(), NOTHING)
    first.accepted_name = MINE
    assert inbox.train(command(), known()) is first


@pytest.mark.parametrize(
    "last",
    [NOTHING, known(ANOTHERS, round_=6), known(ANOTHERS), known(ANOTHERS, epoch=0, round_=9)],
    ids=["nothing", "an older one", "another one", "one of before"],
)
def test_a_round_whose_accepted_update_the_server_has_forgotten_is_trained_again(last: pb.LastAccepted) -> None:
    inbox = WorkInbox()
    first = inbox.train(command(), NOTHING)
    first.accepted_name = MINE
    second = inbox.train(command(), last)
    assert second is not first
    assert second.accepted_name == ""
    assert inbox.current is second


def test_an_accepted_update_still_counts_after_its_round_has_ended() -> None:
    inbox = WorkInbox()
    first = inbox.train(command(), NOTHING)
    first.accepted_name = MINE
    inbox.end(7, "published")
    assert inbox.train(command(), known()) is first


@pytest.mark.parametrize("why", ["published", "deadline", "stopped"])
def test_a_round_that_had_ended_is_trained_again_if_the_server_asks_for_it(why: str) -> None:
    inbox = WorkInbox()
    first = inbox.train(command(), NOTHING)
    inbox.end(7, why)
    second = inbox.train(command(), NOTHING)
    assert (inbox.current, second.end_reason, first.end_reason) == (second, "", why)
    assert second is not first


def test_a_repeated_command_of_a_round_that_failed_here_keeps_the_failure() -> None:
    inbox = WorkInbox()
    first = inbox.train(command(), NOTHING)
    first.failure = pb.Failure(round=7, reason="no_data")
    assert inbox.train(command(), NOTHING).failure == first.failure


@pytest.mark.parametrize("fields", [{"run_id": "other"}, {"epoch": 2, "job": pb.JobSpec(job_id=2)}])
def test_a_round_is_the_newest_one_with_its_number(fields: dict[str, object]) -> None:
    """A server with a new state, or one that was restored, counts its rounds from an earlier one again."""
    inbox = WorkInbox()
    inbox.train(command(), NOTHING)
    newest = inbox.train(command(**fields), NOTHING)
    assert inbox.find(7) is newest


async def test_only_new_and_undelivered_assignments_are_handed_out() -> None:
    inbox = WorkInbox()
    first = inbox.train(command(), NOTHING)
    assert await inbox.take() is first
    inbox.train(command(), NOTHING)
    second = inbox.train(command(model_digest=OTHER_BASE), NOTHING)
    assert await inbox.take() is second  # not the first again
    second.undelivered = True
    inbox.train(command(model_digest=OTHER_BASE), NOTHING)
    assert await inbox.take() is second
    assert not second.undelivered


def test_an_assignment_does_not_match_a_command_of_another_run() -> None:
    mine = Assignment(command(), 0.0, accepted_name=MINE)
    assert mine.matches(command(), known())
    assert not mine.matches(command(run_id="other"), known())


@pytest.mark.parametrize("max_jobs", range(1, 9))
def test_a_command_ends_others_only_where_there_is_no_room_for_it(max_jobs: int) -> None:
    inbox = WorkInbox(max_jobs)
    taken = [inbox.train(command(round=number, job=pb.JobSpec(job_id=number)), NOTHING) for number in range(1, 12)]
    assert [each.end_reason for each in taken] == ["next_round"] * (11 - max_jobs) + [""] * max_jobs


@pytest.mark.parametrize("seconds", [float("nan"), -1.0, float("inf"), 1e300])
def test_a_deadline_that_is_no_time_has_passed_or_ends_within_the_longest_one(seconds: float) -> None:
    assignment = WorkInbox().train(command(deadline_seconds=seconds), NOTHING)
    assert 0 <= assignment.deadline <= time.monotonic() + MAX_SECONDS


def test_a_server_cannot_let_any_number_of_evaluations_wait() -> None:
    inbox = WorkInbox()
    for number in range(100):
        job = pb.JobSpec(job_id=number)
        inbox.evaluate(pb.EvaluateCmd(run_id="run", round=number, job=job, deadline_seconds=600.0))
    inbox.train(command(), NOTHING)
    handed_out: list[int] = []
    while isinstance(work := asyncio.run(inbox.take()), EvaluationOrder):
        handed_out.append(work.command.round)
    assert handed_out == list(range(36, 100))
