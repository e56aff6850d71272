"""The slopes of an hour of rounds: what grows is found, and what only swings is not."""

import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from tests.conftest import ROOT
from tests.soak_hour.slopes import DATABASE, EVENTS, LIMITS, Kept, Sample, Slope, line_through, slopes, unit_of

SAMPLES = 200
FULL = Kept(clients=20, rounds=1, events=1, job_rounds=1000)
"""A database that is full when the warm-up ends."""


def run_of(figure: str, value: Callable[[int], float], kept: Kept = FULL) -> Slope:
    """Return the slope of a figure whose value in a round is given; there are 40 rounds between two samples."""
    numbers = range(SAMPLES)
    samples = [Sample(10.0 * n, 40 * n, {**dict.fromkeys(LIMITS, 7.0), figure: value(40 * n)}) for n in numbers]
    (found,) = [each for each in slopes(samples, kept) if each.figure == figure]
    return found


def test_the_line_is_that_of_the_least_squares() -> None:
    mean, slope, error = line_through([(0, 1), (1, 3), (2, 5), (3, 7)])
    assert (mean, slope, error) == (4, 2, 0)
    mean, slope, error = line_through([(0, 0), (1, 1), (2, 0)])
    assert mean == pytest.approx(1 / 3)
    assert slope == 0
    assert error == pytest.approx(math.sqrt((2 / 3) / 1 / 2))


def test_a_descriptor_that_is_lost_in_each_thousand_rounds_is_found() -> None:
    found = run_of("server descriptors", lambda rounds: 40 + rounds // 1000)
    assert found.per_thousand == pytest.approx(1, rel=0.1)
    assert found.too_steep


def test_memory_that_swings_is_not_too_steep() -> None:
    rng = random.Random(1)
    assert not run_of("server memory", lambda rounds: 300 + rng.gauss(0, 10)).too_steep


def test_memory_that_grows_by_a_kilobyte_for_each_client_and_round_is_found() -> None:
    rng = random.Random(1)
    assert run_of("server memory", lambda rounds: 300 + 0.02 * rounds + rng.gauss(0, 10)).too_steep


def test_what_grows_only_in_the_warm_up_is_not_too_steep() -> None:
    assert not run_of("server memory", lambda rounds: 300 + min(rounds, 1900) / 10).too_steep


def test_growth_that_is_documented_may_be() -> None:
    assert run_of(DATABASE, lambda rounds: 0.005 * rounds).too_steep
    assert not run_of(DATABASE, lambda rounds: 0.005 * rounds, replace(FULL, rounds=10_000)).too_steep
    assert run_of(DATABASE, lambda rounds: 0.010 * rounds, replace(FULL, rounds=10_000)).too_steep
    begin = Sample(0.0, 100, {EVENTS: 300.0})
    assert replace(FULL, events=10_000).growth(begin) == pytest.approx(0.903)


@pytest.mark.parametrize("count", [2, 50])
def test_a_run_without_samples_or_without_rounds_is_too_short(count: int) -> None:
    samples = [Sample(float(number), 3, dict.fromkeys(LIMITS, 1.0)) for number in range(count)]
    with pytest.raises(ValueError, match="too short"):
        slopes(samples, FULL)


def test_units_are_those_of_the_figures() -> None:
    assert [unit_of(each) for each in ("server memory", "client threads", "round")] == ["MB", "", "ms"]


@pytest.mark.programs
@pytest.mark.slow
def test_a_short_run_measures_every_figure(tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    options = ["--seconds", "3", "--every", "0.3", "--clients", "2", "--out", str(out)]
    command = [sys.executable, "-m", "tests.soak_hour", *options]
    path = {"PYTHONPATH": ":".join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **path}, capture_output=True, text=True, timeout=280)
    report = json.loads(out.read_text())  # a few seconds may be too steep: nothing is asserted of the slopes
    assert {each["figure"] for each in report["slopes"]} == set(LIMITS), done.stderr
    assert report["samples"][-1]["rounds"] > 0
    assert "standard error" in done.stdout
