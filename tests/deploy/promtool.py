"""Debian's promtool, if it is here."""

import shutil
import subprocess
from pathlib import Path

from tests.conftest import missing


def promtool(*arguments: str | Path, given: str | None = None) -> "subprocess.CompletedProcess[str]":
    """What it says, in `stdout` with all that it wrote."""
    if shutil.which("promtool") is None:
        missing("promtool (Debian's package prometheus)")
    command = ["promtool", *map(str, arguments)]
    return subprocess.run(
        command, input=given, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=240, check=False
    )
