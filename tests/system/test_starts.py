"""What jobs start from on a real fl-server: told when they start, and decided once, even if the server is killed."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from fedring.control.failure import Failure
from fedring.train.models import digits_mlp, vector
from fedring.train.names.offered import collect
from fedring.train.names.seam import build_model
from fedring.train.tensors.state import read_vectors
from fedring.v1 import control_pb2
from fedring.v1 import federation_pb2 as pb
from tests.damage import set_epoch
from tests.fleets import Control, Fleet, run_job, until_watching
from tests.system.wire import (
    SIZE,
    WireClient,
    deliver,
    outcome,
    parameters,
    payload_of,
    published_version,
    run,
    vector_job,
)

ONES = np.ones(SIZE, np.float32)
DIGITS: dict[str, Any] = {"model": "fedring.train.models:digits_mlp", "model_args": {"hidden": 4}}
Clients = Callable[..., list[WireClient]]


def initial(seed: int) -> "np.ndarray[Any, np.dtype[np.float32]]":
    """Return the parameters of a new model that is made with this seed."""
    return read_vectors(build_model(DIGITS["model"], DIGITS["model_args"], seed, collect(["fedring"]))).parameters


def evaluate(client: WireClient, correct: Sequence[int], *, of: int = 10, step: float = 1.0) -> None:
    """Deliver an update, and report this many correct answers, once for each round."""
    for count in correct:
        deliver(client, np.full(SIZE, step, np.float32))
        order = client.expect("evaluate")
        report = pb.EvaluationReport(round=order.round, model_digest=order.model_digest, correct=count, total=of)
        client.commands.ReportEvaluation(report, metadata=client.metadata)


def push_ones(client: WireClient, command: pb.TrainCmd) -> None:
    """Answer a command for a model of DIGITS with ones."""
    payload = payload_of(np.ones_like(initial(0)))
    client.push(client.header(command, payload), payload)


def told_until_the_end(control: Control, job_id: int) -> list[control_pb2.Event]:
    """Return all events that the server keeps, up to the end of the job."""
    events = control.events(after=1)
    told: list[control_pb2.Event] = []
    for event in events:
        told.append(event)
        if event.kind == "job_ended" and event.job_id == job_id:
            break
    events.cancel()
    return told


def started(events: Sequence[control_pb2.Event]) -> str:
    """Return the sentence that said what the job starts from."""
    (text,) = (event.text for event in events if event.kind == "job_started")
    return text


def test_a_job_that_starts_fresh_has_a_new_model_of_its_seed_on_a_used_server(
    control: Control, clients: Clients
) -> None:
    (client,) = clients()
    commands: list[pb.TrainCmd] = []
    for start, seed in (("fresh", 1), ("fresh", 2), ("newest", 3), ("fresh", 1)):
        job_id, events = run(control, **DIGITS, start=start, seed=seed)
        command: pb.TrainCmd = client.expect("train")
        values = parameters(client, command.model_version)
        expected = initial(seed) if start == "fresh" else initial(2) + 1
        np.testing.assert_array_equal(values, expected)
        commands.append(command)
        push_ones(client, command)
        told = started(list(events))
        version = command.model_version
        words = (
            f"starts fresh, as version {version}" if start == "fresh" else f"starts from version {version}, the newest"
        )
        assert f"job {job_id} (job) {words}: 1 round of {DIGITS['model']}" == told
        job = control.job(job_id)
        assert (job.state, job.start, job.start_version) == ("completed", start, version)
        assert [round_.base_version for round_ in control.rounds(job_id=job_id)] == [version]
    assert [command.model_version for command in commands] == [1, 3, 4, 6]
    assert commands[0].model_digest == commands[3].model_digest != commands[1].model_digest
    # What a client has left out of updates belongs only to the models that followed them.
    first, second, third, _ = (command.round for command in commands)
    assert [command.residual_after for command in commands] == [0, first, first, third]
    assert second < third


def test_a_line_of_models_that_begins_after_a_restore_is_another_one_although_rounds_count_again(
    tmp_path: Path,
) -> None:
    state = tmp_path / "state" / "server"
    lines: list[tuple[int, int]] = []
    with Fleet(tmp_path) as fleet:
        for epoch in (0, 7):
            if epoch:
                fleet.server.kill()
                set_epoch(state, epoch)
                fleet.start_server()
            with Control(fleet.control) as control, WireClient(fleet.listen) as client:
                for start in ("newest", "fresh"):
                    job_id, events = run(control, start=start, evaluate=True)
                    command: pb.TrainCmd = client.expect("train")
                    lines.append((command.residual_after_epoch, command.residual_after))
                    payload = payload_of(ONES)
                    client.push(client.header(command, payload), payload)
                    order = client.expect("evaluate")
                    assert (order.residual_after_epoch, order.residual_after) == lines[-1]
                    report = pb.EvaluationReport(round=order.round, model_digest=order.model_digest)
                    client.commands.ReportEvaluation(report, metadata=client.metadata)
                    assert outcome(control, job_id, events).state == "completed"
    assert lines == [(0, 0), (0, 1), (0, 1), (7, 3)]


def test_a_job_starts_from_the_best_version_and_each_job_keeps_its_best(tmp_path: Path) -> None:
    settings = {"keep_models": 1, "keep_jobs": 2}
    with Fleet(tmp_path, settings) as fleet, Control(fleet.control) as control, WireClient(fleet.listen) as client:
        for start, correct in (("fresh", [2, 9, 5]), ("fresh", [1, 3]), ("best", [4]), ("newest", [5])):
            job_id, events = run(control, evaluate=True, rounds=len(correct), start=start)
            evaluate(client, correct)
            assert outcome(control, job_id, events).state == "completed"
        jobs = {job.job_id: job for job in control.jobs()}
        assert [jobs[number].start_version for number in (1, 2, 3, 4)] == [1, 5, 3, 8]
        texts = [event.text for event in told_until_the_end(control, 4) if event.kind == "job_started"]
        assert "job 3 (job) starts from version 3, the best (eval/accuracy 0.9)" in texts[2]
        # Of the last two jobs, the newest and the best are kept, and the newest of all.
        assert [(model.version, model.job_id, model.best_of_job) for model in control.models()] == [
            (9, 4, True),
            (8, 3, True),
        ]
        np.testing.assert_array_equal(parameters(client, 8), 3 * ONES)  # version 3 held two updates


def test_a_job_starts_from_a_version_that_is_kept_while_it_waits_for_its_turn(tmp_path: Path) -> None:
    settings = {"keep_models": 1, "keep_jobs": 0}
    with Fleet(tmp_path, settings) as fleet, Control(fleet.control) as control, WireClient(fleet.listen) as client:
        job_id, events = run(control)
        deliver(client)
        outcome(control, job_id, events)
        version = control.models()[0].version
        first, _ = run(control, rounds=3)
        assert control.job(first).start == "newest"  # what a program gets that does not name a start
        waiting, events = run(control, start=version)
        for _ in range(3):
            deliver(client)
        deliver(client)
        job = outcome(control, waiting, events)
        assert (job.state, job.start, job.start_version) == ("completed", str(version), version)
        assert control.job(first).rounds_done == 3
        np.testing.assert_array_equal(parameters(client), 2 * ONES)


@pytest.mark.parametrize(
    ("point", "delivered"), [("", 0), ("", 1), ("before_begin_commit", 0), ("after_begin_commit", 0)]
)
def test_a_server_that_is_killed_goes_on_where_the_job_was_and_never_starts_it_fresh_twice(
    tmp_path: Path, point: str, delivered: int
) -> None:
    with Fleet(tmp_path) as fleet:
        if point:
            fleet.server.kill()
            fleet.server.env["FL_CRASH_AT"] = point
            fleet.start_server()
        with Control(fleet.control) as control, WireClient(fleet.listen) as client:
            job_id = control.start_job(vector_job(**DIGITS, rounds=3, start="fresh", seed=7)).job_id
            if point:
                fleet.server.wait()
            for number in range(delivered + 1 if not point else 0):
                command: pb.TrainCmd = client.expect("train")
                if number < delivered:
                    push_ones(client, command)
                    published_version(control, command.round)
        fleet.server.env.pop("FL_CRASH_AT", None)
        fleet.restart_server()  # which kills it first
        with Control(fleet.control) as control, WireClient(fleet.listen) as client:
            seen = []
            for _ in range(3 - delivered):
                command = client.expect("train")
                seen.append(parameters(client, command.model_version))
                push_ones(client, command)
            job = outcome(control, job_id, control.follow_job(job_id))
            assert (job.state, job.rounds_done, job.start_version) == ("completed", 3, 1)
            np.testing.assert_allclose(seen[0], initial(7) + delivered, rtol=1e-6)
            np.testing.assert_allclose(parameters(client), initial(7) + 3, rtol=1e-5)
            assert [model.version for model in control.models()] == [4, 3, 2, 1]
            texts = [event.text for event in told_until_the_end(control, job_id) if event.kind == "job_started"]
            again = f"goes on from version {1 + delivered}" if point != "before_begin_commit" else "starts fresh"
            assert again in texts[-1]


def test_a_job_that_fails_names_the_way_to_go_on_from_its_last_model(control: Control, clients: Clients) -> None:
    (client,) = clients()
    job_id, events = run(control, rounds=5, start="fresh", max_abandoned=1)
    command = deliver(client)
    client.say(pb.WatchRequest(matched=True, failure=pb.Failure(round=client.expect("train").round, reason="no_data")))
    job = outcome(control, job_id, events)
    assert job.state == "failed"
    version = command.model_version + 1
    assert job.reason.endswith(f"; to go on from its last model, version {version}, start a job with start=newest")
    job_id, events = run(control, start="newest")
    assert deliver(client).model_version == version
    assert outcome(control, job_id, events).start_version == version


def test_a_job_ends_early_when_nothing_better_comes(control: Control, clients: Clients) -> None:
    (client,) = clients()
    job_id, events = run(control, rounds=20, evaluate=True, patience=3, start="fresh")
    evaluate(client, [4, 6, 6, 5, 6])
    job = outcome(control, job_id, events)
    assert (job.state, job.rounds_done) == ("completed", 5)
    best = job.start_version + 2
    assert job.reason == f"it ended early: version {best} (eval/accuracy 0.6) was not surpassed for 3 rounds"
    (model,) = (model for model in control.models() if model.job_id == job_id and model.best_of_job)
    assert model.version == best


def test_a_job_starts_from_a_file_that_the_server_allows(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    given = vector(SIZE)
    torch.nn.init.constant_(given.get_parameter("values"), 3.0)
    save_file(given.state_dict(), folder / "threes.safetensors")
    torch.save(digits_mlp().state_dict(), folder / "digits.pt")
    (tmp_path / "secret.pt").write_bytes((folder / "digits.pt").read_bytes())
    (folder / "link.pt").symlink_to(tmp_path / "secret.pt")
    with Fleet(tmp_path, {"init_path": str(folder)}) as fleet, Control(fleet.control) as control:
        client = WireClient(fleet.listen)
        with client:
            for start in ("threes.safetensors", str(folder / "threes.safetensors")):
                job_id, events = run(control, start=start)
                command = deliver(client)
                np.testing.assert_array_equal(parameters(client, command.model_version), 3 * ONES)
                job = outcome(control, job_id, events)
                assert (job.state, job.start, job.start_version) == ("completed", start, command.model_version)
            for start, words in (
                ("digits.pt", "does not fit the model"),
                ("threes.safetensor", "is not on the server's machine: did you mean threes.safetensors?"),
                ("../secret.pt", "is not in init_path"),
                (str(tmp_path / "secret.pt"), "is not in init_path"),
                ("link.pt", "is not in init_path"),
                ("/etc/passwd", "is not in init_path"),
            ):
                with pytest.raises(Failure) as refused:
                    control.start_job(vector_job(start=start))
                assert str(refused.value).startswith("start: ")
                assert words in str(refused.value)
            first, _ = run(control)
            job_id, events = run(control, start="threes.safetensors")
            (folder / "threes.safetensors").rename(folder / "away")
            deliver(client)
            job = outcome(control, job_id, events)
            assert (control.job(first).state, job.state, job.start_version) == ("completed", "failed", 0)
            assert job.reason.startswith(
                "start names the file threes.safetensors, which is not on the server's machine"
            )


def test_the_jobs_of_all_modes_start_where_they_are_told_to(tmp_path: Path) -> None:
    with Fleet(tmp_path, {}, [{}, {}]) as fleet, Control(fleet.control) as control:
        until_watching(control, 2)
        starts = []
        for mode, start, seed in (
            ("data_parallel", "fresh", 1),
            ("pipeline", "fresh", 2),
            ("data_parallel", "newest", 3),
            ("pipeline", "best", 3),
            ("federated", "fresh", 1),
        ):
            job = run_job(control, {**DIGITS, "mode": mode, "start": start, "seed": seed, "batch_size": 256})
            assert (job.state, job.start) == ("completed", start), job.reason
            starts.append(job.start_version)
        models = {model.version: model for model in control.models()}
        best = max((models[version] for version in (2, 4, 5)), key=lambda model: (model.accuracy, -model.version))
        assert starts == [1, 3, 4, best.version, 7]
        assert models[1].digest == models[7].digest != models[3].digest
