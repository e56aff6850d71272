"""deploy/quickstart.sh: two trained jobs with mutual TLS between all programs, from one command."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fleets import PATIENT

ROOT = Path(__file__).parents[2]
SECONDS = 240


def quickstart(folder: Path) -> "subprocess.CompletedProcess[str]":
    """Run the script. One that does not end is ended with all that it has started, and its output fails the test."""
    programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with subprocess.Popen(
        [ROOT / "deploy" / "quickstart.sh", folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **PATIENT, "PATH": programs},
        start_new_session=True,
    ) as script:
        try:
            out, err = script.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(script.pid, signal.SIGTERM)
            out, err = script.communicate()
            pytest.fail(f"{out}{err}")
    return subprocess.CompletedProcess(script.args, script.returncode, out, err)


@pytest.mark.slow
def test_one_command_makes_certificates_and_trains_with_mutual_tls(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    done = quickstart(folder)
    assert done.returncode == 0, done.stdout + done.stderr
    summary = done.stdout.partition("==> summary")[2]
    assert "federated:     job 1 completed: 3 rounds, accuracy" in summary
    assert "data parallel: job 2 completed: 1 round, accuracy" in summary
    assert "fedring://client/ann is not an operator" in done.stdout
    assert "1 not_operator" in done.stdout
    assert "2 workers go on" in (folder / "logs" / "server.log").read_text()
    audit = (folder / "server" / "audit.jsonl").read_text()
    verbs = [json.loads(line)["verb"] for line in audit.splitlines()]
    assert verbs[:5] == ["token create", "run", "run", "models export", "token revoke"]
    refused = (folder / "server" / "refused.jsonl").read_text().splitlines()
    assert json.loads(refused[0])["verb"] == "stop"
    assert (folder / "model.safetensors").stat().st_size > 10_000
    for daemon in ("server", "ann", "bob"):
        pid = int((folder / daemon / "lock").read_text())
        assert not Path(f"/proc/{pid}").exists()


def test_the_script_does_not_change_an_existing_folder(tmp_path: Path) -> None:
    done = quickstart(tmp_path)
    assert done.returncode == 1
    assert "exists already" in done.stderr
    assert list(tmp_path.iterdir()) == []
