"""Simulations beside real daemons: the same bytes; and what users type."""

import importlib
import json
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from fedring.simulation import simulate
from tests.conftest import ROOT
from tests.fleets import PATIENCE, Control, Fleet, until_watching
from tests.waiting import until

CODE = ROOT / "tests" / "fixtures_user_code"
CLIENTS = 10
COMMON: dict[str, Any] = {"rounds": 4, "min_clients": CLIENTS, "sample_clients": 6, "batch_size": 16, "seed": 5}
JOBS: dict[str, dict[str, Any]] = {
    "error feedback, buffers, dropout": {
        "model": "user_simulation:normed", "encoding": "packed", "keep_ratio": 0.05, "epochs": 2,
        "partition": "dirichlet", "alpha": 0.1, "normalize_steps": True,
    },
    "guards, a rule, a schedule, a server optimizer, encoded downloads": {
        "encoding": "uniform", "download_encoding": "uniform", "partition": "shards", "mu": 0.01, "subset_size": 50,
        "server_optimizer": {"name": "SGD", "args": {"lr": 0.9, "momentum": 0.5}}, "update_clip_factor": 0.9,
        "lr": {"schedule": "cosine", "start": 0.1, "end": 0.01},
        "aggregation": {"rule": "centered_clip", "bucketing": 2},
    },
    "the server's own update": {
        "subset_size": 40, "epochs": 2, "mu": 0.01,
        "aggregation": {"rule": "fltrust", "bucketing": 2, "data": "user_simulation:few", "args": {"count": 60}},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def fleet_runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[Any]]]:
    """Run each job on ten real daemons, with fresh state. Returns its model, and its rounds."""
    runs = {}
    for name, keys in JOBS.items():
        folder = tmp_path_factory.mktemp("fleet")
        trusted = {"trusted": ["fedring", "user_simulation"]}
        client = {**trusted, "threads": 1}
        with (
            Fleet(folder, trusted, [client] * CLIENTS, env={"PYTHONPATH": str(CODE)}) as fleet,
            Control(fleet.control) as control,
        ):
            until_watching(control, CLIENTS)
            events = control.events()
            job_id = control.start_job({**COMMON, **keys}).job_id
            for _ in control.follow_job(job_id, events):
                pass
            control.export_model(0, folder / "model.safetensors")
            runs[name] = (
                folder / "model.safetensors",
                sorted(control.rounds(job_id=job_id), key=lambda each: each.round),
            )
    return runs


@pytest.mark.parametrize("name", JOBS)
@pytest.mark.parametrize("workers", [1, 2])
def test_the_models_of_a_simulation_are_those_of_ten_daemons_byte_for_byte(
    name: str,
    workers: int,
    fleet_runs: dict[str, tuple[Path, list[Any]]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.syspath_prepend(str(CODE))
    model, rounds = fleet_runs[name]
    report = simulate({**COMMON, **JOBS[name]}, clients=CLIENTS, workers=workers, out=tmp_path)
    ours, theirs = load_file(tmp_path / "model.safetensors"), load_file(model)
    assert {key: value.tobytes() for key, value in ours.items()} == {
        key: value.tobytes() for key, value in theirs.items()
    }
    for row, round_ in zip(report["rounds"], rounds, strict=True):
        assert row["clients"] == round_.delivered == 6
        assert row["accuracy"] == pytest.approx(round_.eval_correct / round_.eval_total)
        assert row["metrics"]["train/loss"] == pytest.approx(round_.metrics["train/loss"])


def test_without_the_residuals_of_the_clients_the_models_would_differ(
    fleet_runs: dict[str, tuple[Path, list[Any]]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "error feedback, buffers, dropout"
    monkeypatch.syspath_prepend(str(CODE))
    monkeypatch.setattr("fedring.simulation.residuals.Residuals.put", lambda self, client, residual: None)
    simulate({**COMMON, **JOBS[name]}, clients=CLIENTS, workers=1, out=tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() != fleet_runs[name][0].read_bytes()


def test_the_study_of_the_documentation_compares_three_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MPLBACKEND", "agg")
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "examples"))
    study = importlib.import_module("study")
    monkeypatch.setattr(study, "simulate", partial(simulate, workers=1))  # so that no process must import torch
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
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # as in tests of the demo
    try:
        run = subprocess.Popen([*command, "--out", str(out)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    finally:
        signal.signal(signal.SIGINT, before)
    with run:
        until(lambda: run.poll() is not None or list(out.glob(".simulation-*/residuals")))  # the first model is made
        children = _descendants(run.pid)
        run.send_signal(number)
        assert run.wait(PATIENCE) != 0
    assert len(children) >= 3  # two workers, and the process that has forked them
    until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in children))
    assert list(out.iterdir()) == []


def _descendants(pid: int) -> list[int]:
    children = [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [*children, *(other for child in children for other in _descendants(child))]
