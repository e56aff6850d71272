"""A folder that one process of a test run makes, and all of them use."""

import fcntl
import os
from collections.abc import Callable
from pathlib import Path

import pytest


def made_once(base: pytest.TempPathFactory, name: str, make: Callable[[Path], None]) -> Path:
    """Return a folder of this test run, made by the first process that asks for it.

    Tests that run in parallel are shared out one by one, so a fixture of a module is made in several processes. An
    expensive one that nobody changes is better made once; the others wait for it.

    Args:
        base: The factory of temporary folders.
        name: The name of the folder in this test run.
        make: Fills the folder. If it raises, the next process tries again.
    """
    shared = base.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    folder, done = shared / name, shared / f"{name}.made"
    with (shared / f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            folder.mkdir(exist_ok=True)
            make(folder)
            done.touch()
    return folder
