"""The shell's offers when the user presses Tab.

They are keys and values of jobs, and ids that a running server knows.
"""

import re
from collections.abc import Callable, Iterable, Iterator
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel

from fedring.control.calls import Control
from fedring.control.failure import Failure
from fedring.ctl.access import access_of
from fedring.ctl.options import DEFAULT_SERVER
from fedring.daemon.config import ConfigError

Offer = tuple[str, str]
"""What the shell completes a word to, and a text about it."""

_NOT_PLAIN = re.compile(r"[^\w .:+-]")
_SECONDS = 2.0  # the longest time that a key press may wait for the server


def job_keys(context: typer.Context, incomplete: str) -> list[Offer]:
    """Offer the keys of a job, or a key's few values.

    Keys are offered as `key=`, and values after the equals sign. bash makes words of its own of a key and of the equals
    sign behind it.
    """
    from fedring.train.jobs.job import Job  # imports the schema of jobs, for which no other verb waits

    keys = dict(_keys(Job))
    given: list[str] = ["=", "", *(context.params.get("overrides") or ())]
    last, before = given[-1], given[-2]
    if last == "=" or (last and "=" not in last and before != "="):  # a key without its value
        return _starting([(value, "") for value in _values(keys, before if last == "=" else last)], incomplete)
    key, equals, _ = incomplete.partition("=")
    if equals:
        return _starting([(f"{key}={value}", "") for value in _values(keys, key)], incomplete)
    return _starting([(f"{name}=", description) for name, (_, description) in keys.items()], incomplete)


def job_ids(context: typer.Context, incomplete: str) -> list[Offer]:
    """Offer the ids of the server's newest jobs."""
    return _known(context, incomplete, lambda control: [(str(job.job_id), job.name) for job in control.jobs(limit=50)])


def round_names(context: typer.Context, incomplete: str) -> list[Offer]:
    """Offer the server's newest rounds as JOB.ROUND."""
    return _known(
        context,
        incomplete,
        lambda control: [(f"{one.job_id}.{one.job_round}", one.phase) for one in control.rounds(limit=50)],
    )


def client_ids(context: typer.Context, incomplete: str) -> list[Offer]:
    """Offer the ids of the clients that the server knows."""
    return _known(context, incomplete, lambda control: [(one.client_id, one.state) for one in control.clients()])


def model_versions(context: typer.Context, incomplete: str) -> list[Offer]:
    """Offer the versions of the model that the server keeps."""
    words = [("newest", "the newest version"), ("best", "the best version of the newest job")]
    return _known(
        context,
        incomplete,
        lambda control: [*words, *((str(one.version), one.created_at) for one in control.models())],
    )


def _known(context: typer.Context, incomplete: str, ask: Callable[[Control], Iterable[Offer]]) -> list[Offer]:
    """Return a server's offers that begin with the word.

    There are none if the server does not answer soon. Shells evaluate parts of what they are offered, and texts about
    it come from others: only plain characters pass.
    """
    address = context.params.get("server") or DEFAULT_SERVER
    try:
        with Control(address, channel=access_of(context.params).channel(address), timeout_seconds=_SECONDS) as control:
            plain = ((word, _NOT_PLAIN.sub("_", text)) for word, text in ask(control) if not _NOT_PLAIN.search(word))
            return _starting(plain, incomplete)
    except (Failure, ConfigError):  # there is no place where the user would read it
        return []


def _starting(offers: Iterable[Offer], incomplete: str) -> list[Offer]:
    return [offer for offer in offers if offer[0].startswith(incomplete)]


def _keys(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, tuple[Any, str]]]:
    """Yield each key with its type and its description.

    The keys of inner tables are given as `table.key`.
    """
    for name, field in model.model_fields.items():
        inner = [kind for kind in _alternatives(field.annotation) if isinstance(kind, type)]
        tables = [kind for kind in inner if issubclass(kind, BaseModel)]
        if tables:
            yield from _keys(tables[0], f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", (field.annotation, field.description or "")


def _values(keys: dict[str, tuple[Any, str]], key: str) -> list[str]:
    """Return the values of a key, if it has only a few."""
    if key == "data_parallel.hook":
        from fedring.train.jobs.data_parallel_table import HOOKS

        return list(HOOKS)
    kind, _ = keys.get(key, (None, ""))
    if kind is bool:
        return ["true", "false"]
    return [str(value) for one in _alternatives(kind) if get_origin(one) is Literal for value in get_args(one)]


def _alternatives(kind: Any) -> tuple[Any, ...]:
    return get_args(kind) if get_origin(kind) in (Union, UnionType) else (kind,)
