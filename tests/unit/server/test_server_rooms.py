"""Each room of the server says which other rooms it imports, and that is true."""

import ast
import re
from pathlib import Path

import pytest

import fedring.server

SERVER = Path(fedring.server.__path__[0])
ROOMS = sorted(path.parent.name for path in SERVER.glob("*/__init__.py"))
SENTENCE = re.compile(r"Of\s+the\s+server,\s+this\s+room\s+imports\s+([^.]*)\.")


def said(room: str) -> set[str]:
    """Return the rooms that the docstring of a room names as those that it imports."""
    text = ast.get_docstring(ast.parse((SERVER / room / "__init__.py").read_text())) or ""
    found = SENTENCE.search(text)
    assert found is not None, f"{room} does not say what it imports"
    return set(re.findall(r"`(\w+)`", found[1]))


def imported(room: str) -> set[str]:
    """Return the rooms and modules of the server that a room's modules import."""
    found: set[str] = set()
    for path in (SERVER / room).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "fedring.server":
                found.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("fedring.server."):
                found.add((node.module or "").split(".")[2])
    return found - {room}


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_what_it_says(room: str) -> None:
    assert imported(room) == said(room)
