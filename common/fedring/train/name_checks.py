"""Checks, before anything starts, of what a configuration names: callables as "module:attribute", and a device."""

from collections.abc import Sequence
from pathlib import Path

from fedring.daemon.checks import Check, Level
from fedring.data import DataError
from fedring.data.images import FROM_FOLDER
from fedring.train.device import pick_device
from fedring.train.errors import SeamError
from fedring.train.seam import resolve


def check_name(key: str, name: str, trusted: Sequence[str]) -> Check:
    """Check that there is a callable `name`, and that it comes from a trusted module.

    Args:
        key: The configuration key that holds the name, for the report.
        name: A callable as "module:attribute".
        trusted: The modules that may be imported.
    """
    try:
        resolve(name, trusted)
    except SeamError as error:
        return Check(key, Level.FAIL, str(error))
    return Check(key, Level.OK, name)


def check_data(key: str, name: str, trusted: Sequence[str], *, root: Path | None) -> Check:
    """Check a data callable like check_name(), and that it is given a folder if it needs one; loads no samples."""
    check = check_name(key, name, trusted)
    if check.level is Level.OK and root is None and (data := resolve(name, trusted)) in FROM_FOLDER:
        try:
            data(None)
        except DataError as error:
            return Check(key, Level.FAIL, str(error))
    return check


def check_device(name: str) -> Check:
    """Check that torch has the device called `name`, as pick_device() reads it."""
    try:
        return Check("device", Level.OK, f"{name}: {pick_device(name)}")
    except SeamError as error:
        return Check("device", Level.FAIL, str(error))
