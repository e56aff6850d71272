"""Mistakes and failures over the ring: every rank raises in time, and its error names the rank at fault."""

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.system.ring_scripts import failures, ranks


@pytest.mark.parametrize(
    "body",
    [
        failures.another_shape,
        failures.another_large_shape,
        failures.another_dtype,
        failures.another_collective,
        failures.nothing_against_something,
        failures.another_sparse_shape,
    ],
    ids=lambda body: body.__name__,
)
def test_all_ranks_raise_if_they_run_different_collectives(body: ranks.Body, tmp_path: Path) -> None:
    errors = ranks.run(body, 3, tmp_path)
    assert [error["kind"] for error in errors] == ["Mismatch"] * 3, errors
    for error in errors:
        sides = re.match(r"rank \d runs (\S.+), and rank \d runs (\S.+) \(key \S+\)", error["text"])
        assert sides is not None, errors
        assert "another operation" not in sides[1]
        assert sides[1] != sides[2]


@pytest.mark.parametrize(
    ("body", "late"),
    [
        (failures.a_rank_that_does_not_come, 1),
        (failures.a_barrier_that_is_not_reached, 1),
        (failures.a_wait_that_ends_early, 1),
        (failures.a_message_that_nobody_sends, None),
    ],
    ids=["all_reduce", "barrier", "wait", "message"],
)
def test_a_timeout_names_the_rank_that_is_late(body: ranks.Body, late: int | None, tmp_path: Path) -> None:
    errors = ranks.run(body, 2, tmp_path)
    assert [error["kind"] for error in errors] == ["CollectiveTimeout"] * 2, errors
    assert errors[0]["rank"] == late


@pytest.mark.parametrize(("name_all", "names"), [(False, "Rank 1"), (True, "Ranks 1, 3")])
def test_a_monitored_barrier_names_the_ranks_that_have_not_come(name_all: bool, names: str, tmp_path: Path) -> None:
    body = partial(failures.a_monitored_barrier_that_some_do_not_reach, name_all=name_all)
    errors = ranks.run(body, 4, tmp_path)
    assert [error["kind"] for error in errors] == ["CollectiveTimeout"] * 4, errors
    assert {error["rank"] for error in errors} == {1}
    assert errors[0]["text"] == f"{names} failed to pass monitoredBarrier after 3000 ms"
    assert errors[2]["text"].startswith("Rank 2 successfully reached monitoredBarrier, but received errors")
    assert names in errors[2]["text"]


def test_a_monitored_barrier_names_a_rank_that_has_left(tmp_path: Path) -> None:
    error, _ = ranks.run(failures.a_monitored_barrier_that_a_rank_has_left, 2, tmp_path)
    assert (error["kind"], error["rank"]) == ("PeerLost", 1)
    assert "Rank 1 failed to pass monitoredBarrier: rank 1 has left" in error["text"]


def test_an_error_in_a_callback_reaches_those_who_wait(tmp_path: Path) -> None:
    errors = ranks.run(failures.a_failing_callback, 2, tmp_path)
    assert [error["kind"] for error in errors] == ["IndexError"] * 2, errors


def test_an_error_in_a_hook_reaches_the_training_loop(tmp_path: Path) -> None:
    errors = ranks.run(failures.a_failing_hook, 2, tmp_path)
    for error in errors:
        assert (error["kind"], error["text"]) == ("LookupError", "the hook has failed"), errors


@pytest.mark.parametrize("hook", [False, True], ids=["without a hook", "with a hook"])
def test_a_failed_group_ends_ddps_backward(hook: bool, tmp_path: Path) -> None:
    errors = ranks.run(partial(failures.failing_backward, hook=hook), 3, tmp_path)
    for rank in (0, 2):
        assert errors[rank]["kind"] == ("RingError" if hook else "RuntimeError"), errors  # C++ loses the kind
        assert "rank 1 has aborted" in errors[rank]["text"], errors


def test_what_is_not_supported_is_an_error_and_the_group_can_still_be_used(tmp_path: Path) -> None:
    for errors in ranks.run(failures.what_is_not_supported, 2, tmp_path):
        *refusals, after = errors
        assert [error["kind"] for error in refusals] == ["NotSupported"] * 5, errors
        assert after == {"sum": 6.0}


def test_wrong_arguments_of_one_rank_raise_there_and_the_group_goes_on(tmp_path: Path) -> None:
    for rank, (errors, sums) in enumerate(ranks.run(failures.wrong_arguments, 3, tmp_path)):
        expected = list(failures.WRONG.values()) if rank == 1 else [""] * len(failures.WRONG)
        assert [error["kind"] for error in errors.values()] == expected, errors
        assert sums == [3.0] * len(failures.WRONG)


def test_generations_follow_each_other_in_one_process(tmp_path: Path) -> None:
    folder = tmp_path / "store"
    folder.mkdir()
    results: list[Any] = ranks.run(partial(failures.generations, folder=str(folder)), 3, tmp_path / "run", backend="")
    for rank, (first, second, third, fourth) in enumerate(results):
        assert (first, third) == (3.0, 9.0)
        assert second["kind"] == "PeerLost"
        assert second["rank"] == 1
        assert fourth == ("stayed away" if rank == 2 else "PeerLost")


@pytest.mark.parametrize("local_transport", [True, False])
def test_a_fork_of_a_rank_raises_and_leaves_the_ranks_alone(local_transport: bool, tmp_path: Path) -> None:
    body = partial(failures.forked, folder=str(tmp_path), local_transport=local_transport)
    results = ranks.run(body, 3, tmp_path / "run", backend="")
    for result in results:
        assert result["sums"] == [[6.0]] * 4, result
    children = results[0]["children"]
    assert [error["kind"] for error in children] == ["Forked"] * 13, children
    for error in children:
        assert "is a fork of process" in error["text"], error


def test_a_group_of_the_ring_and_of_another_backend_by_devices_is_refused(tmp_path: Path) -> None:
    body = partial(failures.beside_another_backend, folder=str(tmp_path))
    for first, second, both, third, found in ranks.run(body, 2, tmp_path / "run", backend=""):
        for error, given in (
            (first, "cpu:fedring,cuda:gloo"),
            (second, "cpu:gloo,cuda:fedring"),
            (third, first["text"]),
        ):
            assert error["kind"] == "NotSupported", error
            assert given in error["text"] or given == error["text"], error
            assert "leaves none to gloo" in error["text"]
        assert both["kind"] == ""
        assert found == {"sum": 4.0}
