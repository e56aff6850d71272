"""Thousands of clients on this machine, without a network.

A few processes run the code of both daemons:

    from fedring.simulation import simulate

    if __name__ == "__main__":  # the workers are processes, which import the script
        report = simulate("job.toml", clients=10_000, per_round=100)

The names in `__all__` are public. `run` goes through the rounds and draws the clients. `server` makes the next model
with the server's own functions. `worker` trains one client after the other with the client's own functions, and
checks each update as the server does. `samples` has the samples of each client. `secret` makes the clients' secrets
from one. `engine` and `ray_engine` have the workers, `vectors` the state that clients keep from round to round, and
`checks` the checks before anything runs. `objects` gives names to functions and classes that a script gives as
objects, and `report` is what it gets back, with the view of a notebook. `cohort` trains many clients as one
computation, and `batching` finds out whether that is possible.

It may import `fedring.client`, `fedring.control`, `fedring.server` and what both daemons share. It opens no sockets and
stores no facts. But for the training of a cohort it holds no formula of its own: training, encoding, checking and
aggregating belong to the daemons' rooms. Its workers are processes that it has started itself, and only these speak
through pipes of `multiprocessing`.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from fedring.requirements import check_torch

if TYPE_CHECKING:
    from fedring.simulation.run import Show, simulate
    from fedring.simulation.secret import client_secret

__all__ = ["Show", "client_secret", "simulate"]


def __getattr__(name: str) -> object:
    """Import a public name when it is first used.

    torch takes seconds to import.
    """
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    check_torch()
    module = "secret" if name == "client_secret" else "run"
    return getattr(import_module(f"{__name__}.{module}"), name)
