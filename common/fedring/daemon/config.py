"""Configuration in layers, from defaults to command-line flags.

The layers are defaults, a TOML or JSON file, the environment, `key=value`, and flags. A later layer wins. Unknown keys
are errors that name the nearest valid key.
"""

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, Generic, TypeVar, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, ValidationError
from pydantic.fields import FieldInfo

from fedring.daemon.wording import either, given, word

if TYPE_CHECKING:
    from pydantic_settings import BaseSettings

COMMAND_LINE = "the command line"
FixedPath = Annotated[Path, AfterValidator(lambda path: path.absolute())]
"""A path from the directory of the start: the code of a job, or a script, may change that later."""

_NEAR = 0.7  # how similar a key must be to be suggested, from 0 to 1


class ConfigError(Exception):
    """The configuration is wrong.

    The text names the mistake and its place in one sentence.
    """


C = TypeVar("C", bound="BaseSettings")


@dataclass(frozen=True, slots=True)
class Loaded(Generic[C]):
    """A configuration, and the origin of each value that was set.

    Values that are defaults have no origin.
    """

    config: C
    origins: dict[str, str]


def load_config(
    model: type[C],
    path: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Loaded[C]:
    """Load a configuration from all its layers.

    Args:
        model: the settings' class.
        path: a .toml or .json file, if there is one.
        overrides: `key=value` strings.
        flags: the command line's flags by key; those that are None were not given.

    Raises:
        ConfigError: if a layer cannot be read, has an unknown key, or if the values do not fit the model.
    """
    layers = [
        (f"file {path}", read_document(path) if path else {}),
        ("environment", _environment(model)),
        (COMMAND_LINE, parse_overrides(overrides)),
        (COMMAND_LINE, {key: value for key, value in (flags or {}).items() if value is not None}),
    ]
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        # Each layer is checked before it is merged: afterwards nobody could tell where a wrong key came from.
        check_keys(model, layer, where=origin)
        origins |= {key: origin for key, _ in _leaves(layer)}
        merged = merge(merged, layer)
    try:
        return Loaded(model(**merged), origins)
    except ValidationError as error:
        raise ConfigError(explain(error, origins, model)) from error


def split_arguments(arguments: Sequence[str]) -> tuple[Path | None, list[str]]:
    """Divide arguments into the configuration's file and `key=value` overrides.

    The file is None if none is given.

    Raises:
        ConfigError: for any other argument, or a second file.
    """
    files = [a for a in arguments if "=" not in a and a.endswith((".toml", ".json"))]
    if len(files) > 1:
        raise ConfigError(f"there is one configuration file at most, and these are {len(files)}: {', '.join(files)}")
    for argument in arguments:
        if argument not in files and "=" not in argument:
            what = f"{argument!r} is neither a configuration file (.toml, .json) nor key=value"
            raise ConfigError(_spaced(arguments) or what)
    return (Path(files[0]) if files else None), [a for a in arguments if a not in files]


def read_document(path: Path) -> dict[str, Any]:
    """Read the table in a .toml or .json file.

    Raises:
        ConfigError: if the file cannot be read, or does not hold a table.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors begin a file with a mark of its encoding
        document = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except RecursionError:
        raise ConfigError(f"{path} holds too many lists and tables in each other") from None
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold a table of keys, not a {type(document).__name__}")
    return document


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """Return the nested table that `a.b=value` strings describe.

    A value that is not JSON is text.
    """
    table: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        key = key.strip()  # of 'key = value', in quotes
        if not equals or not key:
            raise ConfigError(_spaced(overrides) or f"{override!r} is not of the form key=value")
        try:
            value = json.loads(text)
        except RecursionError:
            raise ConfigError(f"the value of {key[:100]!r} holds too many lists and tables in each other") from None
        except ValueError:
            value = text
        first, *inner = key.split(".")
        for part in reversed(inner):
            value = {part: value}
        table = merge(table, {first: value})
    return table


def _spaced(arguments: Sequence[str]) -> str:
    """Return the sentence about `key = value` as several arguments.

    A shell makes them. It is empty if none of the arguments looks so.
    """
    for before, argument, after in zip(["", *arguments], arguments, [*arguments[1:], ""], strict=False):
        key, equals, value = argument.partition("=")
        # "key =value" and "key = value" have the equals sign at the start of an argument, "key= value" at its end.
        if equals and not value and key and after and "=" not in after:
            return f"a key and its value are one argument, without spaces: {argument}{after}"
        if equals and not key and before:
            return f"a key and its value are one argument, without spaces: {before}={value or after}"
    return ""


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """Return `under` with the values of `over` in it, table by table."""
    merged = dict(under)
    for key, value in over.items():
        both = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def check_keys(model: type[BaseModel], table: Mapping[str, Any], *, where: str, prefix: str = "") -> None:
    """Raise ConfigError for a key of `table` that `model` does not have."""
    for key, value in table.items():
        field = model.model_fields.get(key)
        if field is None:
            near = [repr(prefix + name) for name in difflib.get_close_matches(str(key), model.model_fields, 2, _NEAR)]
            hint = f"; did you mean {either(near)}?" if near else f"; valid keys: {', '.join(model.model_fields)}"
            place = f"{'on' if where == COMMAND_LINE else 'in'} {where}"
            raise ConfigError(f"unknown key {f'{prefix}{key}'!r} {place}{hint}")
        inner, here = _table_of(field.annotation), f"{prefix}{key}."
        if inner and isinstance(value, Mapping):
            check_keys(inner, value, where=where, prefix=here)
        for index, row in enumerate(value if isinstance(value, list) else []):
            if inner and isinstance(row, Mapping):
                check_keys(inner, row, where=where, prefix=f"{here}{index}.")


def _table_of(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a key's table, or None.

    The table may be optional.
    """
    kinds = get_args(annotation) or (annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def explain(error: ValidationError, origins: Mapping[str, str], model: type[BaseModel] | None = None) -> str:
    """Return the first error in one sentence.

    Args:
        error: pydantic's findings.
        origins: where each key's value came from.
        model: describes the keys, if it is given.
    """
    # A key that may have several types has one error for each of them: these become one clause.
    found: dict[str, list[str]] = {}
    values: dict[str, str] = {}
    for row in error.errors():
        key, field = _locate(row["loc"], model)
        text = word(row, (field and field.description) or "")
        table = _table_of(field.annotation) if field else None
        if row["type"] == "model_type" and table:
            text += f", such as {key}.{next(iter(table.model_fields))}"
        found.setdefault(key, []).append(text)
        values.setdefault(key, given(row))
    key, texts = next(iter(found.items()))
    origin = f" (from {origins[key]})" if key in origins else ""
    more = f"; and {len(found) - 1} more" if len(found) > 1 else ""
    where = f"{key}{origin}: " if key else ""
    return f"{where}{either(texts)}{values[key]}{more}"


def _locate(loc: Sequence[int | str], model: type[BaseModel] | None) -> tuple[str, FieldInfo | None]:
    """Return the key of an error, and its field if known."""
    field, end = None, len(loc)
    for depth, part in enumerate(loc, 1):
        field = model.model_fields.get(str(part)) if model else None
        model = _table_of(field.annotation) if field else None
        if field and not model:
            if get_origin(field.annotation) in (Union, UnionType):
                end = depth  # what follows names one of the alternatives
            break
    return ".".join(str(part) for part in loc[:end]), field


def describe(loaded: Loaded[C]) -> str:
    """Return every key with its value and origin, a line each.

    `--print-config` prints this text.
    """
    rows = []
    for key, value in _leaves(loaded.config.model_dump(mode="json")):
        rows.append(f"{key} = {json.dumps(value)}  # {loaded.origins.get(key, 'default')}")
    return "\n".join(rows)


def _environment(model: "type[BaseSettings]") -> dict[str, Any]:
    from pydantic_settings import SettingsError  # takes long to import, and flctl needs it hardly ever

    from fedring.daemon.variables import Variables

    prefix = model.model_config.get("env_prefix", "").lower()
    for name in os.environ:
        if name.lower().startswith(prefix):  # as pydantic-settings looks for them
            key = name.lower().removeprefix(prefix).partition("__")[0]
            check_keys(model, {key: None}, where=f"environment variable {name}")
    try:
        return Variables(model)()
    except SettingsError as error:
        raise ConfigError(str(error.__cause__ or error)) from error


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
