"""Whether what a configuration names as "module:attribute" can be used here; each finding is one sentence."""

from collections.abc import Sequence
from pathlib import Path

from fedring.daemon.checks import Check, Level
from fedring.data import DataError
from fedring.data.images import FROM_FOLDER
from fedring.train.device import pick_device
from fedring.train.errors import SeamError
from fedring.train.seam import resolve


def check_name(key: str, name: str, trusted: Sequence[str]) -> Check:
    """Whether there is such a callable, in a trusted module."""
    try:
        resolve(name, trusted)
    except SeamError as error:
        return Check(key, Level.FAIL, str(error))
    return Check(key, Level.OK, name)


def check_data(key: str, name: str, trusted: Sequence[str], *, root: Path | None) -> Check:
    """The same of a data callable; and whether it has the folder without which it has no samples. None is loaded."""
    check = check_name(key, name, trusted)
    if check.level is Level.OK and root is None and (data := resolve(name, trusted)) in FROM_FOLDER:
        try:
            data(None)
        except DataError as error:
            return Check(key, Level.FAIL, str(error))
    return check


def check_device(name: str) -> Check:
    """Whether torch sees the device."""
    try:
        return Check("device", Level.OK, f"{name}: {pick_device(name)}")
    except SeamError as error:
        return Check("device", Level.FAIL, str(error))
