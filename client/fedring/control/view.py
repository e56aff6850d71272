"""The progress of a job as HTML, for notebooks.

It is a bar, the figures of the last round, and a curve as inline SVG. There is no script and no other file in it, so
that a notebook shows it wherever it is opened. The ink is the page's own colour, dark or light. Names come from
operators, clients and code, and are escaped.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from math import isfinite

_WIDTH, _HEIGHT = 480, 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 60, 12, 24  # around the curve
_LINE = "#2b88c9"  # with a contrast above 3 to white and to black
_MOST_POINTS = 300
_MOST_FIGURES = 12
_MOST_LETTERS = 80  # of a name
_SHOWN_APART = ("eval/accuracy", "eval/loss")


@dataclass(frozen=True, slots=True)
class RoundFigures:
    """A round that has ended.

    Attributes:
        number: Within the job, from 1.
        accuracy: None if it is not known, as for the loss.
        loss: The mean loss.
        metrics: All other figures, by name.
    """

    number: int
    accuracy: float | None
    loss: float | None
    metrics: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class JobView:
    """A job at one moment.

    Attributes:
        title: Its name.
        state: How far it is, in a word or a sentence.
        total: The rounds that it asks for.
        rounds: Those that have ended, oldest first.
        share: The share of the work that is done, from 0 to 1; None = that of the rounds.
    """

    title: str
    state: str
    total: int
    rounds: Sequence[RoundFigures]
    share: float | None = None

    def html(self) -> str:
        """Return it as one element of HTML."""
        done = self.rounds[-1].number if self.rounds else 0
        share = done / max(1, self.total) if self.share is None else self.share
        share = min(1.0, max(0.0, share)) if isfinite(share) else 0.0
        head = (
            f'<div><b>{_text(self.title)}</b> <progress value="{share:.4f}" max="1"></progress> '
            f"{done} of {self.total} rounds, {_text(self.state, most=500)}</div>"
        )
        return f'<div class="fedring-job">{head}{_table(self.rounds)}{_curve(self.rounds)}</div>'


def _table(rounds: Sequence[RoundFigures]) -> str:
    """Return the figures of the last round that has any."""
    last = next((each for each in reversed(rounds) if each.accuracy is not None or each.loss is not None), None)
    last = last or (rounds[-1] if rounds else None)
    if last is None:
        return ""
    metrics = {name: value for name, value in sorted(last.metrics.items()) if name not in _SHOWN_APART}
    shown = [*_known(accuracy=last.accuracy, loss=last.loss), *list(metrics.items())[:_MOST_FIGURES]]
    more = len(metrics) - _MOST_FIGURES
    rows = "".join(
        f'<tr><td style="text-align:left">{_text(name)}</td><td style="text-align:right">{_number(value)}</td></tr>'
        for name, value in shown
    )
    rows += f'<tr><td colspan="2">and {more} more</td></tr>' if more > 0 else ""
    return f"<table><caption>round {last.number}</caption>{rows}</table>" if rows else ""


def _known(**figures: float | None) -> Iterable[tuple[str, float]]:
    return ((name, value) for name, value in figures.items() if value is not None)


def _curve(rounds: Sequence[RoundFigures]) -> str:
    """Return the curve of the accuracy.

    Where no accuracy is known, it is that of the loss.
    """
    for what in ("accuracy", "loss"):
        known = [(each.number, value) for each in rounds if (value := getattr(each, what)) is not None]
        known = [(number, value) for number, value in known if isfinite(value)]
        if len(known) > 1:
            return _svg(what, _thinned(known))
    return ""


def _thinned(points: list[tuple[int, float]]) -> list[tuple[int, float]]:
    """Return the last point, and as many others as have room."""
    step = -(-len(points) // _MOST_POINTS)
    return points[::-1][::step][::-1]


def _svg(what: str, points: Sequence[tuple[int, float]]) -> str:
    first, last = points[0][0], points[-1][0]
    low, high = min(value for _, value in points), max(value for _, value in points)
    wide, tall = _WIDTH - _LEFT - _RIGHT, _HEIGHT - _TOP - _BOTTOM
    # Divided before they are subtracted: the distance of two finite losses may be infinite.
    span = (high / 2 - low / 2) or 1.0
    places = [
        (_LEFT + wide * (number - first) / max(1, last - first), _TOP + tall * ((high / 2 - value / 2) / span))
        for number, value in points
    ]
    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    x, y = places[-1]
    base = _TOP + tall
    ink = 'fill="currentColor" font-size="11" font-family="sans-serif"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{_WIDTH}" height="{_HEIGHT}" '
        f'viewBox="0 0 {_WIDTH} {_HEIGHT}" style="max-width:100%">'
        f"<title>{what} by round</title>"
        f'<path d="M{_LEFT} {_TOP}V{base}H{_LEFT + wide}" fill="none" stroke="currentColor" stroke-opacity="0.4"/>'
        f'<text x="{_LEFT - 6}" y="{_TOP + 4}" text-anchor="end" {ink}>{_number(high)}</text>'
        f'<text x="{_LEFT - 6}" y="{base}" text-anchor="end" {ink}>{_number(low)}</text>'
        f'<text x="{_LEFT}" y="{_HEIGHT - 8}" {ink}>round {first}</text>'
        f'<text x="{_LEFT + wide}" y="{_HEIGHT - 8}" text-anchor="end" {ink}>{last}</text>'
        f'<text x="{_LEFT + wide / 2:.0f}" y="{_HEIGHT - 8}" text-anchor="middle" {ink}>{what}</text>'
        f'<polyline points="{line}" fill="none" stroke="{_LINE}" stroke-width="2"/>'
        f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{_LINE}"/>'
        f'<text x="{x + 7:.1f}" y="{y + 4:.1f}" {ink}>{_number(points[-1][1])}</text></svg>'
    )


def _number(value: float) -> str:
    return f"{value:.4g}" if isfinite(value) else "not finite"


def _text(text: str, *, most: int = _MOST_LETTERS) -> str:
    shown = text if len(text) <= most else f"{text[:most]}…"
    return escape("".join(letter if letter.isprintable() else "�" for letter in shown))
