"""The names of a model's versions: a number, `newest` or `best`.

Users call a version by them.
"""

from fedring.control.calls import MAX_ROWS, Control
from fedring.control.failure import Failure
from fedring.daemon.exits import Exit

HELP = "newest; best, of the newest job that has one; or the number in `flctl models list` (0 = newest)"


def names_version(name: str) -> bool:
    """Return whether this is one of the names.

    The version need not exist.
    """
    return name in ("newest", "best") or (name.isascii() and name.isdecimal() and len(name) < 19)


def find_version(control: Control, name: str) -> int:
    """Return the number of the version that the user has named.

    0 stands for the newest.

    Raises:
        Failure: The name has another form, or no version was evaluated yet.
    """
    if not names_version(name):
        raise Failure(f"{name!r} names no version: give newest, best or a number", Exit.USAGE)
    if name != "best":
        return 0 if name == "newest" else int(name)
    best = next((model.version for model in control.models(limit=MAX_ROWS) if model.best_of_job), None)
    if best is None:
        raise Failure(f"no model at {control.address} was evaluated, so none is the best: see `flctl models list`")
    return best
