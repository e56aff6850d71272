"""docs/architecture.md names modules, classes and functions that exist, and every room of the code."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
ROOTS = [ROOT / name for name in ("server", "client", "common", "protos")]
NAMES = sorted(set(re.findall(r"`(fedring(?:\.\w+)+)`", PAGE)))


def source_of(dotted: str) -> tuple[Path, list[str]] | None:
    """Return the module that a dotted name begins with, and the names within it; None if there is no such module."""
    parts = dotted.split(".")
    for length in range(len(parts), 1, -1):
        for root in ROOTS:
            path = root.joinpath(*parts[:length])
            for module in (path.with_suffix(".py"), path / "__init__.py"):
                if module.is_file():
                    return module, parts[length:]
    return None


def defines(module: Path, names: list[str]) -> bool:
    """Return whether the module defines or hands on the names, one within the other."""
    body = ast.parse(module.read_text(encoding="utf-8")).body
    for name in names:
        for node in ast.walk(ast.Module(body, [])):
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
                body = node.body
                break
            if isinstance(node, ast.ImportFrom) and any((alias.asname or alias.name) == name for alias in node.names):
                body = []
                break
        else:
            return False
    return True


@pytest.mark.parametrize("name", NAMES)
def test_every_name_on_the_page_is_in_the_code(name: str) -> None:
    found = source_of(name)
    assert found is not None
    module, names = found
    assert defines(module, names)


def test_a_name_that_is_not_there_would_be_noticed() -> None:
    found = source_of("fedring.codec.encoding.no_such_function")
    assert found is not None
    assert not defines(*found)


def test_every_package_has_its_place_in_the_picture() -> None:
    picture = PAGE[PAGE.index("```") : PAGE.index("```", PAGE.index("```") + 3)]
    packages = {path.parent.name for root in ROOTS[:3] for path in (root / "fedring").glob("*/__init__.py")}
    rooms = {path.parent.name for path in (ROOT / "server" / "fedring" / "server").glob("*/__init__.py")}
    words = set(re.findall(r"\w+", picture))
    assert packages | rooms <= words, (packages | rooms) - words


def test_every_package_says_what_lives_in_it() -> None:
    silent = []
    for root in ROOTS[:3]:
        for path in (root / "fedring").rglob("__init__.py"):
            if len(ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "") < 80:
                silent.append(str(path.relative_to(ROOT)))
    assert silent == []
