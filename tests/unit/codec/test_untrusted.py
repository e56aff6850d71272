"""JSON that anybody may have written."""

import pytest

from fedring.untrusted import encodable, parse_json


def test_json_is_parsed() -> None:
    assert parse_json('{"a": [1, null]}') == {"a": [1, None]}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("", "Expecting value"),
        ("{", "Expecting property name"),
        ("[" * 100_000, "too many lists and tables"),
        ('{"a":' * 100_000, "too many lists and tables"),
        (b"\xff\xfe\xff", "can't decode"),
    ],
    ids=["nothing", "half a table", "lists", "tables", "bytes"],
)
def test_what_cannot_be_parsed_raises_a_value_error(text: str | bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        parse_json(text)


def test_a_text_that_no_message_can_carry_is_told_with_escapes() -> None:
    assert encodable("scan-\udcff.png") == "scan-\\udcff.png"
    assert encodable("Jürgen 🙂") == "Jürgen 🙂"
