"""A release: the same bytes from two builds, and an SBOM of what is inside."""

import hashlib
import importlib.util
import json
import re
import subprocess
from datetime import UTC, datetime
from email.parser import BytesParser
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from tests.conftest import ROOT

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def tool() -> Any:
    spec = importlib.util.spec_from_file_location("release", ROOT / "deploy" / "release.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def made(tool: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a git checkout")
    out = tmp_path_factory.mktemp("release") / "dist"
    tool.release(out, ROOT)  # which compares two builds
    return out


def test_the_files_have_the_checksums_that_are_told(made: Path) -> None:
    lines = [line.split("  ") for line in (made / "SHA256SUMS").read_text().splitlines()]
    sums = {name: digest for digest, name in lines}
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in made.iterdir()}
    assert files.pop("SHA256SUMS")
    assert sums == files
    assert {path.rpartition(".")[2] for path in files} == {"whl", "gz", "json"}


def test_the_sbom_lists_what_is_inside_and_what_is_required(made: Path) -> None:
    (wheel,) = made.glob("*.whl")
    (path,) = made.glob("*.cdx.json")
    sbom = json.loads(path.read_text())
    assert (sbom["bomFormat"], sbom["specVersion"]) == ("CycloneDX", "1.6")
    assert sbom["metadata"]["component"]["hashes"][0]["content"] == hashlib.sha256(wheel.read_bytes()).hexdigest()
    with ZipFile(wheel) as archive:
        inside = {name: hashlib.sha256(archive.read(name)).hexdigest() for name in archive.namelist()}
        (metadata,) = (archive.read(name) for name in inside if name.endswith("/METADATA"))
    listed = {one["name"]: one["hashes"][0]["content"] for one in sbom["components"] if one["type"] == "file"}
    assert listed == inside
    required = BytesParser().parsebytes(metadata).get_all("Requires-Dist") or []
    named = {one["properties"][0]["value"] for one in sbom["components"] if one["type"] == "library"}
    assert named == {line for line in required if not line.startswith("fedring")}
    torch = next(one for one in sbom["components"] if one["name"] == "torch")
    assert (torch["scope"], torch["version"]) == ("required", re.search(r"^torch==(.*)$", constraints(), re.M)[1])  # type: ignore[index]


def constraints() -> str:
    return (ROOT / "constraints.txt").read_text()


def test_the_sbom_is_the_same_each_time(made: Path, tool: Any) -> None:
    (wheel,) = made.glob("*.whl")
    (path,) = made.glob("*.cdx.json")
    time = subprocess.run(["git", "log", "-1", "--format=%ct"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert tool.sbom_of(wheel, constraints(), datetime.fromtimestamp(int(time.stdout), UTC)) == path.read_text()


@pytest.mark.parametrize(
    ("version", "changelog", "changes", "sentence"),
    [
        ("1.2.3", "## 1.2.3\n", " M README.md\n", "commit these changes first"),
        ("1.2.3.dev0", "## 1.2.3\n", "", "is not final"),
        ("1.2.3", "## 1.2.30\n", "", "no heading `## 1.2.3`"),
        ("1.2.3", "## Unreleased\n\n### Fixed\n\n- it\n\n## 1.2.3\n", "", "1.2.3 would bring without a word"),
        ("1.2.3", "## Unreleased\n\n## 1.2.3, 2026-11-24\n", "", ""),
        ("1.2.3", "## Unreleased\n\n### Fixed\n\n## 1.2.3\n\n- it\n", "", ""),
    ],
)
def test_only_a_final_version_with_notes_is_released(
    tool: Any, version: str, changelog: str, changes: str, sentence: str
) -> None:
    if not sentence:
        return tool.check(version, changelog, changes)  # type: ignore[no-any-return]
    with pytest.raises(tool.NoRelease, match=sentence):
        tool.check(version, changelog, changes)
