"""The contracts of import-linter are kept, and a breach of each of them is found."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("server", "client", "common", "protos")

BREACHES = {
    "a package of common/ imports one of client/": (
        "common/fedring/rpc/contract.py",
        "import fedring.client.config",
        {"packages import downwards only", "what the daemons share knows neither of them"},
    ),
    "a package imports a sibling": (
        "client/fedring/ring/errors.py",
        "import fedring.ddp.profile",
        {"packages import downwards only"},
    ),
    "a client's package imports the server": (
        "client/fedring/client/config.py",
        "import fedring.server.config",
        {"packages import downwards only"},
    ),
    "a room of the server imports one above it": (
        "server/fedring/server/state/rows.py",
        "import fedring.server.round.events",
        {"the server's rooms import downwards only"},
    ),
    "a room of the server opens the database": (
        "server/fedring/server/parts.py",
        "import sqlite3",
        {"only the state knows its database, and where its files lie"},
    ),
    "a room of the client imports one above it": (
        "client/fedring/client/session/inbox.py",
        "import fedring.client.transfer.fetch",
        {"the client's rooms import downwards only"},
    ),
    "a room of the ring imports one above it": (
        "client/fedring/ring/transport/frames.py",
        "import fedring.ring.engine.operation",
        {"the ring's rooms import downwards only"},
    ),
    "a module of training imports one above it": (
        "common/fedring/train/plan.py",
        "import fedring.train.batches",
        {"fedring.train imports downwards only"},
    ),
    "a module of workers imports one above it": (
        "client/fedring/workers/usage.py",
        "import fedring.workers.checkpoint",
        {"fedring.workers imports downwards only"},
    ),
    "a module of pipelines imports one above it": (
        "client/fedring/pipeline/search.py",
        "import fedring.pipeline.worker",
        {"fedring.pipeline imports downwards only"},
    ),
    "two modules import each other": (
        "common/fedring/codec/errors.py",
        "import fedring.codec.payload",
        {"no circles, at any depth"},
    ),
}


def contracts(folder: Path) -> dict[str, bool]:
    """Run import-linter in the folder, and return the name of each contract and whether it is kept."""
    linter = Path(sys.executable).with_name("lint-imports")
    command = [str(linter), "--no-cache", "--config", str(folder / "pyproject.toml")]
    output = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    return {name: verdict == "KEPT" for name, verdict in re.findall(r"^(.+?) (KEPT|BROKEN)", output, re.M)}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a copy of the sources, which a test may change."""
    folder = tmp_path_factory.mktemp("contracts")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    paths = [str(folder / name) for name in SOURCES]
    text = (ROOT / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(text)
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.path[:0] = {paths}\n")
    return folder


@pytest.mark.programs
@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_is_found(copy: Path, breach: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(copy))
    path, line, broken = BREACHES[breach]
    module = copy / path
    original = module.read_text()
    module.write_text(f"{original}\n{line}\n")
    try:
        found = contracts(copy)
    finally:
        module.write_text(original)
    assert found
    assert broken <= {name for name, kept in found.items() if not kept}


@pytest.mark.programs
def test_no_contract_is_broken(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(copy))
    found = contracts(copy)
    assert found
    assert all(found.values()), found
