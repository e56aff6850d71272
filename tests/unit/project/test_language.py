"""The first line of each docstring is short, and names things by their nouns."""

import ast
import re
from pathlib import Path

import pytest
from tests.conftest import ROOT

WORDS = 12
CLAUSE = re.compile(r"\b(what|that which|of whom|of which|whoever)\b", re.IGNORECASE)
FILES = sorted(path for tree in ("server", "client", "common", "protos") for path in (ROOT / tree).rglob("*.py"))
OWN = [path for path in FILES if not path.name.endswith(("_pb2.py", "_pb2_grpc.py")) and "/build/" not in str(path)]
DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def first_lines(path: Path) -> list[tuple[int, str]]:
    """Return the first line of each docstring in a file, with its number."""
    found = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, DOCUMENTED) and (text := ast.get_docstring(node)):
            found.append((node.body[0].lineno, text.strip().splitlines()[0]))
    return found


@pytest.mark.parametrize("path", OWN, ids=lambda path: str(path.relative_to(ROOT)))
def test_first_lines_are_short_and_have_no_clause_with_what(path: Path) -> None:
    lines = first_lines(path)
    assert [f"{number}: {line}" for number, line in lines if len(line.split()) > WORDS] == []
    assert [f"{number}: {line}" for number, line in lines if CLAUSE.search(line)] == []


@pytest.mark.parametrize(
    ("line", "clause"),
    [
        ("Return the weight of a client.", False),
        ("Return what a client counts.", True),
        ("Hold clients, of which some are gone.", True),
        ("Somewhat shorten the line.", False),
    ],
)
def test_a_clause_is_found(line: str, clause: bool) -> None:
    assert bool(CLAUSE.search(line)) == clause
