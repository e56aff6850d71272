"""Taking part in a federation.

from fedring.client import connect

with connect(server="fl.example.org:8443", insecure=True) as federation:
    for task in federation:
        task.load_into(model)
        ...  # train as ever
        task.submit(model, samples=len(data))
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before grpc is imported; our own log says what matters

if TYPE_CHECKING:
    from fedring.client.config import ClientConfig
    from fedring.client.errors import Refused, RoundOver, UpdateRefused, WrongModel
    from fedring.client.federation import Federation, connect
    from fedring.client.task import Evaluation, Task

__all__ = [
    "ClientConfig",
    "Evaluation",
    "Federation",
    "Refused",
    "RoundOver",
    "Task",
    "UpdateRefused",
    "WrongModel",
    "connect",
]

_HOMES = {
    "ClientConfig": "config",
    "Evaluation": "task",
    "Federation": "federation",
    "Refused": "errors",
    "RoundOver": "errors",
    "Task": "task",
    "UpdateRefused": "errors",
    "WrongModel": "errors",
    "connect": "federation",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: torch alone takes seconds."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
