"""Names of functions and classes that a job is given as objects."""

import functools
import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from torch import nn

from fedring.control.code_names import name_of, with_names
from fedring.control.failure import Failure
from fedring.daemon.exits import Exit
from fedring.data import digits
from fedring.train.models import digits_mlp


@pytest.fixture
def code(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a module of the user's."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "fixtures_user_code"))
    return importlib.import_module("user_simulation")


def net_of(module: str) -> Any:
    """Return a function of a module, such as that of a script or a notebook."""

    def net() -> None:
        return None

    net.__module__, net.__qualname__ = module, "net"
    return net


class Outer:
    class Inner(nn.Module):
        """Is found only through its class."""


def test_what_others_can_import_is_named_as_they_import_it(code: ModuleType) -> None:
    assert name_of(code.normed) == "user_simulation:normed"
    assert name_of(digits_mlp) == "fedring.train.models:digits_mlp"
    assert name_of(digits) == "fedring.data:digits"  # as the pages name it, and not by the file that defines it
    assert name_of(nn.ReLU) == "torch.nn.modules.activation:ReLU"


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (lambda: None, r"^a lambda has no name"),
        (functools.partial(digits_mlp, hidden=3), r"^an object of the class partial has no name"),
        (nn.CrossEntropyLoss(), r"^an object of the class CrossEntropyLoss has no name"),
        (Outer.Inner, r"^Outer\.Inner is defined inside of a class"),
        (
            net_of("__main__"),
            r"^net is defined in this script or notebook.*: put it in a module, and import it from there$",
        ),
        (net_of("no_such_module"), r"^net belongs to no_such_module, which is not a module that others can import"),
    ],
)
def test_what_others_cannot_import_is_refused_with_one_sentence_that_says_what_to_do(given: Any, why: str) -> None:
    with pytest.raises(Failure, match=why) as refused:
        name_of(given)
    assert refused.value.exit_code is Exit.CONFIG
    assert "\n" not in str(refused.value)
    assert ": " in str(refused.value)  # and then the remedy


def test_a_function_within_a_function_is_refused() -> None:
    def net() -> nn.Module:
        return nn.Identity()

    with pytest.raises(Failure, match="is defined inside of a function"):
        name_of(net)


def test_an_object_whose_name_leads_to_another_one_is_refused(
    code: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = code.normed
    monkeypatch.setattr(code, "normed", digits_mlp)  # as if the module was imported anew
    with pytest.raises(Failure, match="user_simulation:normed is another object than the one given"):
        name_of(before)


def test_a_module_without_a_file_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("made_by_hand")
    monkeypatch.setitem(sys.modules, "made_by_hand", module)
    vars(module)["net"] = net_of("made_by_hand")
    with pytest.raises(Failure, match="net belongs to made_by_hand, which is not a module that others can import"):
        name_of(vars(module)["net"])


def test_names_take_the_place_of_objects_at_any_depth_but_not_in_arguments(code: ModuleType) -> None:
    table = {
        "model": code.normed,
        "lr": 0.1,
        "model_args": {"act": nn.ReLU},
        "aggregation": {"rule": code.nines, "args": {}},
    }
    named = with_names(table)
    assert named["model"] == "user_simulation:normed"
    assert named["aggregation"] == {"rule": "user_simulation:nines", "args": {}}
    assert named["model_args"] == {"act": nn.ReLU}  # which the schema of jobs refuses
    with pytest.raises(Failure, match=r"^aggregation\.rule: a lambda has no name"):
        with_names({"aggregation": {"rule": lambda: None}})
