"""What packages say of themselves, held against the graph of their imports, and one name for one class."""

import ast
import re
import tomllib
from collections import defaultdict
from functools import cache
from pathlib import Path
from typing import Any

import grimp
import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = {
    ".".join(path.relative_to(tree).parent.parts): path
    for tree in (ROOT / "server", ROOT / "client", ROOT / "common")
    for path in tree.glob("fedring/**/__init__.py")
}
OUTER = sorted(package for package in PACKAGES if package.count(".") == 1)
SHARED = {package for package in OUTER if PACKAGES[package].is_relative_to(ROOT / "common")}

MAY = re.compile(r"\bmay import ((?:[^.;]|\.(?=\w))+)")
KEPT_OUT = {"torch": "torch", "gRPC": "grpc"}
"""What a package must not import if a sentence of its docstring says so, by the word there."""


@cache
def contracts() -> dict[str, Any]:
    settings: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    return settings


@cache
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*OUTER, include_external_packages=True, cache_dir=None)


def imports_of(package: str) -> set[str]:
    """Return the modules outside of a package that its modules import themselves."""
    within = {package, *graph().find_descendants(package)}
    return {found for each in within for found in graph().find_modules_directly_imported_by(each)} - within


def docstring(package: str) -> str:
    return " ".join((ast.get_docstring(ast.parse(PACKAGES[package].read_text())) or "").split())


def allowed(package: str) -> tuple[set[str], set[str]]:
    """Return what a docstring says that its package may import: packages by name, and those of a phrase."""
    (words,) = [words for words in MAY.findall(docstring(package)) if "fedring" in words or "daemons share" in words]
    shared = set(OUTER) if "every other package" in words else SHARED if "what both daemons share" in words else set()
    return set(re.findall(r"`(fedring\.\w+)`", words)), shared


@pytest.mark.parametrize("package", OUTER)
def test_a_package_imports_what_its_docstring_says(package: str) -> None:
    named, shared = allowed(package)
    imported = {".".join(module.split(".")[:2]) for module in imports_of(package)} & set(OUTER)
    assert imported <= named | shared, "what is missing in the sentence"
    assert named <= imported, "what nothing there imports"


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_keeps_out_what_its_docstring_says(package: str) -> None:
    sentences = re.split(r"(?<=\.) ", docstring(package))
    negative = [text for text in sentences if re.search(r"must not|have no place|knows no ", text)]
    kept_out = {KEPT_OUT[word] for text in negative for word in re.findall(r"\b(torch|gRPC)\b", text)}
    assert {module.partition(".")[0] for module in imports_of(package)} & kept_out == set()


def test_a_contract_of_layers_names_all_modules_of_its_room() -> None:
    loose = [
        contract["name"]
        for contract in contracts()["contracts"]
        if contract["type"] == "layers" and "containers" in contract and not contract.get("exhaustive")
    ]
    assert loose == []
    assert not any(":" in layer for contract in contracts()["contracts"] for layer in contract.get("layers", []))


def test_the_contracts_know_every_package() -> None:
    (downwards,) = [each for each in contracts()["contracts"] if each["name"] == "packages import downwards only"]
    (circles,) = [each for each in contracts()["contracts"] if each["type"] == "acyclic_siblings"]
    assert sorted(contracts()["root_packages"]) == OUTER
    assert sorted(name for layer in downwards["layers"] for name in layer.split(" | ")) == OUTER
    assert sorted(circles["ancestors"]) == OUTER


@pytest.mark.parametrize("tree", ["server", "client", "common"])
def test_a_name_is_that_of_one_class(tree: str) -> None:
    places = defaultdict(list)
    for path in sorted((ROOT / tree / "fedring").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: found for name, found in places.items() if len(found) > 1} == {}
