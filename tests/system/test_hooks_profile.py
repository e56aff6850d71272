"""flctl profile, with real workers."""

import json
import subprocess
from pathlib import Path

from tests import forks


def flctl(*arguments: str) -> "subprocess.CompletedProcess[str]":
    return forks.run("fedring.ctl.main", "profile", "--dataset", "digits", *arguments, timeout=240)


def test_a_profile_has_figures_of_every_hook_a_recommendation_and_a_plot(tmp_path: Path) -> None:
    done = flctl("--hooks", "none,int8,topk(ratio=0.02)", "--steps", "10", "--out", str(tmp_path), "--output", "json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result == json.loads((tmp_path / "profile.json").read_text())
    assert [row["hook"] for row in result["results"]] == ["none", "int8", "topk(ratio=0.02)"]
    dense, int8, topk = (row["bytes_per_step"] for row in result["results"])
    assert dense > int8 > topk > 0
    assert result["noop_step_seconds"] > 0
    for row in result["results"]:
        assert row["wait_seconds"] > 0
        assert (row["compress_seconds"] > 0) == (row["hook"] != "none")
    assert "communication" in result["verdict"]
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")


def test_a_worker_that_fails_ends_the_profile_with_its_error(tmp_path: Path) -> None:
    done = flctl("--model", "fedring.train.models:none_such", "--out", str(tmp_path))
    assert done.returncode == 1
    assert "none_such" in done.stderr
    assert not (tmp_path / "profile.json").exists()
