"""The card of a job: its settings and code, as canonical JSON."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from google.protobuf.json_format import MessageToDict

from fedring.codec.digest import name_of
from fedring.train.orders.commands import TABLES
from fedring.train.orders.signed_job import canonical
from fedring.untrusted import parse_json
from fedring.v1 import federation_pb2 as pb

JOB_KEYS = tuple(sorted(field.name for field in pb.JobSpec.DESCRIPTOR.fields if field.name not in ("job_id", "signed")))
"""What a command says of its job."""

ROUND_KEYS = ("batch_size", "clip_norm", "encoding", "epochs", "lr", "momentum", "mu", "precision", "subset_size")
"""What a command says of the training in its round; a schedule or a strategy may change it from round to round."""

MAX_CARD_BYTES = 1 << 20

_FORMAT = 1
_PLAIN = re.compile(r"[A-Za-z0-9_-]+")
_DEPTH = 8  # tables in each other whose keys are told apart
_TEXTS = TABLES | {"model_args", "optimizer_args", "transforms"}
"""Keys of jobs whose text is JSON: how it is spaced does not matter."""


@dataclass(frozen=True, slots=True)
class Card:
    """The settings and the code of a job, for approval.

    Attributes:
        facts: The canonical form: the keys `format`, `job`, `round`, `free`, `code` and `own`. Keys that are free at
            the site are left out of `job` and `round`.
        free: The values of these keys, for people.
    """

    facts: Mapping[str, Any]
    free: Mapping[str, Any]

    @property
    def text(self) -> bytes:
        """The canonical bytes: JSON with sorted keys, without spaces."""
        return canonical(self.facts)

    @property
    def name(self) -> str:
        """The name of the canonical bytes: 64 hexadecimal digits of BLAKE3."""
        return name_of(self.text).removeprefix("blake3-")


def card_of(command: pb.TrainCmd, site: Mapping[str, Any], free: Collection[str]) -> Card:
    """Return the card of a command.

    Args:
        command: What the server has sent.
        site: What the site adds: its installed code, and its own names in the place of the job's.
        free: The keys whose values need no approval.
    """
    settings = pb.TrainCmd(**{key: getattr(command, key) for key in ROUND_KEYS})  # without the model
    parts = {"job": job_facts(command.job), "round": _facts(settings, ROUND_KEYS)}
    bound = {name: {key: value for key, value in part.items() if key not in free} for name, part in parts.items()}
    loose = {key: value for part in parts.values() for key, value in part.items() if key in free}
    return Card({"format": _FORMAT, **bound, "free": sorted(free), **site}, loose)


def job_facts(job: pb.JobSpec) -> dict[str, Any]:
    """Return the facts in a command about its job, by key."""
    facts = _facts(job, JOB_KEYS)
    return {key: _parsed(value) if key in _TEXTS else value for key, value in facts.items()}


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[tuple[str, Any, Any]]:
    """Return the keys in which two cards differ, with both values.

    None stands for a missing one. Keys of tables are joined by dots, and are in quotes if they are no plain words: a
    server chooses some, and must not make two keys look like one, or move the cursor of a terminal.
    """
    before, after = dict(_leaves("", old)), dict(_leaves("", new))
    # Compared as text, as a card's name is: for Python, true equals 1.
    was, becomes = ({key: canonical({"": value}) for key, value in each.items()} for each in (before, after))
    keys = sorted(key for key in before.keys() | after.keys() if was.get(key) != becomes.get(key))
    return [(key, before.get(key), after.get(key)) for key in keys]


def _facts(message: pb.JobSpec | pb.TrainCmd, keys: Collection[str]) -> dict[str, Any]:
    # Numbers that are not finite, and those of 64 bits, become texts: then the JSON is the same everywhere.
    facts = MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)
    return {key: facts.get(key) for key in keys}


def _parsed(text: Any) -> Any:
    """Return the value of JSON, or the text if it is none."""
    try:
        value = parse_json(text) if text else text
        json.dumps([[[value]]], allow_nan=False)  # as deep as it will lie in the card
    except (ValueError, RecursionError):
        return text
    return value


def _leaves(prefix: str, value: Any, depth: int = 0) -> Iterator[tuple[str, Any]]:
    if isinstance(value, Mapping) and value and depth < _DEPTH:
        for key, inner in value.items():
            word = key if _PLAIN.fullmatch(key) else json.dumps(key)
            yield from _leaves(f"{prefix}.{word}" if prefix else word, inner, depth + 1)
    else:
        yield prefix, value
