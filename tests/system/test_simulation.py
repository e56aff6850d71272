"""Simulations beside real daemons: the same bytes; and what users type."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from fedring.control.failure import Failure
from fedring.daemon.exits import Exit
from fedring.server.state.sql.store import Store
from fedring.simulation import simulate
from tests.conftest import ROOT
from tests.damage import write
from tests.fleets import PATIENCE, Control, Fleet, run_job, until_watching
from tests.processes import tree_of
from tests.waiting import until

CODE = ROOT / "tests" / "fixtures_user_code"
CLIENTS = 10
RAY_CLUSTER = """
import json, ray, sys
cluster = ray.init(address="local", num_cpus=2, include_dashboard=False, object_store_memory=10**8, log_to_driver=False)
print(json.dumps(cluster.address_info["gcs_address"]), flush=True)
sys.stdin.read()
"""
COMMON: dict[str, Any] = {"rounds": 4, "min_clients": CLIENTS, "sample_clients": 6, "batch_size": 16, "seed": 5}
JOBS: dict[str, dict[str, Any]] = {
    "error feedback, buffers, dropout": {
        "model": "user_simulation:normed", "encoding": "packed", "keep_ratio": 0.05, "epochs": 2,
        "partition": "dirichlet", "alpha": 0.1, "normalize_steps": True,
        "override": [
            {"where": {"gpu": "yes"}, "epochs": 3, "batch_size": 32, "momentum": 0.5},
            {"where": {"site": ["eu", "us"]}, "lr": {"schedule": "step", "start": 0.1, "every": 2, "gamma": 0.5}},
            {"where": {"site": "us"}, "subset_size": 40},
        ],
    },
    "guards, a rule, a schedule, a server optimizer, encoded downloads": {
        "encoding": "uniform", "download_encoding": "uniform", "partition": "shards", "mu": 0.01, "subset_size": 50,
        "server_optimizer": {"name": "SGD", "args": {"lr": 0.9, "momentum": 0.5}}, "update_clip_factor": 0.9,
        "lr": {"schedule": "cosine", "start": 0.1, "end": 0.01},
        "aggregation": {"rule": "centered_clip", "bucketing": 2},
    },
    "a strategy of the user's own": {
        "normalize_steps": True, "partition": "shards", "aggregation": {"rule": "user_strategies:Attentive"},
        "override": [{"where": {"site": "us"}, "lr": 0.01, "clip_norm": 0.5}],
    },
    "control variates, own models, buffers, error feedback": {
        "model": "user_simulation:normed", "encoding": "packed", "partition": "shards", "scaffold": True,
        "momentum": 0.0, "weights": "uniform", "lr": {"schedule": "linear", "start": 0.1, "end": 0.02},
        "personal": {"mu": 0.5}, "override": [{"where": {"gpu": "yes"}, "epochs": 2, "lr": 0.03}],
    },
    "a transform with a state on both sides, error feedback": {
        "model": "user_simulation:normed", "encoding": "packed", "partition": "shards", "weights": "uniform",
        "transforms": [{"name": "feddyn", "args": {"alpha": 0.05, "clients": CLIENTS}}],
    },
    "the server's own update": {
        "encoding": "fp32", "subset_size": 40, "epochs": 2, "mu": 0.01, "clip_norm": 0.3, "precision": "bf16",
        "aggregation": {"rule": "fltrust", "bucketing": 2, "data": "user_simulation:few", "args": {"count": 60}},
        "override": [{"where": {"gpu": "yes"}, "mu": 0.0, "precision": "fp32"}],
    },
}  # fmt: skip


LABELS = [{"gpu": "yes"}, {"site": "eu"}, {}, {"gpu": "yes", "site": "us"}]
"""Of the clients, in turns."""


def without_secret(folder: Path) -> None:
    """Prepare the state of a server without a secret, as a simulation has none: it draws the same buckets."""
    folder.mkdir(parents=True)
    store = Store(f"sqlite:///{folder / 'facts.sqlite'}")
    store.close()
    write(folder, "UPDATE meta SET value = '' WHERE name = 'secret'")


def run_on_daemons(name: str, folder: Path) -> tuple[Path, list[Any]]:
    """Run a job on ten real daemons, with fresh state; return its model, and its rounds."""
    without_secret(folder / "state" / "server")
    trusted = {"trusted": ["fedring", "user_simulation", "user_strategies"]}
    clients = [{**trusted, "threads": 1, "labels": LABELS[each % len(LABELS)]} for each in range(CLIENTS)]
    with (
        Fleet(folder, trusted, clients, env={"PYTHONPATH": str(CODE)}) as fleet,
        Control(fleet.control) as control,
    ):
        until_watching(control, CLIENTS)
        job = run_job(control, {**COMMON, **JOBS[name]})
        control.export_model(0, folder / "model.safetensors")
        rounds = control.rounds(job_id=job.job_id)
        return folder / "model.safetensors", sorted(rounds, key=lambda each: each.round)


@pytest.mark.parametrize("name", JOBS)
def test_the_models_of_a_simulation_are_those_of_ten_daemons_byte_for_byte(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(CODE))
    model, rounds = run_on_daemons(name, tmp_path / "fleet")
    for workers in (1, 2):
        out = tmp_path / str(workers)
        job = {**COMMON, **JOBS[name]}
        report = simulate(job, clients=CLIENTS, workers=workers, threads=1, labels=LABELS, out=out)
        ours, theirs = load_file(out / "model.safetensors"), load_file(model)
        assert {key: value.tobytes() for key, value in ours.items()} == {
            key: value.tobytes() for key, value in theirs.items()
        }
        for row, round_ in zip(report["rounds"], rounds, strict=True):
            assert row["clients"] == round_.delivered == round_.selected
            assert row.get("settings", {}) == round_.settings
            assert row["accuracy"] == pytest.approx(round_.eval_correct / round_.eval_total)
            assert row["metrics"].get("server/weight") == round_.metrics.get("server/weight")
            assert ("eval/accuracy_personal" in row["metrics"]) == ("personal" in JOBS[name])
            for metric in ("train/loss", "eval/accuracy_personal", "eval/loss_personal"):
                assert row["metrics"].get(metric) == pytest.approx(round_.metrics.get(metric)), metric
    if name == "a strategy of the user's own":
        assert [round_.settings["lr"] for round_ in rounds[1:]] == [0.1, 0.1 / 2, 0.1 / 3]
        assert [round_.selected for round_ in rounds] == [6, 5, 4, 3]


def test_without_the_residuals_of_the_clients_the_models_would_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(CODE))
    job = {**COMMON, **JOBS["error feedback, buffers, dropout"]}
    simulate(job, clients=CLIENTS, workers=1, threads=1, labels=LABELS, out=tmp_path / "with")
    monkeypatch.setattr("fedring.simulation.vectors.ClientSections.put", lambda self, client, sections: None)
    simulate(job, clients=CLIENTS, workers=1, threads=1, labels=LABELS, out=tmp_path / "without")
    models = [(tmp_path / out / "model.safetensors").read_bytes() for out in ("with", "without")]
    assert models[0] != models[1]


def test_clients_that_fail_under_masks_make_the_same_model_here_and_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(CODE))
    job: dict[str, Any] = {
        "model": "fedring.train.models:vector", "model_args": {"size": 400}, "rounds": 1, "seed": 0,
        "weights": "samples", "min_clients": CLIENTS, "min_clients_to_aggregate": 7, "evaluate": False,
        "secure_aggregation": {"block": 16, "step": 0.25, "first_norm": 20.0},
    }  # fmt: skip
    trainer = {"trainer": "user_simulation:adds_or_fails"}
    with (
        Fleet(tmp_path, {}, [{**trainer, "threads": 1}] * CLIENTS, env={"PYTHONPATH": str(CODE)}) as fleet,
        Control(fleet.control) as control,
    ):
        until_watching(control, CLIENTS)
        events = control.events()
        job_id = control.start_job(job).job_id
        for _ in control.follow_job(job_id, events):
            pass
        control.export_model(0, tmp_path / "model.safetensors")
        (round_,) = control.rounds(job_id=job_id)
        assert (round_.delivered, round_.selected) == (CLIENTS, CLIENTS)
    report = simulate({**job, **trainer}, clients=CLIENTS, workers=1, threads=1, out=tmp_path / "out")
    assert 0 < len(report["rounds"][0]["failures"]) < CLIENTS
    ours, theirs = (load_file(folder / "model.safetensors") for folder in (tmp_path / "out", tmp_path))
    assert {key: value.tobytes() for key, value in ours.items()} == {
        key: value.tobytes() for key, value in theirs.items()
    }
    assert 0 < next(iter(ours.values())).mean() < 1


@pytest.mark.soak
@pytest.mark.timeout(1200)  # Ray takes minutes to start on a busy machine
@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
def test_actors_on_a_ray_cluster_make_the_model_of_local_workers_byte_for_byte(tmp_path: Path) -> None:
    roots = (CODE, *(ROOT / part for part in ("client", "common", "protos", "server")))
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join(map(str, roots)),
        "RAY_raylet_start_wait_time_s": "300",
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
    }
    job = tmp_path / "job.json"
    job.write_text(json.dumps(COMMON | JOBS["control variates, own models, buffers, error feedback"]))

    def flctl(out: str, *options: str) -> subprocess.CompletedProcess[str]:
        given = [
            "--clients",
            str(CLIENTS),
            "--threads",
            "1",
            "--labels",
            "gpu=yes",
            "--out",
            str(tmp_path / out),
            *options,
        ]
        command = [sys.executable, "-m", "fedring.ctl.main", "simulate", str(job), *given]
        return subprocess.run(command, env=env, stderr=subprocess.PIPE, text=True, timeout=600)

    cluster = subprocess.Popen(
        [sys.executable, "-c", RAY_CLUSTER], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    with cluster:
        assert cluster.stdout is not None
        env["RAY_ADDRESS"] = json.loads(cluster.stdout.readline())
        assert flctl("local", "--workers", "2").returncode == 0
        assert flctl("ray", "--workers", "2", "--engine", "ray").returncode == 0
        refused = flctl("large", "--workers", "3", "--engine", "ray")
        cluster.communicate()  # which closes its input
    models = [(tmp_path / engine / "model.safetensors").read_bytes() for engine in ("local", "ray")]
    assert models[0] == models[1]
    assert refused.returncode == Exit.CONFIG
    assert refused.stderr == (
        "flctl: workers = 3 with threads = 1 need more CPUs than the Ray cluster has, which has room for 2\n"
    )


@pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="Ray is installed")
def test_without_ray_the_engine_says_what_to_install() -> None:
    with pytest.raises(Failure, match=r"engine=ray needs Ray, which is not installed: install fedring\[ray\]"):
        simulate(COMMON, clients=CLIENTS, engine="ray")


def test_the_study_of_the_documentation_compares_three_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    study = importlib.import_module("study")
    monkeypatch.setattr(
        study, "simulate", partial(simulate, workers=1, threads=1)
    )  # so that no process must import torch
    study.main(tmp_path / "study", 2)
    results = json.loads((tmp_path / "study" / "study.json").read_text())
    assert [[len(curve) for curve in curves] for curves in results.values()] == [[2, 2, 2]] * 3
    assert (tmp_path / "study" / "study.png").stat().st_size > 10_000


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.soak)])
def test_a_signal_ends_the_simulation_with_its_workers_and_leaves_no_files(number: int, tmp_path: Path) -> None:
    job = tmp_path / "job.toml"
    job.write_text("rounds = 1000000\n")
    out = tmp_path / "out"
    command = [sys.executable, "-m", "fedring.ctl.main", "simulate", str(job), "--clients", "50", "--workers", "2"]
    with subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as run:
        until(lambda: run.poll() is not None or list(out.glob(".simulation-*/kept")))  # the first model is made
        children = tree_of(run.pid)[1:]
        run.send_signal(number)
        assert run.wait(PATIENCE) != 0
    assert len(children) >= 2  # the second worker, and the process that has forked it
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    assert list(out.iterdir()) == []
