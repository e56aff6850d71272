"""Calls of promtool, from Debian's package of Prometheus."""

import shutil
import subprocess
from pathlib import Path

from tests.conftest import missing


def promtool(*arguments: str | Path, given: str | None = None) -> "subprocess.CompletedProcess[str]":
    """Run promtool; return the result, with all its output in `stdout`."""
    if shutil.which("promtool") is None:
        missing("promtool (Debian's package prometheus)")
    command = ["promtool", *map(str, arguments)]
    return subprocess.run(
        command, input=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240, check=False
    )
