"""The routes of named tensors between the stages of a model.

A route names the stage that makes a tensor, and the stages that use it. A tensor goes straight from the stage that
makes it to every stage that uses it. One name is one tensor of the whole model. A tensor of the batch, such as its
lengths, is not sent: the worker of each stage that uses it reads it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from fedring.schedules.schedule import ScheduleError

BATCH = -1
"""The source of a tensor that a stage's own worker reads from the batch."""


class Edge(NamedTuple):
    """A tensor that passes from its source stage to a user."""

    tensor: str
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Routes:
    """The tensors that each stage needs.

    Attributes:
        sources: For each stage, the name of each of its inputs, and the number of the stage that makes it, or BATCH.

    Raises:
        ScheduleError: If a stage has no inputs, a source is not an earlier stage, or one name has two sources.
    """

    sources: tuple[Mapping[str, int], ...]

    def __post_init__(self) -> None:
        known: dict[str, int] = {}
        for stage, inputs in enumerate(self.sources):
            if not inputs:
                raise ScheduleError(f"stage {stage} has no inputs: it must use a tensor of the batch or of a stage")
            for name, source in inputs.items():
                if not BATCH <= source < stage:
                    raise ScheduleError(
                        f"{name!r} of stage {stage} cannot come from stage {source}: a source is an earlier stage, or "
                        f"{BATCH} for the batch"
                    )
                if known.setdefault(name, source) != source:
                    raise ScheduleError(
                        f"{name!r} of stage {stage} comes from {_place(source)}, and for an earlier stage from "
                        f"{_place(known[name])}: give different tensors different names"
                    )

    @property
    def stages(self) -> int:
        """The number of stages."""
        return len(self.sources)

    @property
    def edges(self) -> tuple[Edge, ...]:
        """All edges, sorted by their target and their tensor's name.

        So every worker numbers them alike.
        """
        return tuple(
            Edge(name, source, target)
            for target, inputs in enumerate(self.sources)
            for name, source in sorted(inputs.items())
            if source != BATCH
        )

    def consumers(self, stage: int) -> dict[str, tuple[int, ...]]:
        """Return a stage's tensors that later stages use.

        Each comes with those stages, in order.
        """
        found: dict[str, tuple[int, ...]] = {}
        for later, inputs in enumerate(self.sources):
            for name, source in inputs.items():
                if source == stage:
                    found[name] = (*found.get(name, ()), later)
        return found

    def from_batch(self, stage: int) -> tuple[str, ...]:
        """Return the tensors that a stage's own worker reads from the batch."""
        return tuple(name for name, source in self.sources[stage].items() if source == BATCH)


def chain(stages: int) -> Routes:
    """Return the routes of a chain of stages.

    Stage 0 reads "inputs", and stage s reads the one output of stage s-1, "stage{s-1}".
    """
    return Routes(({"inputs": BATCH}, *({f"stage{stage - 1}": stage - 1} for stage in range(1, stages))))


def _place(source: int) -> str:
    return "the batch" if source == BATCH else f"stage {source}"
