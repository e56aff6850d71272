"""Where the code that a job names is found on this machine.

Nothing is imported for it. `flctl try` lets its daemons find that code, and tells the user what they trust.
"""

from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import find_spec
from pathlib import Path

from fedring.control.failure import Failure
from fedring.daemon.exits import Exit
from fedring.train.jobs.job import Job

_OURS = ("fedring", "torchvision")


def names_by_module(job: Job) -> dict[str, list[str]]:
    """Return the user's names in a job, by top module."""
    names: dict[str, list[str]] = {}
    for entry in job.code:
        name = entry.partition(" as ")[0]
        top = name.partition(":")[0].partition(".")[0]
        if top not in _OURS and name not in names.setdefault(top, []):
            names[top].append(name)
    return {top: found for top, found in names.items() if found}


def find_code(job: Job, folders: Sequence[Path]) -> dict[str, str]:
    """Return where each module of the user's code is, by its name.

    Args:
        job: The job that names the code.
        folders: Folders that are searched after all others.

    Raises:
        Failure: A module is nowhere, or two files have its name.
    """
    return {top: _place(top, names[0], folders) for top, names in names_by_module(job).items()}


def _place(top: str, name: str, folders: Sequence[Path]) -> str:
    beside = PathFinder.find_spec(top, [str(folder) for folder in folders])
    try:
        installed = find_spec(top)
    except (ImportError, ValueError):  # it is no name of a module, or __main__
        installed = None
    if installed is not None and installed.origin in ("built-in", "frozen"):
        raise Failure(f"{name}: {top} is Python's own, and offers nothing to jobs: correct the name", Exit.CONFIG)
    mine, other = _origin(beside), _origin(installed)
    # The installed one would win, and what the user edits would never run.
    if mine and other and mine != other:
        raise Failure(
            f"{name}: {mine} has the name of another module, {other}: give your file a name of its own", Exit.CONFIG
        )
    if beside is None and installed is None:
        where = " or ".join(dict.fromkeys(map(str, folders)))
        raise Failure(
            f"{name}: there is no module {top} in {where}, and none is installed: put it beside the job, or set "
            "PYTHONPATH to its folder",
            Exit.CONFIG,
        )
    return mine or other or top


def _origin(spec: ModuleSpec | None) -> str:
    """Return the file of a module; empty for a package without one."""
    if spec is None or spec.origin is None:
        return ""
    return str(Path(spec.origin).resolve())
