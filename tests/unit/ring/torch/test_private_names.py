"""The private names of torch: each may be missing, and only this table knows them."""

import ast
import importlib
import re
import warnings
from collections.abc import Iterator
from functools import reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.conftest import ROOT

from fedring.ring.torch import private_names
from fedring.ring.torch.compiler import opaque
from fedring.ring.torch.private_names import FEATURES, find
from fedring.ring.torch.profiling import begin_record

NAMES = [(feature, name) for feature, (names, _) in FEATURES.items() for name in names]
STABLE = {"_BatchNorm", "_InstanceNorm"}
"""Base classes in torch.nn.modules, which have had these names in all versions."""

SHIM = ROOT / "common" / "fedring" / "c10d.py"


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    find.cache_clear()
    yield
    find.cache_clear()


def owner_of(name: str) -> tuple[Any, str]:
    module, _, path = name.partition(":")
    *inner, last = path.split(".")
    return reduce(getattr, inner, importlib.import_module(module)), last


@pytest.mark.parametrize("feature", FEATURES)
def test_this_torch_has_every_name(feature: str) -> None:
    with warnings.catch_warnings(action="error"):
        assert len(find(feature)) == len(FEATURES[feature].names)


@pytest.mark.parametrize(("feature", "name"), NAMES, ids=lambda value: value)
def test_without_a_name_its_feature_is_left_out_with_one_warning(
    feature: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    look_up = private_names._look_up

    def without(wanted: str) -> Any:
        if wanted == name:
            owner, last = owner_of(name)
            return getattr(owner, f"{last}_of_another_version")
        return look_up(wanted)

    monkeypatch.setattr(private_names, "_look_up", without)
    with pytest.warns(RuntimeWarning, match=FEATURES[feature].without):
        assert find(feature) == ()
    assert find(feature) == ()  # without another warning, which would be an error

    class Group:
        def reduce(self) -> int:
            return 1

    if feature == "compile":
        assert opaque(Group)().reduce() == 1
        assert "_torchdynamo_disable" not in vars(vars(Group)["reduce"])
    else:
        with torch.profiler.profile():
            assert begin_record("allreduce", [torch.zeros(1)]) is None


def private(tree: ast.Module) -> Iterator[str]:
    """Yield the private names of torch that a module imports or reads."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            names = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [part for alias in node.names if alias.name.startswith("torch.") for part in alias.name.split(".")]
        elif isinstance(node, ast.Attribute) and re.fullmatch(r"torch[\w.]+", ast.unparse(node)):
            names = ast.unparse(node).split(".")
        else:
            continue
        yield from (name for name in names if name.startswith("_") and not name.startswith("__") and name not in STABLE)


@pytest.mark.parametrize("room", ["client", "common", "server"])
def test_only_the_table_uses_private_names(room: str) -> None:
    mine = {SHIM, Path(private_names.__file__).resolve()}
    found = {
        (str(path.relative_to(ROOT)), name)
        for path in (ROOT / room).rglob("*.py")
        if path.resolve() not in mine and not path.name.endswith("_pb2.py")
        for name in private(ast.parse(path.read_text()))
    }
    assert found == set()
