"""Checks before a daemon starts.

`--check-config`, each start, and `flctl doctor` share them.
"""

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from fedring.daemon.config import ConfigError

log = logging.getLogger(__name__)


class Level(StrEnum):
    """The outcome of a check."""

    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check: its subject, its finding, and advice."""

    name: str
    level: Level
    found: str
    advice: str = ""


def refuse_failed(checks: Iterable[Check]) -> None:
    """Raise ConfigError on the first check that has failed.

    Checks before it that warn are logged; those after it are not made.
    """
    for check in checks:
        if check.level is Level.WARN:
            log.warning("%s: %s: %s", check.name, check.found, check.advice)
        if check.level is Level.FAIL:
            raise ConfigError(": ".join(text for text in (check.name, check.found, check.advice) if text))


def existing_part(path: Path) -> Path:
    """Return the path, or the nearest folder above it that exists; absolute."""
    path = path.absolute()
    return next(part for part in (path, *path.parents) if part.exists())


def check_writable(name: str, folder: Path) -> Check:
    """Check that the folder can be written to, or created."""
    folder = folder.absolute()
    there = existing_part(folder)
    if not there.is_dir():
        return Check(name, Level.FAIL, f"{folder} cannot be written: {there} is no folder", "choose another one")
    if not os.access(there, os.W_OK | os.X_OK):
        return Check(name, Level.FAIL, f"{folder} cannot be written", "let the daemon's user own it, or choose another")
    return Check(name, Level.OK, f"{folder} can be used")


def check_data_root(folder: Path | None) -> Iterator[Check]:
    """Check that the folder of the data sets, if named, is readable."""
    if folder is not None and not (folder.is_dir() and os.access(folder, os.R_OK | os.X_OK)):
        yield Check(
            "data_root", Level.FAIL, f"{folder} is no folder that can be read", "create it, or correct the path"
        )
