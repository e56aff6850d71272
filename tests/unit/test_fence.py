"""The contracts of import-linter hold, and each is noticed when it is broken."""

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
    "two modules import each other": (
        "common/fedring/codec/errors.py",
        "import fedring.codec.payload",
        {"no circles, at any depth"},
    ),
}


def contracts(folder: Path) -> dict[str, bool]:
    """Run import-linter in the folder. Returns each contract's name, and whether it is kept."""
    linter = Path(sys.executable).with_name("lint-imports")
    command = [linter, "--no-cache", "--config", folder / "pyproject.toml"]
    output = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False).stdout
    return {name: verdict == "KEPT" for name, verdict in re.findall(r"^(.+?) (KEPT|BROKEN)", output, re.M)}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fence")
    for name in SOURCES:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    paths = [str(folder / name) for name in SOURCES]
    text = (ROOT / "pyproject.toml").read_text()
    (folder / "pyproject.toml").write_text(text)
    (folder / "sitecustomize.py").write_text(f"import sys\nsys.path[:0] = {paths}\n")
    return folder


@pytest.mark.programs
@pytest.mark.parametrize("breach", BREACHES)
def test_a_breach_is_noticed(copy: Path, breach: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(copy))
    path, line, broken = BREACHES[breach]
    module = copy / path
    sound = module.read_text()
    module.write_text(f"{sound}\n{line}\n")
    try:
        found = contracts(copy)
    finally:
        module.write_text(sound)
    assert found
    assert broken <= {name for name, kept in found.items() if not kept}


@pytest.mark.programs
def test_no_contract_is_broken(copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(copy))
    found = contracts(copy)
    assert found
    assert all(found.values()), found
