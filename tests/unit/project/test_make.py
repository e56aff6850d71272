"""What `make` installs for users, and what for developers."""

import subprocess
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
