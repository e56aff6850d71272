"""What `make` installs for users, and what for developers, and how `make soak` goes on."""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import ROOT

pytestmark = pytest.mark.programs


def plan(target: str, folder: Path) -> str:
    """Return the commands that make would run for a target in a fresh clone."""
    command = ["make", "--dry-run", "--directory", str(ROOT), f"VENV={folder / 'venv'}", target]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.parametrize("target", ["demo", "secure-demo", "private-demo", "wheel"])
def test_users_get_no_tools_of_developers(target: str, tmp_path: Path) -> None:
    commands = plan(target, tmp_path)
    assert "--editable '.[all" in commands
    assert "--group dev" not in commands


@pytest.mark.parametrize("target", ["install", "test", "lint"])
def test_developers_get_the_programs_and_the_tools(target: str, tmp_path: Path) -> None:
    commands = plan(target, tmp_path)
    assert commands.index("--editable '.[all]'") < commands.index("--group dev")


SOAKED = """
import os
import pytest

@pytest.mark.soak
@pytest.mark.parametrize("number", [0, 1])
def test_long(number):
    assert number == 0 or "MENDED" in os.environ
"""


def test_soak_leaves_out_what_has_passed_before(tmp_path: Path) -> None:
    for name in ("tests", ".soak"):
        (tmp_path / name).mkdir()
    (tmp_path / "pyproject.toml").write_text('[tool.pytest]\ntestpaths = ["tests"]\nmarkers = ["soak", "slow"]\n')
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path / "tests")
    (tmp_path / "tests" / "test_long.py").write_text(SOAKED)
    line = next(each for each in plan("soak", tmp_path).splitlines() if "--passed" in each)
    words = shlex.split(line)
    command = [sys.executable, "-m", *words[words.index("pytest") :], "-p", "no:cacheprovider"]

    def soak(**env: str) -> tuple[int, list[str]]:
        done = subprocess.run(
            command, cwd=tmp_path, env=os.environ | env, capture_output=True, text=True, timeout=120, check=False
        )
        return done.returncode, re.findall("[0-9]+ (?:passed|failed)", done.stdout.splitlines()[-1])

    assert soak() == (1, ["1 failed", "1 passed"])
    assert soak(MENDED="1") == (0, ["1 passed"])
    assert soak() == (0, [])
