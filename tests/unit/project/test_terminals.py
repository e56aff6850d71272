"""Texts from elsewhere on terminals and in logs: they command nothing, and forge no line."""

import logging

import pytest

from fedring.ctl.output import print_table, stderr_console
from fedring.daemon.logs import set_up_logs, visible
from fedring.server.state.journal import printable

EVIL = "\x1b]0;owned\x07\r\n12:00:00 I forged \u202e\x9b2J"


@pytest.mark.parametrize("text", ["", "größe 3", "a\\b", "日本"])
def test_plain_texts_stay_as_they_are(text: str) -> None:
    assert visible(text) == text


def test_a_line_of_a_log_stays_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    try:
        set_up_logs("text")
        try:
            raise ValueError(EVIL)
        except ValueError:
            logging.getLogger("x").exception("failed: %s", EVIL)
    finally:
        root.handlers = before
        root.setLevel(level)
    told = capsys.readouterr().err
    lines = told.splitlines()
    assert all(letter.isprintable() for line in lines for letter in line)
    assert sum("failed: " in line for line in lines) == 1
    assert not any(line.startswith("12:00:00 I forged") for line in lines)


def test_tables_and_messages_of_flctl_hold_no_escapes(capsys: pytest.CaptureFixture[str]) -> None:
    print_table(EVIL, (EVIL,), [(EVIL,)])
    stderr_console().print(EVIL)
    told = "".join(capsys.readouterr())
    assert "owned" in told
    assert not {"\x1b", "\x07", "\r", "\x9b", "\u202e"} & set(told)
    assert printable(EVIL).isprintable()
