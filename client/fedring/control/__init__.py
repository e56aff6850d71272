"""Jobs of an fl-server from a script or notebook.

Start them, watch them, and fetch their rounds and models::

    from fedring.control import connect

    with connect("127.0.0.1:8444") as server:
        job = server.start({"rounds": 10, "min_clients": 2})
        for row in job.watch():  # a row for each round, as soon as it has ended
            print(row["job_round"], row["accuracy"], row["loss"])
        model = job.load_model(MyModel())

The names in `__all__` are public. `server` defines them; below it, `calls` has the calls of the control port as
messages, with one kind of error (`failure`), `access` the caller's identity, `code_names` the names of functions and
classes that are given as objects, `figures` the figures of a round's message, `view` a job as HTML, `notebook` the cell
that shows it, `model_export` the download of a model, and `trackers` writes rounds to TensorBoard and its like. flctl
is built on this package. It may import what both daemons share, but neither the daemons nor flctl. It prints nothing.
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

import fedring.rpc  # noqa: F401  # before grpc is imported, which its variable concerns

os.environ.setdefault(
    "GRPC_VERBOSITY", "NONE"
)  # It must be set before grpc is imported: errors are raised, not printed.

if TYPE_CHECKING:
    from fedring.control.calls import Control
    from fedring.control.failure import Failure, Unreachable
    from fedring.control.figures import Row
    from fedring.control.server import Job, Server, connect

__all__ = ["Control", "Failure", "Job", "Row", "Server", "Unreachable", "connect"]

_MODULES = {
    "Control": "calls",
    "Failure": "failure",
    "Job": "server",
    "Row": "figures",
    "Server": "server",
    "Unreachable": "failure",
    "connect": "server",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used.

    So modules that need only one of them stay quick to import.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
