"""Tables in terminals of any width."""

import io

import pytest

from fedring.ctl import output
from fedring.ctl.output import print_table

COLUMNS = ("client", "state", "updates>", "last seen", "labels")
ROWS = [
    ("hospital-of-the-city", "watching", "1,234,567", "2026-11-26T23:21:13.605+00:00", "gpu=yes, site=north, floor=2"),
    ("ann", "away", "3", "", ""),
]


def printed(width: int, monkeypatch: pytest.MonkeyPatch) -> str:
    text = io.StringIO()
    console = output._Console(width=width, file=text, highlight=False, markup=False)
    monkeypatch.setattr(output, "stdout_console", lambda: console)
    print_table("2 clients", COLUMNS, ROWS)
    return text.getvalue()


@pytest.mark.parametrize("width", [200, 110, 100, 80, 60, 40])
def test_no_word_is_divided(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    text = printed(width, monkeypatch)
    for word in ("hospital-of-the-city", "watching", "1,234,567", "site=north,", "client"):
        assert word in text, f"{word} is divided at {width} columns:\n{text}"
    assert all(len(line) <= width for line in text.splitlines())


def test_a_wide_terminal_has_a_table_and_a_narrow_one_paragraphs(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "client                 state" in printed(200, monkeypatch)
    narrow = printed(60, monkeypatch).splitlines()
    assert [line.split()[0] for line in narrow if line.strip()][1:6] == ["client", "state", "updates", "last", "labels"]
