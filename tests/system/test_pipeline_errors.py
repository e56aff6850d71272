"""A job's own code that raises an exception in one stage: it is an error of the job, not a lost worker."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from fedring.v1 import control_pb2 as pb
from tests.conftest import path_to
from tests.fleets import Control, Fleet, until_watching

HERE = Path(__file__).parent
TRUSTED = {"trusted": ["fedring", "faulty_stages"]}
WORKERS, SECONDS = 3, 60.0  # the group would wait ten times as long for a replacement


def job(args: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    table = {"stages": WORKERS, "cut": ["4", "7"], "replacement_seconds": 600, **keys.pop("pipeline", {})}
    fixed = {"mode": "pipeline", "model": "faulty_stages:net", "model_args": args or {}, "batch_size": 96}
    return {**fixed, "rounds": 5, "deadline_seconds": 600, "pipeline": table, **keys}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Start as many clients as there are stages; the code of one job must not disturb the next one."""
    with Fleet(tmp_path_factory.mktemp("fleet"), TRUSTED, [TRUSTED] * WORKERS, env=path_to(HERE)) as running:
        yield running


def events_of(control: Control, spec: dict[str, Any], reason: str = "train_error") -> dict[str, pb.Event]:
    """Run a job, and return its first event of each kind; no client may fail for another reason."""
    events, found = control.events(), dict[str, pb.Event]()
    for event in control.follow_job(control.start_job(spec).job_id, events):
        found.setdefault(event.kind, event)
        assert event.kind != "client_failed" or reason in event.text  # only the client with the error has failed
    return found


@pytest.mark.parametrize(
    ("spec", "stage", "sentence"),
    [
        (job({"way": "forward", "error": "ValueError", "stage": 0}), 0, "ValueError: no luck in the forward"),
        (job({"way": "backward", "error": "ValueError", "stage": 1}), 1, "ValueError: no luck in the backward"),
        (job({"way": "forward", "error": "RuntimeError", "stage": 2}), 2, "RuntimeError: no luck in the forward"),
        (job(loss="faulty_stages:loss"), 2, "ValueError: no luck in the loss"),
        (job(pipeline={"recompute": True}, loss="faulty_stages:loss"), 2, "ValueError: no luck in the loss"),
        (job(data="faulty_stages:samples"), None, "FileNotFoundError: no luck with sample 1000"),
    ],
    ids=["first", "middle", "last", "loss", "recomputed loss", "samples"],
)
def test_an_exception_in_one_stage_ends_the_job_at_once_and_is_reported(
    fleet: Fleet, spec: dict[str, Any], stage: int | None, sentence: str
) -> None:
    with Control(fleet.control) as control:
        events = events_of(control, spec)
        failed, ended = events["client_failed"], events["job_ended"]
        assert (datetime.fromisoformat(ended.at) - datetime.fromisoformat(failed.at)).total_seconds() < SECONDS
        assert "group_formed" in events
        assert sentence in failed.text
        if stage is not None:
            assert failed.client_id == f"client-{stage}"
            assert failed.text.endswith(f"in stage {stage}")
        (round_,) = control.rounds(job_id=ended.job_id)
        assert (round_.phase, round_.reason) == ("abandoned", "train_error")
        assert control.job(ended.job_id).state == "failed"
        assert control.job(ended.job_id).reason.startswith(f"train_error: {failed.text}")


def test_a_client_can_train_the_next_job_after_an_exception(fleet: Fleet) -> None:
    with Control(fleet.control) as control:
        events_of(control, job({"way": "forward", "error": "ValueError", "stage": 1}))
        assert "completed" in events_of(control, job(rounds=1))["job_ended"].text


def test_a_client_whose_code_raises_is_not_replaced(tmp_path: Path) -> None:
    clients = [TRUSTED] * (WORKERS + 1)
    with Fleet(tmp_path, TRUSTED, clients, env=path_to(HERE)) as fleet, Control(fleet.control) as control:
        spec = job({"way": "forward", "error": "ValueError", "stage": 1}, min_clients=WORKERS + 1)
        events = events_of(control, spec)
        assert "no luck" in events["job_ended"].text
        (round_,) = control.rounds(job_id=1)
        assert (round_.reason, round_.selected) == ("train_error", WORKERS)


def test_stages_that_find_other_numbers_of_samples_do_not_train(tmp_path: Path) -> None:
    """The inputs of one sample would meet the label of another."""
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "fewer").touch()
    clients: list[dict[str, Any]] = [TRUSTED, TRUSTED, {**TRUSTED, "data_root": str(tmp_path / "data")}]
    with Fleet(tmp_path, TRUSTED, clients, env=path_to(HERE)) as fleet, Control(fleet.control) as control:
        events = events_of(control, job(data="faulty_stages:some", max_abandoned=1), "other_samples")
        assert "The workers have found 1437, 1437, 1436 training samples" in events["client_failed"].text
        (round_,) = control.rounds(job_id=1)
        assert (round_.phase, round_.reason) == ("abandoned", "other_samples")


def test_stages_without_test_samples_train_all_the_same(fleet: Fleet) -> None:
    with Control(fleet.control) as control:
        assert "completed" in events_of(control, job(data="faulty_stages:untested", rounds=1))["job_ended"].text


def test_stages_without_samples_say_so(fleet: Fleet) -> None:
    with Control(fleet.control) as control:
        events = events_of(control, job(data="faulty_stages:none", max_abandoned=1), "no_data")
        assert "no samples to train on" in events["job_ended"].text


@pytest.mark.parametrize("error", ["OutOfMemoryError", "MemoryError"])
def test_a_client_with_too_little_memory_is_replaced(tmp_path: Path, error: str) -> None:
    fault = {"way": "backward", "error": error, "stage": 1, "once": "fault"}
    settings = TRUSTED | {"data_root": str(tmp_path)}
    clients = [settings] * (WORKERS + 1)
    with Fleet(tmp_path, settings, clients, env=path_to(HERE)) as fleet, Control(fleet.control) as control:
        events = events_of(control, job(fault, min_clients=WORKERS + 1, rounds=1), "out_of_memory")
        failed = events["client_failed"]
        assert f"{error}: no luck in the backward" in failed.text
        assert "group_lost" in events
        assert "completed" in events["job_ended"].text
        (round_,) = control.rounds(job_id=1)
        assert (round_.phase, round_.selected) == ("published", WORKERS + 1)
        assert list(round_.missing) == [failed.client_id]


def test_a_client_whose_disk_is_full_is_replaced(tmp_path: Path) -> None:
    clients = [TRUSTED] * (WORKERS + 2)
    with Fleet(tmp_path, TRUSTED, clients, env=path_to(HERE)) as fleet, Control(fleet.control) as control:
        until_watching(control, len(clients))  # Now their folders stand.
        for number in range(2):  # The first two workers of a group put the update together.
            (tmp_path / "state" / f"client-{number}" / "update.payload.part").symlink_to("/dev/full")
        events = events_of(control, job({}, min_clients=WORKERS + 2, rounds=1), "disk_failed")
        assert "update.payload.part cannot be written: No space left on device" in events["client_failed"].text
        assert "group_lost" in events
        assert "completed" in events["job_ended"].text
