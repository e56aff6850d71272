"""Labels of clients, such as a site, and of jobs.

A client's labels are a table such as { site = "eu", device = "phone" }. A job asks for labels with a table that holds,
for each of them, one value or a list of those that will do: { site = ["eu", "us"] }.
"""

import re
from collections.abc import Mapping
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator

MAX_LABELS = 16
"""The most labels of a client, or of a job, and the most values of one label that a job can list."""

_WORD = re.compile(r"[A-Za-z0-9._-]{1,64}")

Wanted = Mapping[str, str | list[str]]


def check_labels(labels: dict[str, str]) -> dict[str, str]:
    """Check the labels of a client.

    Returns:
        The same labels.

    Raises:
        ValueError: If there are more than MAX_LABELS, or if a name or a value is not 1 to 64 of A-Z a-z 0-9 . _ -
    """
    _check_count(len(labels), "labels")
    for name, value in labels.items():
        _check_word(name, "the name of a label")
        _check_word(value, f"{name} in it")
    return labels


def check_wanted(wanted: object) -> object:
    """Check the labels that a job asks for.

    Returns:
        The same value.

    Raises:
        ValueError: If it is not a table of labels as the module describes it, within the bounds of check_labels().
    """
    if not isinstance(wanted, Mapping):
        raise ValueError('must be a table of labels, such as { site = "eu" }')
    _check_count(len(wanted), "labels")
    for name, values in wanted.items():
        _check_word(name, "the name of a label")
        if isinstance(values, list):
            _check_count(len(values), f"values of {name}")
            if not values:
                raise ValueError(f"{name} in it lists no value that a client could have")
        for value in values if isinstance(values, list) else [values]:
            _check_word(value, f"{name} in it")
    return wanted


def match(labels: Mapping[str, str], wanted: Wanted) -> bool:
    """Return whether a client with these labels has all that are wanted."""
    return all(
        labels.get(name) in (values if isinstance(values, list) else [values]) for name, values in wanted.items()
    )


def shown(labels: Wanted) -> str:
    """Return labels in one line, such as "device=phone,site=eu|us".

    It is "" if there are none.
    """
    parts = ((name, "|".join(values) if isinstance(values, list) else values) for name, values in labels.items())
    return ",".join(f"{name}={value}" for name, value in sorted(parts))


def _check_count(count: int, what: str) -> None:
    if count > MAX_LABELS:
        raise ValueError(f"must have at most MAX_LABELS = {MAX_LABELS} {what}, and has {count}")


def _check_word(word: object, what: str) -> None:
    if not isinstance(word, str) or not _WORD.fullmatch(word):
        raise ValueError(f"{what} must be text of 1 to 64 of A-Z a-z 0-9 . _ -, and is {word!r:.100}")


Labels = Annotated[dict[str, str], AfterValidator(check_labels)]
WantedLabels = Annotated[dict[str, str | list[str]], BeforeValidator(check_wanted)]
