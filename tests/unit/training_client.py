"""A client that trains declared jobs in a thread, and the modules of a user that these name."""

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import pytest

from fedring.client import ClientConfig, Federation
from fedring.client.training.trainer import DeclaredTrainer


def user_module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Return an empty module of the user, which can be imported during the test."""
    module = ModuleType("my_project")
    monkeypatch.setitem(sys.modules, "my_project", module)
    return module


def plug_in(module: ModuleType, function: Callable[..., Any]) -> str:
    """Put `function` into the user's module, and return the name by which a job finds it."""
    function.__module__ = module.__name__
    setattr(module, function.__name__, function)
    return f"{module.__name__}:{function.__name__}"


@contextmanager
def client(settings: dict[str, Any], **keys: Any) -> Iterator[Federation]:
    """Run the main loop of a daemon in a thread."""
    config = ClientConfig(**settings, **keys)
    declared = DeclaredTrainer(config)

    def run() -> None:
        for task in federation:
            declared.train(task)

    with Federation(config, on_evaluate=declared.evaluate) as federation:
        thread = threading.Thread(target=run)
        thread.start()
        yield federation
        federation.close()
        thread.join()
