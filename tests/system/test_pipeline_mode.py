"""Pipeline jobs on real daemons: the model ends with the values that training in one process gives it."""

import json
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fedring.data import digits
from fedring.pipeline.stage import Stage
from fedring.pipeline.stash import WeightStashing
from fedring.pipeline.worker import LocalPipeline
from fedring.train.evaluation import evaluate
from fedring.train.jobs.pipeline_table import Pipeline
from fedring.train.models import digits_mlp
from fedring.train.names.offered import Offered, collect
from fedring.train.names.seam import build_model
from fedring.train.tensors.files import load_model
from fedring.workers.cutting import count_layers, cut_model
from fedring.workers.shards import GroupRank, count_steps, epoch_order, shares
from tests.conftest import path_to
from tests.fleets import Control, Flctl, Fleet, run_job
from tests.metrics_page import Page, address_of
from tests.reference_training import train_in_one_process
from tests.system.user_models import normed

HERE = Path(__file__).parent
MODEL = "fedring.train.models:digits_mlp"
TRUSTED = {"trusted": ["fedring", "user_models"]}
BATCH, ROUNDS, SAMPLES = 32, 2, 1437

FleetOf = Callable[[int], Fleet]


def job(pipeline: dict[str, Any], *, hidden: int = 32, **keys: Any) -> dict[str, Any]:
    """Return a job; with a new number of hidden units, it starts with a new model on a server that ran other jobs."""
    fixed = {"mode": "pipeline", "batch_size": BATCH, "rounds": ROUNDS, "model": MODEL}
    fixed |= {"model_args": {"hidden": hidden, "layers": 3}}
    return {**fixed, "momentum": 0.9, "barrier_timeout_seconds": 60, "pipeline": pipeline, **keys}


@pytest.fixture(scope="module")
def fleet_of(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[int], Fleet]]:
    """Return a fleet of so many clients, which all jobs of this file share."""
    with ExitStack() as stack:

        @cache
        def start(workers: int) -> Fleet:
            folder = tmp_path_factory.mktemp(f"workers-{workers}")
            return stack.enter_context(Fleet(folder, TRUSTED, [TRUSTED] * workers, env=path_to(HERE)))

        yield start


def trained(fleet: Fleet, spec: dict[str, Any], tmp_path: Path) -> tuple[nn.Module, list[Any]]:
    """Run a job, and return the model that it ends with, and its rounds, oldest first."""
    with Control(fleet.control) as control:
        events = control.events()
        job_id = control.start_job(spec).job_id
        for _ in control.follow_job(job_id, events):
            pass
        assert control.job(job_id).state == "completed", [daemon.tail(20) for daemon in fleet.clients]
        path = tmp_path / "model.safetensors"
        control.export_model(0, path)
        rounds = sorted(control.rounds(job_id=job_id), key=lambda round_: round_.round)
        assert [round_.job_round for round_ in rounds] == [1, 2]
        return load_model(path, digits_mlp(**spec["model_args"])), rounds


def first_model(spec: dict[str, Any]) -> nn.Module:
    """Return the model that the job begins with."""
    return build_model(MODEL, spec["model_args"], 0, collect(["fedring"]))


def alone(spec: dict[str, Any], rounds: list[Any], replicas: int = 1) -> nn.Module:
    """Train in one process with the batches of the job, and return the model."""
    model = first_model(spec)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return train_alone(model, optimizer, rounds, replicas)


def train_alone(model: nn.Module, optimizer: torch.optim.Optimizer, rounds: list[Any], replicas: int = 1) -> nn.Module:
    """Train the model in one process with the batches of these rounds."""
    samples: Any = digits().train
    orders = [epoch_order(len(samples), seed=round_.job_round, epoch=0) for round_ in rounds]
    return train_in_one_process(model, optimizer, samples, orders, batch=BATCH, replicas=replicas)


def same(model: nn.Module, expected: nn.Module) -> None:
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("table", "workers", "hidden"),
    [
        ({"stages": 2, "schedule": "1f1b"}, 2, 32),
        ({"stages": 3, "schedule": "1f1b", "cut": ["3", "5"], "recompute": True, "checkpoint_every": 7}, 3, 32),
        ({"stages": 4, "stages_per_worker": 2, "schedule": "interleaved_1f1b", "cut": [2, 2, 2, 2]}, 2, 33),
    ],
    ids=["two", "three", "interleaved"],
)
def test_stages_compute_the_same_as_one_process(
    fleet_of: FleetOf, tmp_path: Path, table: dict[str, Any], workers: int, hidden: int
) -> None:
    spec = job(table, hidden=hidden)
    model, rounds = trained(fleet_of(workers), spec, tmp_path)
    same(model, alone(spec, rounds))
    steps = count_steps(SAMPLES, 1, BATCH)
    for number, round_ in enumerate(rounds, start=1):
        assert (round_.phase, round_.selected, round_.delivered, list(round_.missing)) == (
            "published",
            workers,
            workers,
            [],
        )
        assert round_.eval_total == 360
        reported = [dict(client.metrics) for client in round_.clients]
        assert sorted(row["stage"] for row in reported) == list(range(workers))
        for row in reported:
            assert (row["steps"], row["job_steps"]) == (steps, number * steps)
            assert 0 <= row["bubble_ratio"] < 1
            assert row["bytes_sent"] > 0
            assert min(row["forward_seconds"], row["backward_seconds"], row["update_seconds"]) > 0
            assert row["accuracy"] > 0.1
        assert max(row["in_flight"] for row in reported) <= 2 * workers
    assert sum(client.upload_bytes > 0 for client in rounds[0].clients) == 1
    assert rounds[-1].eval_correct / rounds[-1].eval_total > 0.8
    held_out: Any = digits().test
    counts = evaluate(model, held_out, loss=nn.functional.cross_entropy, device=torch.device("cpu"))
    assert abs(rounds[-1].eval_correct - (counts.correct or 0)) <= 1  # outputs may be rounded in another way
    assert rounds[-1].eval_loss_sum == pytest.approx(counts.loss_sum, rel=1e-3)


def test_the_state_of_adam_is_kept_from_round_to_round(fleet_of: FleetOf, tmp_path: Path) -> None:
    keys = {"optimizer": "fedring.train.optimizers:adam", "lr": 0.01}
    spec = job({"schedule": "gpipe", "micro_batches": 2, "checkpoint_every": 0}, hidden=34, **keys)
    model, rounds = trained(fleet_of(2), spec, tmp_path)
    expected = first_model(spec)
    train_alone(expected, torch.optim.Adam(expected.parameters(), lr=0.01, betas=(0.9, 0.999)), rounds)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-2, atol=1e-3)


def test_two_parallel_pipelines_stay_equal_and_average_their_gradients(fleet_of: FleetOf, tmp_path: Path) -> None:
    spec = job({"stages": 2, "replicas": 2, "checkpoint_every": 10}, hidden=35)
    model, rounds = trained(fleet_of(4), spec, tmp_path)
    same(model, alone(spec, rounds, replicas=2))  # workers compared the replicas of each stage at every checkpoint
    reported = [dict(client.metrics) for client in rounds[-1].clients]
    assert sorted(row["stage"] for row in reported) == [0, 0, 1, 1]
    assert {row["steps"] for row in reported} == {count_steps(SAMPLES, 2, BATCH)}


@pytest.mark.parametrize(
    ("table", "workers"),
    [
        ({"stages": 3, "replicas": [1, 2, 1], "micro_batches": 5, "checkpoint_every": 20}, 4),
        ({"stages": 2, "replicas": [2, 2], "schedule": "gpipe", "hook": "fp16(none)", "micro_batches": "auto"}, 4),
    ],
    ids=["in the middle", "all, with a hook"],
)
def test_replicas_of_a_stage_share_its_batches(
    fleet_of: FleetOf, tmp_path: Path, table: dict[str, Any], workers: int
) -> None:
    spec = job(table, hidden=37 + len(table["replicas"]))
    model, rounds = trained(fleet_of(workers), spec, tmp_path)
    expected = alone(spec, rounds)
    if "hook" in table:  # rounding to half precision in one process leads as far away
        ours, theirs = (nn.utils.parameters_to_vector(one.parameters()) for one in (model, expected))
        assert 1e-4 < torch.linalg.vector_norm(ours - theirs) / torch.linalg.vector_norm(theirs) < 0.15
    else:
        same(model, expected)
    reported = [dict(client.metrics) for client in rounds[-1].clients]
    assert sorted(row["stage"] for row in reported) == [
        s for s, count in enumerate(table["replicas"]) for _ in range(count)
    ]
    assert {row["steps"] for row in reported} == {count_steps(SAMPLES, 1, BATCH)}
    assert (rounds[-1].eval_total, rounds[-1].delivered) == (360, workers)
    assert rounds[-1].eval_correct / rounds[-1].eval_total > 0.8


@pytest.mark.parametrize(
    ("table", "workers"),
    [({"stages": 2, "cut": ["second"], "replicas": [2, 1]}, 3), ({"stages": 1, "replicas": 2}, 2)],
    ids=["of one stage", "of a pipeline"],
)
def test_replicas_deliver_the_buffers_of_the_first_one(
    fleet_of: FleetOf, tmp_path: Path, table: dict[str, Any], workers: int
) -> None:
    """Both workers that can deliver the update are replicas of the stage with BatchNorm, and must agree on it."""
    args = {"width": 40 + workers}
    spec = job({**table, "checkpoint_every": 0}, model="user_models:normed", model_args=args, rounds=1)
    with Control(fleet_of(workers).control) as control:
        ended = run_job(control, spec)
        assert ended.state == "completed", ended.reason
        (round_,) = control.rounds(job_id=ended.job_id)
        path = tmp_path / "model.safetensors"
        control.export_model(0, path)
    assert (round_.phase, round_.delivered, round_.eval_total) == ("published", workers, 360)
    model = load_model(path, normed(**args)).eval()
    test: Any = digits().test
    inputs, labels = test.batch(torch.arange(len(test)))
    correct = int((model(inputs).argmax(1) == labels).sum())
    assert correct == round_.eval_correct > 250


def test_pipedream_on_daemons_computes_the_same_as_in_one_process(fleet_of: FleetOf, tmp_path: Path) -> None:
    table = {"stages": 2, "schedule": "pipedream", "micro_batches": 9}
    spec = job(table, hidden=36)
    model, rounds = trained(fleet_of(2), spec, tmp_path)
    same(model, pipedream(spec, Pipeline.model_validate(table), rounds))
    assert rounds[-1].eval_correct / rounds[-1].eval_total > 0.7
    assert {client.metrics["job_steps"] for client in rounds[-1].clients} == {ROUNDS * count_steps(SAMPLES, 1, BATCH)}


def pipedream(spec: dict[str, Any], table: Pipeline, rounds: list[Any]) -> nn.Module:
    """Train with pipedream in one process, and return the model."""
    samples: Any = digits().train
    model = first_model(spec)
    modules = cut_model(model, table, count_layers(model, table, torch.empty), Offered())
    last = len(modules) - 1
    stages = [
        Stage(
            module,
            WeightStashing(torch.optim.SGD(module.parameters(), lr=0.05, momentum=0.9), bound=2),
            loss=nn.functional.cross_entropy if number == last else None,
        )
        for number, module in enumerate(modules)
    ]
    for round_ in rounds:
        steps = shares(epoch_order(SAMPLES, seed=round_.job_round, epoch=0), 0, GroupRank(), BATCH)
        while batches := [samples.batch(share.indices) for share in islice(steps, 9)]:
            pipeline = LocalPipeline(stages, table.schedule_of(len(batches)))
            pipeline.run([inputs for inputs, _ in batches], [labels for _, labels in batches])
    return model


@pytest.mark.parametrize(
    ("hidden", "table"),
    [
        (37, {"schedule": "pipedream", "versions": "macrobatch", "micro_batches": 8}),
        (38, {"schedule": "pipedream", "versions": "vertical", "stages": 3, "micro_batches": 16, "update_interval": 2}),
        (42, {"schedule": "pipedream", "replicas": [1, 2], "micro_batches": 8}),
        (39, {"compute_dtype": "bfloat16", "cut": "time"}),
        (40, {"compute_dtype": "float16", "loss_scale": 256.0, "micro_batches": "auto"}),
        (41, {"cut": "user_models:halves"}),
    ],
    ids=["macrobatch", "vertical", "replicas of pipedream", "bfloat16 by time", "float16 and auto", "own cut"],
)
def test_every_kind_of_pipeline_learns(fleet_of: FleetOf, hidden: int, table: dict[str, Any]) -> None:
    fleet = fleet_of(Pipeline.model_validate(table).workers)
    with Control(fleet.control) as control:
        # Other schedules than these two need fewer steps.
        pace = {"epochs": 5} if "versions" in table else {"epochs": 2, "batch_size": 48, "lr": 0.1}
        spec = job(table, hidden=hidden, rounds=1, **pace)
        ended = run_job(control, spec)
        assert ended.state == "completed", [daemon.tail(20) for daemon in fleet.clients]
        (round_,) = control.rounds(job_id=ended.job_id)
        # Guessing gives 0.1, and the lowest value seen so far is 0.63.
        assert round_.eval_correct / round_.eval_total > 0.4
        assert {client.metrics["micro_batches"] > 0 for client in round_.clients} == {True}


@pytest.mark.parametrize(
    ("model", "table", "sentence"),
    [
        ("user_models:untraceable", {}, "cannot be cut automatically"),
        ("user_models:tied", {}, "tied weights must be in one stage"),
        (MODEL, {"stages": 3}, "cannot make 3 stages"),
        (MODEL, {"cut": ["0"]}, "must be in the model's order, without its first layer"),
    ],
    ids=["untraceable", "tied", "too few layers", "first layer"],
)
def test_a_model_that_cannot_be_cut_is_refused_with_the_reason(
    fleet_of: FleetOf, model: str, table: dict[str, Any], sentence: str
) -> None:
    spec = job(table, model=model, model_args={})
    with Control(fleet_of(Pipeline.model_validate(spec["pipeline"]).workers).control) as control:
        events = control.events()
        job_id = control.start_job(spec).job_id
        failures = [event for event in control.follow_job(job_id, events) if event.kind == "client_failed"]
        assert control.job(job_id).state == "failed"
        # If all workers report it before the group hears of the first, the reason is that there are too few clients.
        reason, _, cause = control.job(job_id).reason.partition(": ")
        assert reason in ("cannot_cut", "too_few_clients")
        assert cause.startswith(failures[0].text)
        for event in failures:  # at least one, which ends the round
            assert "could not train: cannot_cut: The model cannot be cut" in event.text
            assert sentence in event.text


def test_a_loss_that_is_not_finite_ends_the_round_at_once(fleet_of: FleetOf) -> None:
    fleet = fleet_of(2)
    with Control(fleet.control) as control:
        events = control.events()
        spec = job({"replacement_seconds": 600}, hidden=45, lr=1e30, rounds=1)
        found = {event.kind: event for event in control.follow_job(control.start_job(spec).job_id, events)}
        abandoned = found["round_abandoned"]
        assert abandoned.text == f"round 1 of job {abandoned.job_id} was abandoned: diverged"
        assert "use a learning rate below" in "".join(client.tail(50) for client in fleet.clients)


def test_each_worker_has_metrics_of_its_stage(tmp_path: Path) -> None:
    config = {"metrics_listen": "127.0.0.1:0"}
    with Fleet(tmp_path, {}, [config] * 2) as fleet, Control(fleet.control) as control:
        events = control.events()
        for _ in control.follow_job(control.start_job(job({}, rounds=1)).job_id, events):
            pass
        pages = [Page(address_of(client)) for client in fleet.clients]
    steps = count_steps(SAMPLES, 1, BATCH)
    for stage, page in enumerate(pages):
        counts = page.by("kind", "fl_pipe_stage_seconds_count", stage=str(stage))
        micro_batches = 4 * (steps - 1) + 3  # the last step is short
        assert counts == {"forward": micro_batches, "backward": micro_batches, "update": steps}
        assert 0 < page("fl_pipe_bubble_ratio") < 1
        assert page("fl_pipe_inflight_microbatches") == 2 - stage


def test_flctl_try_reports_what_the_stages_took(flctl: Flctl, tmp_path: Path) -> None:
    options = ["mode=pipeline", "pipeline.micro_batches=8", "rounds=1", "--out", str(tmp_path)]
    done = flctl("try", *options)
    assert done.returncode == 0, done.stderr
    assert "sent/worker" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    (row,) = report["rounds"]
    assert {name: worker["stage"] for name, worker in row["workers"].items()} == {"client-0": 0, "client-1": 1}
    assert {worker["micro_batches"] for worker in row["workers"].values()} <= {5, 6, 7, 8}  # the last step is short
