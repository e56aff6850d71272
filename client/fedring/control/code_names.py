"""Names for code that a job is given as objects.

A job names code as "module:attribute", because servers, clients and other processes import it. A script may give the
function or class itself, if others would find the very same object under its name.
"""

import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, NoReturn

from fedring.control.failure import Failure
from fedring.daemon.exits import Exit


def name_of(value: object) -> str:
    """Return the name "module:attribute" by which others import a function or class.

    Raises:
        Failure: Others would not find it; the sentence says why, and what to do.
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    if not isinstance(module, str) or not isinstance(name, str) or "<lambda>" in name:
        what = "a lambda" if isinstance(name, str) else f"an object of the class {type(value).__name__}"
        raise _failure(f"{what} has no name by which others could import it: define a function in a module")
    if "." in name:
        inside = "a function" if "<locals>" in name else "a class"
        advice = "define it at the top level of a module"
        raise _failure(f"{name} is defined inside of {inside}, where others cannot import it: {advice}")
    if module == "__main__":
        advice = "put it in a module, and import it from there"
        raise _failure(f"{name} is defined in this script or notebook, from which others cannot import it: {advice}")
    module = _public_module(module, name, value)
    if not _is_importable(module):
        advice = "put it in a file, and import it from there"
        raise _failure(f"{name} belongs to {module}, which is not a module that others can import: {advice}")
    if _find(module, name) is not value:
        raise _failure(f"{module}:{name} is another object than the one given: import it again from {module}")
    return f"{module}:{name}"


def _refuse(value: object, failure: Failure) -> NoReturn:
    raise failure


def with_names(
    table: Mapping[str, Any], *, otherwise: Callable[[Callable[..., Any], Failure], str] = _refuse, below: str = ""
) -> dict[str, Any]:
    """Return the keys of a job, with names instead of objects.

    Arguments (`model_args` and its like) are values and no code, so they stay as they are.

    Args:
        table: The keys.
        otherwise: Returns a name of an object that others cannot import. By default, its failure is raised.
        below: The keys that lead to the table, for the sentence.

    Raises:
        Failure: Others cannot import an object; the sentence names its key.
    """
    return {key: _with_names(f"{below}{key}", value, otherwise) for key, value in table.items()}


def _with_names(key: str, value: Any, otherwise: Callable[[Callable[..., Any], Failure], str]) -> Any:
    if callable(value):
        try:
            return name_of(value)
        except Failure as error:
            return otherwise(value, _failure(f"{key}: {error}"))
    if isinstance(value, Mapping) and not key.endswith("args"):
        return with_names(value, otherwise=otherwise, below=f"{key}.")
    return value


def _public_module(module: str, name: str, value: object) -> str:
    """Return the module by which jobs name an object of that module.

    Our own are named by the package that exports them, as the pages do; those of others, by the module that defines
    them, which their owner has trusted.
    """
    if not module.startswith("fedring."):
        return module
    parts = module.split(".")
    above = (".".join(parts[:count]) for count in range(2, len(parts)))
    return next((package for package in above if _find(package, name) is value), module)


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError, AttributeError):  # it was made by hand, or its package is gone
        return False


def _find(module: str, name: str) -> object:
    return getattr(sys.modules.get(module), name, None)


def _failure(sentence: str) -> Failure:
    return Failure(sentence, Exit.CONFIG)
