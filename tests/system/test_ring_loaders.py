"""Data loaders beside a group: whatever starts their workers, nothing hangs or crashes, and a lost rank is noticed."""

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from tests.conftest import ROOT
from tests.ports import free_port
from tests.system.ring_scripts import loaders, ranks

TOTAL = 2 * loaders.EPOCHS * sum(range(loaders.ITEMS))  # of two ranks


@pytest.mark.parametrize("backend", ["fedring", "gloo"])
def test_forked_workers_load_while_the_group_computes(backend: str, tmp_path: Path) -> None:
    results = ranks.run(partial(loaders.train, methods=["fork"]), 2, tmp_path, backend=backend)
    assert results == [[0.0, TOTAL, TOTAL]] * 2


@pytest.mark.slow
def test_a_killed_rank_is_noticed_although_its_workers_hold_its_sockets(tmp_path: Path) -> None:
    body = partial(loaders.rank_with_workers_is_killed, folder=tmp_path)
    with pytest.raises(ranks.RankFailed, match="rank 0 ended with 0\nrank 1 ended with -9"):
        ranks.run(body, 2, tmp_path / "ranks", backend="")
    error = json.loads((tmp_path / "ranks" / "0.json").read_text())
    assert (error["kind"], error["rank"], error["workers"]) == ("PeerLost", 1, loaders.WORKERS), error
    assert error["seconds"] < 30  # 8 on an idle machine


@pytest.mark.soak
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("forget", [[], ["--forget"]], ids=["leave", "forget to leave"])
def test_programs_with_workers_end(method: str, forget: list[str]) -> None:
    environment = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    command = [sys.executable, "-m", "tests.system.ring_scripts.loaders", *forget, method]
    programs = [
        subprocess.Popen(command, env=environment | {"RANK": str(rank)}, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for rank in range(2)
    ]
    try:
        outputs = [program.communicate(timeout=280)[0] for program in programs]
    finally:
        for program in programs:
            program.kill()
    assert [program.returncode for program in programs] == [0, 0]
    assert [json.loads(output)["sums"] for output in outputs] == [[0.0, TOTAL, TOTAL]] * 2
