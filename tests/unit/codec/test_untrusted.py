"""JSON that anybody may have written."""

import gc
import json
import sys
from typing import Any

import pytest

from fedring.untrusted import TooDeep, encodable, parse_json


def test_json_is_parsed() -> None:
    assert parse_json('{"a": [1, null]}') == {"a": [1, None]}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[" * 100_000, "too many lists and tables"),
        ('{"a":' * 100_000, "too many lists and tables"),
        ("[" * 201 + "]" * 201, "too many lists and tables"),
        (b"\xff\xfe\xff", "can't decode"),
    ],
    ids=["nothing", "half a table", "lists", "tables", "201 lists", "bytes"],
)
def test_what_cannot_be_parsed_raises_a_value_error(text: str | bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_json(text)


@pytest.mark.parametrize("text", ["[" * 60_000, '{"a":' * 10_000], ids=["lists", "tables"])
def test_nested_lists_do_not_use_up_the_stack(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a collection of garbage that falls into that moment fails in the finalizers of what it finds."""
    failed, before = list[Any](), gc.get_threshold()
    monkeypatch.setattr(sys, "unraisablehook", failed.append)
    gc.collect()
    gc.freeze()
    try:
        for made in range(300, 1000, 20):  # objects, before the collection: one of these is when the stack is used up
            gc.collect()
            Finalized()
            gc.set_threshold(made)
            with pytest.raises(TooDeep):
                parse_json(text)
            gc.set_threshold(*before)
    finally:
        gc.set_threshold(*before)
        gc.unfreeze()
    assert failed == []


class Finalized:
    """Refers to itself, and has a finalizer that needs some of the stack."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        deep(50)


def deep(levels: int) -> int:
    """Call itself so many times."""
    return 1 + deep(levels - 1) if levels else 0


@pytest.mark.parametrize(
    "text",
    [
        "[" * 200 + "]" * 200,
        json.dumps(["[" * 300, '"[' * 300, "\\", "{"] * 3),
        json.dumps([[]] * 300),
        b'{"a": "' + b"[" * 300 + b'"}',
    ],
    ids=["200", "in texts", "beside each other", "bytes"],
)
def test_only_what_is_nested_counts(text: str | bytes) -> None:
    assert parse_json(text) == json.loads(text)


@pytest.mark.parametrize("end", ["", "\\", "\\\\", '"'])
def test_a_text_without_an_end_is_read_once(end: str) -> None:
    with pytest.raises(ValueError, match=r"delimiter|Unterminated|Extra data|Expecting"):
        parse_json('["' + '\\"[' * 500_000 + end)  # minutes, if each quotation mark began another look


def test_a_text_that_no_message_can_carry_is_told_with_escapes() -> None:
    assert encodable("scan-\udcff.png") == "scan-\\udcff.png"
    assert encodable("Jürgen 🙂") == "Jürgen 🙂"
