"""Arguments from a job for the callables that it names.

They are checked before the call, against bounds and against the signature. They come from a server or an operator as
JSON. Allowed are numbers, booleans, short texts, lists of those, and tables of all these; a table holds no other table.
A text is no path and no URL, unless the callable declares its parameter as a `Path`. Then the text is taken as relative
to the daemon's `data_root`, and must lead to a place below that folder.

An annotation decides the type of a value, and some that pydantic knows would import modules or open files that a text
names. So only plain ones are taken: bool, int, float, str, None, Any, Literal, enumerations, lists, tuples and dicts of
these, and unions. A parameter with another one cannot be given by a job.
"""

import inspect
import json
import types
from collections import abc
from collections.abc import Callable, Mapping
from contextlib import suppress
from enum import Enum
from math import isfinite
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from fedring.train.bounds import MAX_JOB_BYTES, MAX_WHOLE
from fedring.train.errors import SeamError
from fedring.untrusted import parse_json

MAX_VALUES = 10_000
"""The most numbers, booleans and texts in the arguments of one call."""

MAX_TEXT = 256
"""The most characters of a text."""

MAX_LISTS = 3
"""How deep lists may be nested, with the table that holds them."""

_PATH_SIGNS = ("/", "\\", "\0", ":", "%")  # a URL has a colon, and may need no slash
_LEAVES = (bool, int, float, str, None, types.NoneType, Any, object)
_CONTAINERS = (list, tuple, dict, abc.Sequence, abc.Collection, abc.Mapping)
_MAX_SHOWN = 200  # characters of an annotation
_UNKNOWN = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def read_arguments(text: str) -> dict[str, Any]:
    """Parse the arguments of a command from JSON.

    The text is empty if there are none.

    Raises:
        SeamError: With the reason bad_argument.
    """
    if len(text) > MAX_JOB_BYTES:
        raise SeamError("bad_argument", f"The arguments are {len(text)} characters, above {MAX_JOB_BYTES}.")
    try:
        table = parse_json(text or "{}")
    except ValueError as error:
        raise SeamError("bad_argument", f"The arguments are not JSON: {error}.") from error
    if not isinstance(table, dict):
        raise SeamError("bad_argument", f"The arguments are a {type(table).__name__} and not a table.")
    return table


def check_arguments(
    name: str, function: Callable[..., Any], args: Mapping[str, Any], *, given: int, root: Path | None
) -> dict[str, Any]:
    """Check keyword arguments, and return them in their declared types.

    Args:
        name: The name of the function, for errors.
        function: Its signature decides the names and the types of arguments.
        args: The arguments, as parsed from JSON.
        given: How many arguments come before them, by position.
        root: The folder below which paths lie; None = no path can be given.

    Raises:
        SeamError: With the reason bad_argument, or bad_path.
    """
    _check_values(name, args)
    signature = _signature(name, function)
    try:
        signature.bind(*([None] * given), **args)
    except TypeError as error:
        raise SeamError("bad_argument", f"{name} cannot be called with {_shown(args)}: {error}.") from error
    checked: dict[str, Any] = {}
    for key, value in args.items():
        parameter = signature.parameters.get(key)
        if parameter is None or parameter.kind in _UNKNOWN:  # one of **kwargs
            checked[_no_path(name, key, key)] = _no_path(name, key, value)
        elif _declares_path(parameter.annotation):
            checked[key] = _path_below(name, key, value, root)
        else:
            checked[key] = _typed(name, key, _no_path(name, key, value), parameter.annotation)
    return checked


def _check_values(name: str, args: Mapping[str, Any]) -> None:
    """Check the size and the depth of all arguments, without recursion.

    Depth, number, length and size are bounded.
    """
    # The sender chose the depth: a list of work to do cannot overflow the stack.
    count = 0
    waiting: list[tuple[str, Any, int, bool]] = [(str(key), value, 1, False) for key, value in args.items()]
    while waiting:
        key, value, depth, in_table = waiting.pop()
        count += 1
        if count + len(waiting) > MAX_VALUES:
            raise SeamError("bad_argument", f"{name} is given more than {MAX_VALUES} values.")
        if len(key) > MAX_TEXT or not key.isprintable():
            raise SeamError("bad_argument", f"{name} is given the key {key[:80]!a}: it is too long, or not printable.")
        if isinstance(value, dict):
            if in_table or depth > 1:
                raise SeamError("bad_argument", f"{name}: {key} holds a table within another value.")
            waiting += [(f"{key}.{inner}", item, depth + 1, True) for inner, item in value.items()]
        elif isinstance(value, list | tuple):
            if depth > MAX_LISTS:
                raise SeamError("bad_argument", f"{name}: {key} has more than {MAX_LISTS} levels.")
            waiting += [(key, item, depth + 1, in_table) for item in value]
        else:
            _check_leaf(name, key, value)


def _check_leaf(name: str, key: str, value: object) -> None:
    if isinstance(value, str):
        if len(value) > MAX_TEXT:
            raise SeamError("bad_argument", f"{name}: {key} has {len(value)} characters, above {MAX_TEXT}.")
        if not value.isprintable():
            raise SeamError("bad_argument", f"{name}: {key} holds a character that cannot be printed.")
    elif isinstance(value, int):
        if abs(value) > MAX_WHOLE:
            raise SeamError("bad_argument", f"{name}: {key} is beyond 2^63 - 1.")
    elif isinstance(value, float):
        if not isfinite(value):
            raise SeamError("bad_argument", f"{name}: {key} is {value}, and not a finite number.")
    elif value is not None:
        raise SeamError("bad_argument", f"{name}: {key} is a {type(value).__name__}.")


def _signature(name: str, function: Callable[..., Any]) -> inspect.Signature:
    """Return the signature, with its annotations evaluated if possible.

    Annotations that are text are evaluated if all of them can be.
    """
    with suppress(Exception):  # an annotation may name what is imported for type checkers only
        return inspect.signature(function, eval_str=True)
    try:
        return inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise SeamError("bad_argument", f"{name} does not say which arguments it takes.") from error


def _parts(annotation: Any) -> list[Any]:
    """Return the types that an annotation allows, without metadata.

    They are the members of a union, or the one type.
    """
    if get_origin(annotation) is Annotated:
        return _parts(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [part for each in get_args(annotation) for part in _parts(each)]
    return [annotation]


def _declares_path(annotation: Any) -> bool:
    return any(isinstance(part, type) and issubclass(part, PurePath) for part in _parts(annotation))


def _holds_path(annotation: Any) -> bool:
    """Return whether a path would be made of any value inside."""
    return any(
        (isinstance(part, type) and hasattr(part, "__fspath__")) or any(map(_holds_path, get_args(part)))
        for part in _parts(annotation)
        if get_origin(part) is not Literal
    )


def _plain(annotation: Any) -> Any:
    """Return an annotation reduced to types that a job can give.

    Metadata other than bounds is left out.

    Raises:
        TypeError: If nothing is left.
    """
    if get_origin(annotation) is Annotated:  # other metadata may run code of its own
        bounds = [each for each in annotation.__metadata__ if isinstance(each, FieldInfo)]
        inner = _plain(get_args(annotation)[0])
        return Annotated[inner, *bounds] if bounds else inner
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin in (Union, types.UnionType):
        plain = []
        for part in inner:
            with suppress(TypeError):
                plain.append(_plain(part))
        if not plain:
            raise TypeError(annotation)
        return Union[tuple(plain)]  # noqa: UP007  # of a number of types that is not known here
    if annotation in _LEAVES or origin is Literal or (isinstance(annotation, type) and issubclass(annotation, Enum)):
        return annotation
    if (origin or annotation) in _CONTAINERS:
        plain = [each if each is ... else _plain(each) for each in inner]
        container: Any = origin or annotation
        return container[tuple(plain)] if plain else annotation
    raise TypeError(annotation)


def _path_below(name: str, key: str, value: object, root: Path | None) -> Path | None:
    """Return the path of a text, which must lie below the folder.

    This holds even after all links are followed.
    """
    if value is None:
        return None
    if not isinstance(value, str):
        raise SeamError("bad_path", f"{name}: {key} is a path, and not a {type(value).__name__}.")
    if root is None:
        raise SeamError("bad_path", f"{name}: {key} is a path below data_root, which is not set here.")
    parts = PurePath(value).parts
    if "\\" in value or ":" in value or PurePath(value).is_absolute() or ".." in parts or value.startswith("~"):
        raise SeamError("bad_path", f"{name}: {key} = {value!r} is not a relative path below data_root.")
    try:
        folder = root.resolve(strict=True)
        try:
            path = folder.joinpath(value).resolve(strict=True)
        except FileNotFoundError:  # where nothing is missing, Python 3.13 finds a circle of links only if it is strict
            path = folder.joinpath(value).resolve()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a circle of links, before Python 3.13
        why = getattr(error, "strerror", None) or type(error).__name__  # The text of the error may name local folders.
        raise SeamError("bad_path", f"{name}: {key} = {value!r} cannot be looked up: {why}.") from error
    if not path.is_relative_to(folder):
        raise SeamError("bad_path", f"{name}: {key} = {value!r} leads out of data_root through a link.")
    return path


def _may_be_path(text: str) -> bool:
    return any(sign in text for sign in _PATH_SIGNS) or text in (".", "..") or text.startswith("~")


def _no_path(name: str, key: str, value: Any) -> Any:
    """Return a value if none of its texts looks like a path.

    A URL counts as one.

    Raises:
        SeamError: With the reason bad_path.
    """
    waiting = [value]
    while waiting:
        one = waiting.pop()
        if isinstance(one, dict):
            waiting += [*one.values(), *one.keys()]
        elif isinstance(one, list | tuple):
            waiting += one
        elif isinstance(one, str) and _may_be_path(one):
            advice = "a callable that reads files declares such a parameter as a Path"
            raise SeamError("bad_path", f"{name}: {key} holds {one[:80]!r}, which looks like a path: {advice}.")
    return value


def _typed(name: str, key: str, value: Any, annotation: Any) -> Any:
    """Return a value as the type of its parameter."""
    if annotation is inspect.Parameter.empty:
        return value
    if _holds_path(annotation):
        raise SeamError("bad_path", f"{name}: {key} holds paths within a list or a table, which a job cannot give.")
    try:
        plain = _plain(annotation)
    except TypeError as error:
        what = f"a text that cannot be evaluated: {annotation}" if isinstance(annotation, str) else repr(annotation)
        detail = f"{name}: a job cannot give {key}, whose annotation is {what[:_MAX_SHOWN]}."
        raise SeamError("bad_argument", detail) from error
    try:
        return TypeAdapter(plain).validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        what = error.errors(include_url=False, include_input=False)[0]["msg"]
        raise SeamError("bad_argument", f"{name}: {key} = {_shown(value)}: {what[:_MAX_SHOWN]}.") from error


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= MAX_TEXT else f"{text[:MAX_TEXT]}..."
