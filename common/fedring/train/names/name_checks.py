"""Checks of the names in a configuration, before anything starts.

They are callables as "module:attribute", and a device.
"""

from collections.abc import Iterator
from pathlib import Path

from fedring.daemon.checks import Check, Level
from fedring.daemon.wording import listed
from fedring.data import DataError
from fedring.data.images import FROM_FOLDER
from fedring.offers import Kind
from fedring.train.device import pick_device
from fedring.train.errors import SeamError
from fedring.train.names.offered import Offered

_MOST_LISTED = 12


def check_name(key: str, kind: Kind, name: str, offered: Offered) -> Check:
    """Check that jobs may use a name here.

    Args:
        key: The configuration key that holds the name, for the report.
        kind: The kind that it is named as.
        name: A callable as "module:attribute".
        offered: The names that jobs may use here.
    """
    try:
        offered.get(kind, name)
    except SeamError as error:
        return Check(key, Level.FAIL, str(error))
    return Check(key, Level.OK, name)


def check_data(key: str, name: str, offered: Offered, *, root: Path | None) -> Check:
    """Check a data callable like check_name(), without loading samples.

    A callable that needs a folder must be given one.
    """
    check = check_name(key, "data", name, offered)
    if check.level is Level.OK and root is None and (data := offered.get("data", name)) in FROM_FOLDER:
        try:
            data(None)
        except DataError as error:
            return Check(key, Level.FAIL, str(error))
    return check


def check_offered(offered: Offered) -> Iterator[Check]:
    """List the names that jobs may use here, by kind.

    Trusted modules that offer nothing cause a warning.
    """
    names = offered.names()
    for kind, of_kind in names.items():
        yield Check(f"offered as {kind}", Level.OK, listed(of_kind, _MOST_LISTED))
    for module in offered.without_offers():
        advice = 'mark its functions with fedring.offers.offers, or name them: trusted = ["module:function as kind"]'
        yield Check("trusted", Level.WARN, f"{module} offers nothing that jobs could name", advice)


def check_device(name: str) -> Check:
    """Check that torch has the device called `name`, as pick_device() reads it."""
    try:
        return Check("device", Level.OK, f"{name}: {pick_device(name)}")
    except SeamError as error:
        return Check("device", Level.FAIL, str(error))
