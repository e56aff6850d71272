"""fl-client, and the library for programs with their own training loop.

    from fedring.client import RoundOver, connect

    with connect(server="fl.example.org:8443", insecure=True) as federation:
        for task in federation:
            try:
                task.load_into(model)
                ...  # train as usual
                task.submit(model, samples=len(data))
            except RoundOver as over:  # this round needs nothing more from this client, but the next one may
                print(over)

The names in `__all__` are public. The modules here put together the three rooms: `session` talks with the server,
`transfer` fetches models and delivers updates, and `group` trains with other workers. What may enter: the
configuration, and the names that a job declares. What must not: collectives and training steps, which are in
`fedring.ring`, `fedring.ddp`, `fedring.pipeline` and `fedring.workers`. The package may import `fedring.compress`,
`fedring.ddp`, `fedring.pipeline`, `fedring.ring`, `fedring.workers` and what both daemons share.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import fedring.rpc  # noqa: F401  # before grpc is imported, which its variable concerns

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # It must be set before grpc is imported.

if TYPE_CHECKING:
    from fedring.client.config import ClientConfig
    from fedring.client.errors import Refused, RoundOver, UpdateRefused, WrongModel
    from fedring.client.evaluation import Evaluation
    from fedring.client.federation import Federation, connect
    from fedring.client.task import Task

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

_MODULES = {
    "ClientConfig": "config",
    "Evaluation": "evaluation",
    "Federation": "federation",
    "Refused": "errors",
    "RoundOver": "errors",
    "Task": "task",
    "UpdateRefused": "errors",
    "WrongModel": "errors",
    "connect": "federation",
}


def __getattr__(name: str) -> Any:
    """Import a public name on first use.

    Torch alone takes seconds to import.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
