"""Texts from elsewhere on terminals and in logs: they command nothing, and forge no line."""

import logging
import sys

import pytest

from fedring.ctl.operate.event_display import display
from fedring.ctl.operate.watch import Board
from fedring.ctl.output import Output, print_table, say, stderr_console, stdout_console
from fedring.daemon.logs import set_up_logs, visible
from fedring.server.state.journal import printable
from fedring.v1 import control_pb2 as pb

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
    say(EVIL)
    with display(Output.TABLE, rounds=1, label=EVIL) as show:
        show(pb.Event(id=1, kind="client_failed", text=EVIL))
    board = Board("a server", pb.Status())
    board.show(pb.Event(id=1, kind="client_failed", text=EVIL))
    stdout_console().print(board.render())
    told = "".join(capsys.readouterr())
    assert told.count("owned") >= 6
    assert not {"\x1b", "\x07", "\r", "\x9b", "\u202e"} & set(told)
    assert printable(EVIL).isprintable()


@pytest.mark.parametrize("name", [EVIL, "ward [/b] 7", "ward [red] 7"])
def test_a_progress_bar_shows_a_name_as_it_is(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "400")
    with display(Output.TABLE, rounds=2, label=name) as show:
        state = pb.Round(round=1, phase="waiting")
        show(pb.Event(id=1, kind="round_waits", round=1, text=f"waits for {name}", state=state))
    told = capsys.readouterr().err
    assert visible(name) in told
    assert f"waits for {visible(name)}" in told
    assert "\x1b]0;" not in told
    assert not {"\x07", "\x9b", "\u202e"} & set(told)
