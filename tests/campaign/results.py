"""The results of cases: lines of JSON in a file, which add up over many runs, and tables of them."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

_COUNTS = (
    "accepted",
    "told",
    "lost",
    "doubled",
    "rounds",
    "models",
    "residuals",
    "private tensors",
    "charges",
    "blobs",
)


def append(path: Path, result: dict[str, Any]) -> None:
    """Add one line to the file."""
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(result) + "\n")


def read(path: Path) -> list[dict[str, Any]]:
    """Return all results in the file; a line that was cut short by a kill is left out."""
    found = []
    for line in path.read_text("utf-8").splitlines() if path.exists() else []:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


def show(results: Iterable[dict[str, Any]], console: Console) -> None:
    """Print what was done to whom, what was compared, and the command that repeats each failure."""
    results = list(results)
    harms, kinds = Counter[str](), defaultdict[str, Counter[str]](Counter)
    for result in results:
        harms.update(result["done"])
        kinds[result["kind"]].update(result["counts"])
        kinds[result["kind"]].update({"cases": 1, "kills": result["kills"], "failed": bool(result["problems"])})
    console.print(_harms_table(harms))
    console.print(_kinds_table(kinds))
    total = sum(kinds.values(), Counter[str]())
    console.print(
        f"{total['cases']} cases, {total['kills']} kills, {total['accepted']} accepted updates: {total['lost']} lost, "
        f"{total['doubled']} doubled; {total['models']} models recomputed; {total['failed']} cases failed"
    )
    for result in results:
        for problem in result["problems"]:
            console.print(f"[bold]{result['command']}[/]\n  {escape(problem)}", soft_wrap=True)


def _harms_table(harms: Counter[str]) -> Table:
    """Make a table of what was done: a row for each harm, a column for each kind of victim."""
    victims = ("server", "client", "line")
    table = Table("harm", *(f"to the {victim}" if victim != "client" else "to clients" for victim in victims))
    rows: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for words, times in harms.items():
        what, _, whom = words.rpartition(" of ") if " of the line" not in words else words.partition(" of ")
        victim = "line" if "line" in whom else "server" if "server" in whom else "client"
        rows[what][victim] += times
    for what in sorted(rows):
        table.add_row(what, *(f"{rows[what][victim]:,}" if rows[what][victim] else "" for victim in victims))
    return table


def _kinds_table(kinds: dict[str, Counter[str]]) -> Table:
    """Make a table of what held: a row for each kind of case, and one for all."""
    table = Table("kind", "cases", "kills", *_COUNTS, "failed")
    rows = {**dict(sorted(kinds.items())), "all": sum(kinds.values(), Counter[str]())}
    for name, counts in rows.items():
        table.add_row(name, *(f"{counts[each]:,}" for each in ("cases", "kills", *_COUNTS, "failed")))
    return table
