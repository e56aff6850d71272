"""Everything public since 1.0.0 is still there, and in the list of it."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.conftest import ROOT

DOCS = ROOT / "docs"
NAMES = [
    ("exit codes", "78 CONFIG"),
    ("keys", "Jobs: min_clients"),
    ("metrics", "fl-server: fl_server_auth_refusals counter (reason)"),
    ("options", "flctl start-round --wait"),
    ("options", "flctl certs issue --role"),
    ("python", "fedring.control.connect(tls_ca)"),
    ("python", "fedring.ring.RingOptions(listen)"),
]
"""A name of each kind."""


def run(docs: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(docs / "public.py"), *words]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)


def test_nothing_public_is_gone_and_nothing_new_is_missing_in_the_list() -> None:
    done = run(DOCS, "--check")
    assert done.returncode == 0, done.stderr
    listed = json.loads((DOCS / "public.json").read_text(encoding="utf-8"))
    assert [(kind, name) for kind, name in NAMES if name not in listed[kind]] == []


@pytest.mark.parametrize("words", [("--check",), ("--major",)])
def test_only_a_major_version_takes_a_name_away(words: tuple[str, ...], tmp_path: Path) -> None:
    for name in ("public.py", "metrics.py", "reference.py", "site/api.md"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        shutil.copy(DOCS / name, tmp_path / name)
    listed = json.loads((DOCS / "public.json").read_text(encoding="utf-8"))
    listed["keys"].append("Jobs: gone")
    (tmp_path / "public.json").write_text(json.dumps(listed))
    done = run(tmp_path, *words)
    if "--major" in words:
        assert (done.returncode, done.stderr) == (0, "")
        assert (tmp_path / "public.json").read_bytes() == (DOCS / "public.json").read_bytes()
        return
    assert done.returncode == 1
    assert "keys: Jobs: gone" in done.stderr
    assert json.loads((tmp_path / "public.json").read_text()) == listed
