"""Virtual time beside a real fleet: the same order, the same clients left out, the same model."""

import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from fedring.simulation import simulate
from tests import forks
from tests.conftest import ROOT
from tests.damage import write
from tests.fleets import Control, Fleet, until_watching

CODE = ROOT / "tests" / "fixtures_user_code"
SPEEDS = [1.0, 0.1, 0.8, 0.15, 0.9]
JOB: dict[str, Any] = {
    "model": "fedring.train.models:vector", "model_args": {"size": 50}, "data": "user_timing:named", "rounds": 1,
    "trainer": "user_timing:held", "evaluate": False, "min_clients": 5, "batch_size": 8, "encoding": "fp32",
}  # fmt: skip
RULES: dict[str, tuple[dict[str, Any], dict[str, str], float]] = {
    "closed early": (
        {"close_at_minimum": True, "min_clients_to_aggregate": 4},
        {"client-1": "closed early"},
        10 / 0.15,
    ),
    "straggler": (
        {"straggler_factor": 2.0, "min_clients_to_aggregate": 3},
        {"client-1": "straggler", "client-3": "straggler"},
        2 * 10 / 0.9,
    ),
    "deadline": (
        {"deadline_seconds": 20.0, "min_clients_to_aggregate": 3},
        {"client-1": "deadline", "client-3": "deadline"},
        20.0,
    ),
}
LONG = 500.0
"""A deadline in seconds that no test waits for."""


def timing(seconds_per_step: float) -> dict[str, Any]:
    """Return the times of the clients, each of which does one step a round."""
    speeds = {f"client-{number}": speed for number, speed in enumerate(SPEEDS)}
    return {"seconds_per_step": seconds_per_step, "speed": {"clients": speeds}}


def same_models(one: Path, other: Path) -> bool:
    ours, theirs = load_file(one), load_file(other)
    return {key: value.tobytes() for key, value in ours.items()} == {key: v.tobytes() for key, v in theirs.items()}


@pytest.mark.parametrize("rule", RULES)
def test_a_real_fleet_that_delivers_in_virtual_order_leaves_out_the_same_clients(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(CODE))
    keys, left_out, seconds = RULES[rule]
    job = {**JOB, **keys}
    report = simulate(job, clients=5, workers=1, threads=1, timing=timing(10.0), out=tmp_path)
    virtual = report["rounds"][0]["virtual"]
    assert virtual["left_out"] == left_out
    assert report["virtual_seconds"] == virtual["seconds"] == pytest.approx(seconds)
    gates = tmp_path / "gates"
    gates.mkdir()
    for number in range(5):
        os.mkfifo(gates / f"client-{number}")
    trusted = {"trusted": ["fedring", "user_timing"]}
    env = {"PYTHONPATH": str(CODE), "FL_TEST_GATES": str(gates)}
    with Fleet(tmp_path / "fleet", trusted, [{**trusted, "threads": 1}] * 5, env=env) as fleet:
        with Control(fleet.control) as control:
            until_watching(control, 5)
            events = control.events()
            job_id = control.start_job({**job, "deadline_seconds": LONG}).job_id
            order = []
            for client in virtual["delivered"]:
                (gates / client).write_text("go on")  # blocks until the client waits there
                order.append(next(event for event in events if event.kind == "update_accepted").client_id)
        if rule == "deadline":  # Nobody waits for it: the server comes back with little of the round's time left.
            fleet.server.kill()
            write(fleet.directory / "state" / "server", "UPDATE rounds SET seconds_left = 0.2")
            fleet.start_server()
        with Control(fleet.control) as control:
            for _ in control.follow_job(job_id):
                pass
            for client in left_out:
                with suppress(OSError):  # it does not wait any more
                    os.write(os.open(gates / client, os.O_WRONLY | os.O_NONBLOCK), b"go on")
            (round_,) = control.rounds(job_id=job_id)
            control.export_model(0, tmp_path / "real.safetensors")
    assert order == list(virtual["delivered"])
    assert set(round_.missing) == set(left_out)
    assert set(round_.stragglers) == {client for client, why in left_out.items() if why == "straggler"}
    assert same_models(tmp_path / "model.safetensors", tmp_path / "real.safetensors")


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.parametrize("rule", RULES)
def test_a_real_fleet_that_sleeps_has_the_same_order_of_events(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(CODE))
    keys, left_out, _ = RULES[rule]
    job = {**JOB, **keys, "deadline_seconds": 0.4 * keys.get("deadline_seconds", LONG)}
    report = simulate(job, clients=5, workers=1, threads=1, timing=timing(4.0), out=tmp_path)
    virtual = report["rounds"][0]["virtual"]
    assert virtual["left_out"] == left_out
    trusted = {"trusted": ["fedring", "user_timing"]}
    naps = {f"client-{number}": 4.0 / speed for number, speed in enumerate(SPEEDS)}
    env = {"PYTHONPATH": str(CODE), "FL_TEST_NAPS": json.dumps(naps)}
    with (
        Fleet(tmp_path / "fleet", trusted, [{**trusted, "threads": 1}] * 5, env=env) as fleet,
        Control(fleet.control) as control,
    ):
        until_watching(control, 5)
        events = control.events()
        job_id = control.start_job(job).job_id
        order = [event.client_id for event in control.follow_job(job_id, events) if event.kind == "update_accepted"]
        (round_,) = control.rounds(job_id=job_id)
        control.export_model(0, tmp_path / "real.safetensors")
    assert order == list(virtual["delivered"])
    assert set(round_.missing) == set(left_out)
    assert same_models(tmp_path / "model.safetensors", tmp_path / "real.safetensors")


def test_the_example_prints_the_virtual_figures_of_the_page(tmp_path: Path) -> None:
    page = (ROOT / "docs" / "simulation.md").read_text()
    printed = page.partition("It prints\n\n```text\n")[2].partition("```")[0]
    env = {
        "PYTHONPATH": ":".join(str(ROOT / name) for name in ("docs/examples", "server", "client", "common", "protos"))
    }
    done = forks.run("over_time", str(tmp_path), timeout=120, env=env, cwd=tmp_path)
    assert done.stdout == printed
    assert (tmp_path / "over-time.png").exists()
