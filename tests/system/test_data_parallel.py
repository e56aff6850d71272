"""Data-parallel jobs on real daemons: they end with what one process alone would have computed."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedring.data import digits
from fedring.train.files import load_model
from fedring.train.models import digits_mlp
from fedring.train.seam import build_model
from fedring.workers.shards import World, count_steps, epoch_order, shares
from tests import forks
from tests.fleets import Control, Fleet

BATCH, WORKERS, ROUNDS = 32, 2, 2


def job(**keys: Any) -> dict[str, Any]:
    fixed = {"mode": "data_parallel", "min_clients": WORKERS, "batch_size": BATCH, "rounds": ROUNDS, "momentum": 0.9}
    return {**fixed, **keys}


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """The workers of all jobs of this file, each of which trains a model of another size, and so begins anew."""
    with Fleet(tmp_path_factory.mktemp("workers"), {}, [{}] * WORKERS) as running:
        yield running


def trained(fleet: Fleet, spec: dict[str, Any]) -> list[Any]:
    """The rounds of the job, oldest first."""
    with Control(fleet.control) as control:
        events = control.events()
        job_id = control.start_job(spec).job_id
        for _ in control.follow_job(job_id, events):
            pass
        assert control.job(job_id).state == "completed", [daemon.tail(20) for daemon in fleet.clients]
        return sorted(control.rounds(job_id=job_id), key=lambda round_: round_.round)


def alone(rounds: Iterable[int]) -> torch.nn.Module:
    """What the job above computes, by one process with batches that are as large as all workers' together."""
    samples: Any = digits().train
    model = build_model("fedring.train.models:digits_mlp", {}, 0, ["fedring"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    for round_ in rounds:
        order = epoch_order(len(samples), seed=round_, epoch=0)
        ranks = [shares(order, 0, World(rank, WORKERS), BATCH) for rank in range(WORKERS)]
        for step in zip(*ranks, strict=True):
            inputs, labels = samples.batch(torch.cat([share.indices for share in step]))
            optimizer.zero_grad()
            torch.nn.functional.cross_entropy(model(inputs), labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
    return model


def test_two_workers_compute_what_one_process_would(fleet: Fleet, tmp_path: Path) -> None:
    rounds, path = trained(fleet, job()), tmp_path / "model.safetensors"
    assert [round_.job_round for round_ in rounds] == [1, 2]
    with Control(fleet.control) as control:
        control.export_model(0, path)
    model = load_model(path, digits_mlp())
    expected = alone(round_.job_round for round_ in rounds)
    for ours, theirs in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-5)
    steps = count_steps(1437, WORKERS, BATCH)
    for number, round_ in enumerate(rounds, start=1):
        assert (round_.phase, round_.selected, round_.delivered, list(round_.missing)) == ("published", 2, 2, [])
        assert round_.eval_total == 360  # each worker evaluates its part of the test samples
        for client in round_.clients:
            told = dict(client.metrics)
            assert (told["steps"], told["job_steps"]) == (steps, number * steps)
            assert told["bytes_sent"] > 4 * 4810 * steps
            assert told["seconds"] >= told["compute_seconds"] > 0
            assert told["wait_seconds"] > 0
    assert sum(client.upload_bytes > 0 for client in rounds[0].clients) == 1


WAYS: dict[str, tuple[dict[str, Any], float]] = {
    "fp16": ({"hook": "fp16"}, 0.6),
    "bf16": ({"hook": "bf16"}, 0.6),
    "int8": ({"hook": "int8"}, 0.35),
    "topk": ({"hook": "topk", "ratio": 0.05}, 0.25),
    "ef21": ({"hook": "topk", "ratio": 0.05, "feedback": "ef21"}, 0.25),
    "powersgd": ({"hook": "powersgd", "rank": 2}, 0.35),
    "batched": ({"hook": "batched_powersgd", "rank": 4}, 0.35),
    "dgc": ({"hook": "dgc", "ratio": 0.01, "warmup_epochs": 0}, 0.1),
    "clipped": ({"hook": "dgc", "ratio": 0.01, "warmup_epochs": 0, "clip": 5.0, "clip_norm": "global"}, 0.1),
    "accumulated": ({"accumulation_steps": 2, "lr_schedule": "cosine", "clip": 5.0}, 1.2),
}
"""Ways to send gradients, and the most that one takes of all of a gradient's bytes."""


@pytest.mark.parametrize("name", WAYS)
def test_each_way_to_send_gradients_trains(fleet: Fleet, name: str) -> None:
    table, most = WAYS[name]
    hidden = 65 + list(WAYS).index(name)
    keys = {"model_args": {"hidden": hidden}, "epochs": 2, "batch_size": 16}
    spec = job(data_parallel={"hash_every": 5, "bucket_mb": 0.01, **table}, **keys)
    rounds = trained(fleet, spec)  # completed: the workers' parameters were equal after every fifth step
    last = rounds[-1]
    least = 0.75 if name == "batched" else 0.8  # of a whole bucket, four ranks are little; seen: 0.89 and more
    assert last.eval_correct / last.eval_total > least
    for client in last.clients:
        told = dict(client.metrics)
        assert told["bytes_sent"] / told["steps"] < most * 4 * (75 * hidden + 10)


def test_the_demo_shows_the_workers_profile(tmp_path: Path) -> None:
    options = ["--mode", "data_parallel", "--hook", "dgc", "--clients", "2", "--rounds", "2", "--out", str(tmp_path)]
    done = forks.run("fedring.ctl.main", "demo", *options, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "sent/worker" in done.stdout
    report = json.loads((tmp_path / "report.json").read_text())
    assert [sorted(row["workers"]) for row in report["rounds"]] == [["client-0", "client-1"]] * 2
