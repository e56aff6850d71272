"""Lightning, accelerate and transformers train over the ring as they do over Gloo; `make libraries` installs them."""

import importlib.metadata
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.conftest import ROOT, missing
from tests.ports import free_port

pytestmark = pytest.mark.soak

SCRIPTS = Path(__file__).parent / "ring_scripts"
SECONDS = 280
PYTHON = [sys.executable]
TORCHRUN = [
    *PYTHON,
    "-m",
    "torch.distributed.run",
    "--standalone",
    "--local-addr",
    "127.0.0.1",
    "--nproc-per-node",
    "2",
]


def run(command: list[str], script: str, folder: Path) -> list[dict[str, Any]]:
    """Run a script on two ranks, over Gloo and over the ring; check that the results are equal; return the ring's."""
    package = {"accelerated": "accelerate", "transformers_trainer": "transformers"}.get(script, "lightning")
    try:
        importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        missing(f"the package {package}, which `make libraries` installs,")
    # Lightning and transformers import torchvision, which fails if it was built for another torch: see fedring.vision.
    (folder / "sitecustomize.py").write_text("from fedring import vision\n\nvision.load()\n")
    over_gloo, over_ring = (_results(command, script, backend, folder) for backend in ("gloo", "fedring"))
    torch.testing.assert_close(over_ring, over_gloo, rtol=1e-4, atol=1e-6)
    return over_ring


def _results(command: list[str], script: str, backend: str, folder: Path) -> list[dict[str, Any]]:
    environment = {
        "PYTHONPATH": os.pathsep.join([str(folder), *(str(ROOT / part) for part in ("client", "common", "protos"))]),
        "MASTER_PORT": str(free_port()),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "HF_HUB_OFFLINE": "1",
    }
    ended = subprocess.run(
        [*command, str(SCRIPTS / f"{script}.py"), backend, str(folder)],
        env=os.environ | environment,
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert ended.returncode == 0, ended.stderr
    results = [json.loads((folder / f"{backend}-{rank}.json").read_text()) for rank in range(2)]
    assert [result.pop("backend") for result in results] == [backend] * 2
    return results


def falls(losses: list[float]) -> bool:
    """Return whether the last losses are smaller than the first ones."""
    return sum(losses[-3:]) < sum(losses[:3])


@pytest.mark.parametrize("command", [PYTHON, TORCHRUN], ids=["python", "torchrun"])
def test_lightning_fabric(command: list[str], tmp_path: Path) -> None:
    for result in run(command, "lightning_fabric", tmp_path):
        assert result["ranks"] == [0, 1]
        assert result["message"] == {"from": 0}
        assert result["step"] == len(result["losses"]) == 12
        assert falls(result["losses"])


@pytest.mark.parametrize("command", [PYTHON, TORCHRUN], ids=["python", "torchrun"])
def test_lightning_trainer(command: list[str], tmp_path: Path) -> None:
    first, second = run(command, "lightning_trainer", tmp_path)
    assert first == second
    assert len(first["epochs"]) == 4  # two epochs, and after the checkpoint two until early stopping
    assert first["stopped"] == 4
    assert falls([epoch["train_loss"] for epoch in first["epochs"] for _ in range(3)])


def test_accelerate(tmp_path: Path) -> None:
    first, second = run(TORCHRUN, "accelerated", tmp_path)
    assert first == second
    assert first["processes"] == 2
    assert first["predictions"] == 60
    assert falls(first["losses"])


def test_transformers_trainer(tmp_path: Path) -> None:
    first, second = run(TORCHRUN, "transformers_trainer", tmp_path)
    assert first["evaluation"] == second["evaluation"]
    assert falls(first["losses"])
