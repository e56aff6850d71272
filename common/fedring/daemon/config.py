"""Configuration in layers: defaults, a TOML or JSON file, the environment, `key=value`, flags.

A later layer wins. Unknown keys are errors that name the nearest valid key.
"""

import difflib
import json
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_settings import BaseSettings, EnvSettingsSource


class ConfigError(Exception):
    """What is wrong with the configuration, and where, in one sentence."""


C = TypeVar("C", bound=BaseSettings)


@dataclass(frozen=True, slots=True)
class Loaded(Generic[C]):
    """A configuration, and where each value that is not a default came from."""

    config: C
    origins: dict[str, str]


def load_config(
    model: type[C],
    path: Path | None = None,
    *,
    overrides: Sequence[str] = (),
    flags: Mapping[str, Any] | None = None,
) -> Loaded[C]:
    """The configuration that all layers make together; ConfigError if they make none."""
    layers = [
        (f"file {path}", read_document(path) if path else {}),
        ("environment", _environment(model)),
        ("override", parse_overrides(overrides)),
        ("flag", {key: value for key, value in (flags or {}).items() if value is not None}),
    ]
    merged: dict[str, Any] = {}
    origins: dict[str, str] = {}
    for origin, layer in layers:
        check_keys(model, layer, where=origin)
        origins |= {key: origin for key, _ in _leaves(layer)}
        merged = merge(merged, layer)
    try:
        return Loaded(model(**merged), origins)
    except ValidationError as error:
        raise ConfigError(explain(error, origins)) from error


def read_document(path: Path) -> dict[str, Any]:
    """The table in a .toml or .json file; ConfigError if it cannot be read."""
    try:
        text = path.read_text(encoding="utf-8")
        document = json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not valid {'JSON' if path.suffix == '.json' else 'TOML'}: {error}") from error
    if not isinstance(document, dict):
        raise ConfigError(f"{path} must hold a table of keys, not a {type(document).__name__}")
    return document


def parse_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    """The nested table that `a.b=value` strings describe; values are JSON, or else text."""
    table: dict[str, Any] = {}
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"{override!r} is not of the form key=value")
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        first, *inner = key.split(".")
        for part in reversed(inner):
            value = {part: value}
        table = merge(table, {first: value})
    return table


def merge(under: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    """`under` with the values of `over`, table by table."""
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
            near = difflib.get_close_matches(key, model.model_fields, 1, 0.5)
            hint = f"; did you mean {prefix + near[0]!r}?" if near else f"; valid keys: {', '.join(model.model_fields)}"
            raise ConfigError(f"unknown key {prefix + key!r} in {where}{hint}")
        inner = _table_of(field.annotation)
        if inner and isinstance(value, Mapping):
            check_keys(inner, value, where=where, prefix=f"{prefix}{key}.")


def _table_of(annotation: Any) -> type[BaseModel] | None:
    """The model that a key of this type holds, also if it may be absent."""
    kinds = get_args(annotation) or (annotation,)
    return next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), None)


def explain(error: ValidationError, origins: Mapping[str, str]) -> str:
    """The first thing wrong, in one sentence."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"])
    origin = f" (from {origins[key]})" if key in origins else ""
    more = f"; and {error.error_count() - 1} more" if error.error_count() > 1 else ""
    where = f"{key}{origin}: " if key else ""
    return f"{where}{first['msg'].removeprefix('Value error, ')}{more}"


def describe(loaded: Loaded[C]) -> str:
    """Every key with its value and where it came from, one a line: what --print-config prints."""
    rows = []
    for key, value in _leaves(loaded.config.model_dump(mode="json")):
        rows.append(f"{key} = {json.dumps(value)}  # {loaded.origins.get(key, 'default')}")
    return "\n".join(rows)


def _environment(model: type[BaseSettings]) -> dict[str, Any]:
    prefix = model.model_config.get("env_prefix", "")
    for name in os.environ:
        key = name.removeprefix(prefix).lower().partition("__")[0]
        if name.startswith(prefix) and key not in model.model_fields:
            check_keys(model, {key: None}, where=f"environment variable {name}")
    return EnvSettingsSource(model)()


def _leaves(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value
