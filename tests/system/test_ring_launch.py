"""All ways to start (torchrun, the environment, an address), and scripts that forget to leave the group."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

from tests.conftest import ROOT
from tests.pages import Page
from tests.ports import free_port
from tests.system.ring_scripts import ranks

SCRIPT = str(Path(__file__).parent / "ring_scripts" / "plain.py")
SECONDS = 240
ENVIRONMENT = ranks.PROGRAM_ENVIRONMENT | {"PYTHONFAULTHANDLER": "1"}  # torchrun ends hanging workers with a signal


def results(output: str) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    return sorted(lines, key=lambda line: int(line["rank"]))


def check_results(found: list[dict[str, Any]], size: int) -> None:
    assert [one["rank"] for one in found] == list(range(size))
    assert {one["backend"] for one in found} == {"fedring"}
    assert {one["total"] for one in found} == {size * (size - 1) / 2}
    assert len({one["digest"] for one in found}) == 1


def torchrun(script: str, logs: Path) -> str:
    """Run a script on two ranks, and return what they print, one after the other."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    # In one pipe, the lines of two ranks could interleave.
    files = ["--log-dir", str(logs), "--redirects", "1"]
    run = subprocess.run(
        [*launch, *files, "--nproc-per-node", "2", script],
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert run.returncode == 0, run.stderr
    return "".join(path.read_text() for path in sorted(logs.rglob("stdout.log")))


def test_torchrun_launches_an_unmodified_script(tmp_path: Path) -> None:
    check_results(results(torchrun(SCRIPT, tmp_path)), 2)


def test_the_script_with_which_the_page_begins_trains(tmp_path: Path) -> None:
    language, script = Page(ROOT / "docs" / "ring.md").blocks[0]
    assert language == "python"
    (tmp_path / "train.py").write_text(script)
    lines = torchrun(str(tmp_path / "train.py"), tmp_path / "logs").splitlines()
    assert lines == [f"rank {rank} of 2 has finished" for rank in range(2)]


def test_scripts_that_forget_to_destroy_the_group_still_end() -> None:
    environment = os.environ | ENVIRONMENT | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    processes = [
        subprocess.Popen(
            [sys.executable, SCRIPT, "--forget"],
            env=environment | {"RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        ends = [process.communicate(timeout=SECONDS) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], [error for _, error in ends]
    check_results(results("".join(output for output, _ in ends)), 2)


def test_ranks_meet_at_an_address_alone(tmp_path: Path) -> None:
    body = partial(ranks.sum_of_ones, init_method=f"tcp://127.0.0.1:{free_port()}")
    assert ranks.run(body, 3, tmp_path, backend="") == [3.0] * 3
