"""Functions and classes that a script gives to a simulation as objects.

Those that other processes can import are named, as in every job. The others stay in this process, so only a worker in
this process can use them.
"""

import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from fedring.control.code_names import with_names
from fedring.control.failure import Failure
from fedring.daemon.exits import Exit
from fedring.offers import can_be_offered
from fedring.train.device import threads_for

log = logging.getLogger(__name__)


class LocalObjects:
    """The objects of a job that only this process has.

    Attributes:
        by_name: The objects, by names of the form module:attribute that stand for them in the job.
    """

    def __init__(self) -> None:
        self.by_name: dict[str, Callable[..., Any]] = {}
        self._given: dict[int, str] = {}  # the name of each object; they are all kept alive by the job's keys
        self._why = ""

    def named(self, table: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys of a job, with names instead of objects."""
        return with_names(table, otherwise=self._name)

    def count_workers(self, wanted: int | None, engine: str) -> int:
        """Return the number of workers.

        It is 1 if only this process can use the job's code.

        Args:
            wanted: The number that was asked for; None = one for each core.
            engine: Where the workers run.

        Raises:
            Failure: More than this process is asked for, and another one could not import the job's code.
        """
        count = threads_for(1) if wanted is None else wanted
        if not self.by_name or (engine != "ray" and count == 1):
            return count
        if engine == "ray":
            raise Failure(f"{self._why}, or simulate with engine='local' and workers=1", Exit.CONFIG)
        if wanted is not None:
            raise Failure(f"{self._why}, or simulate with workers=1 instead of {wanted}", Exit.CONFIG)
        log.warning("%s; until then, one worker trains, in this process, instead of %d", self._why, count)
        return 1

    def _name(self, value: Callable[..., Any], failure: Failure) -> str:
        """Return a name that stands for an object within this process."""
        self._why = self._why or str(failure)
        if id(value) in self._given:
            return self._given[id(value)]
        # No name that others could import begins like this, so these stand for nothing else.
        qualified: str = getattr(value, "__qualname__", None) or type(value).__qualname__
        plain = f"__main__:{qualified.rpartition('.')[2].strip('<>')}"
        name, number = plain, 1
        while name in self.by_name:  # two functions of one name, such as two lambdas
            number += 1
            name = f"{plain}_{number}"
        # Whoever looks it up expects a function or a class, of which each equals only itself.
        self.by_name[name] = value if can_be_offered(value) else partial(value)
        self._given[id(value)] = name
        return name
