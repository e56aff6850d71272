"""The gallery's tasks train as its page says, with fewer rounds."""

import sys
from pathlib import Path

import pytest

from fedring.simulation import simulate
from tests.conftest import ROOT

GALLERY = ROOT / "docs" / "examples" / "gallery"


@pytest.mark.parametrize(
    ("task", "clients", "rounds", "at_least"),
    [
        ("tabular", 10, 5, 0.8),
        ("images", 10, 8, 0.5),
        ("text", 10, 5, 0.7),
        ("health", 5, 5, 0.9),
        ("asynchronous", 6, 20, 0.8),
    ],
)
def test_a_task_trains(
    monkeypatch: pytest.MonkeyPatch, task: str, clients: int, rounds: int, at_least: float, tmp_path: Path
) -> None:
    pytest.importorskip("sklearn")
    monkeypatch.setattr(sys, "path", [str(GALLERY), *sys.path])
    text = (GALLERY / f"{task}.toml").read_text()
    before, key, after = text.partition("rounds = ")
    job = tmp_path / "job.toml"
    job.write_text(f"{before}{key}{rounds}\n{after.partition(chr(10))[2]}")
    timing = {"speed": {"spread": 10}} if task == "asynchronous" else None
    report = simulate(job, clients=clients, timing=timing, workers=1, threads=1)
    assert (len(report["rounds"]), report.get("failures", [])) == (rounds, [])
    assert report["accuracy"] >= at_least
