"""A job as HTML, and the cell of a notebook that shows it."""

import math
import sys
from html.parser import HTMLParser
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fedring.control.notebook import LiveView, live_view
from fedring.control.view import JobView, RoundFigures

HOSTILE = '"><script>alert(1)</script>\u202e'


class Elements(HTMLParser):
    """Collects elements, and checks that each one is closed."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.attributes: dict[str, list[str]] = {}
        self.texts: list[str] = []
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self._open.append(tag)
        for name, value in attrs:
            self.attributes.setdefault(name, []).append(value or "")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        self._open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def rounds(*values: float | None) -> list[RoundFigures]:
    return [RoundFigures(number, value, 1.0, {"eval/f1": 0.5}) for number, value in enumerate(values, 1)]


def test_a_job_has_a_bar_the_last_figures_and_a_curve() -> None:
    seen = Elements(JobView("spirals", "running", 4, rounds(0.25, 0.75)).html())
    assert seen.attributes["value"] == ["0.5000"]
    assert "2 of 4 rounds, running" in "".join(seen.texts)
    assert {"accuracy", "0.75", "loss", "1", "eval/f1", "0.5", "round 2"} <= set(seen.texts)
    (points,) = seen.attributes["points"]
    first, last = (tuple(map(float, point.split(","))) for point in points.split())
    assert first[0] < last[0]
    assert first[1] > last[1]  # upwards, since the accuracy rises
    assert not {"script", "link", "img", "iframe", "style"} & set(seen.names)
    assert "http" not in "".join(value for name, each in seen.attributes.items() for value in each if name != "xmlns")


def test_before_its_first_round_a_job_has_a_bar_only() -> None:
    seen = Elements(JobView("spirals", "running", 4, [], 0.1).html())
    assert seen.names == ["div", "div", "b", "progress"]


def test_hostile_names_are_texts() -> None:
    figures = [RoundFigures(number, None, 0.5, {HOSTILE: 1.0}) for number in (1, 2)]
    seen = Elements(JobView(HOSTILE, HOSTILE, 2, figures).html())
    assert "script" not in seen.names
    assert set(seen.attributes) <= {
        *("class", "value", "max", "style", "xmlns", "role", "width", "height", "viewbox", "points", "fill", "stroke"),
        *("d", "stroke-opacity", "stroke-width", "x", "y", "cx", "cy", "r", "text-anchor", "font-size", "font-family"),
    }
    assert sum("<script>alert(1)</script>" in text for text in seen.texts) == 3
    assert "\u202e" not in "".join(seen.texts)


@pytest.mark.parametrize("values", [(math.nan, math.inf), (1e308, -1e308), (0.5, 0.5), (None, 0.5), (-0.0, 5e-324)])
def test_any_numbers_make_a_drawing_with_finite_places(values: tuple[float | None, ...]) -> None:
    same = [RoundFigures(7, value, value, {}) for value in values]  # also if a server counts wrongly
    for figures in (rounds(*values), same):
        html = JobView("job", "running", 0, figures, math.nan).html()
        assert Elements(html).attributes["value"] == ["0.0000"]
        assert "nan" not in html
        assert "inf" not in html.replace("infinity", "")


def test_many_rounds_and_metrics_stay_small() -> None:
    figures = [
        RoundFigures(each, each / 10_000, 1.0, {f"eval/{m}": 1.0 for m in range(40)}) for each in range(1, 10_001)
    ]
    html = JobView("x" * 1000, "running", 10_000, figures).html()
    assert len(html) < 20_000
    assert "and 28 more" in html


def test_a_view_is_made_anew_only_after_a_while_but_the_last_one_always() -> None:
    now, shown = [0.0], list[str]()
    live = LiveView(shown.append, lambda: now[0])
    live.update(lambda: "first")
    live.update(lambda: pytest.fail("it is too early"))
    now[0] = 1.0
    live.update(lambda: "second")
    live.update(lambda: None, last=True)  # the server does not answer
    live.update(lambda: "last", last=True)
    assert shown == ["first", "second", "last"]


def test_a_view_that_takes_long_is_made_less_often() -> None:
    now, made = [0.0], list[float]()

    def slow() -> str:
        made.append(now[0])
        now[0] += 1.0
        return ""

    live = LiveView(lambda html: None, lambda: now[0])
    for at in (0.0, 2.0, 9.9, 10.0):
        now[0] = max(now[0], at)
        live.update(slow)
    assert made == [0.0, 10.0]


def test_there_is_a_view_in_a_kernel_only_and_it_changes_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert live_view() is None
    assert "IPython" not in sys.modules  # which nobody needs
    ipython, display = ModuleType("IPython"), ModuleType("IPython.display")
    shell: Any = SimpleNamespace()  # IPython in a terminal has no kernel
    vars(ipython)["get_ipython"] = lambda: shell
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert live_view() is None
    shell.kernel = object()
    calls: list[tuple[str, object]] = []
    handle = SimpleNamespace(update=lambda shown: calls.append(("update", shown)))

    def show(shown: object, *, display_id: bool) -> object:
        assert display_id
        calls.append(("display", shown))
        return handle

    vars(display).update(HTML=lambda html: html, display=show)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    live = live_view()
    assert live is not None
    live.update(lambda: "one", last=True)
    live.update(lambda: "two", last=True)
    assert calls == [("display", "one"), ("update", "two")]
