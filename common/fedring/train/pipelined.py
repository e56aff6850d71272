"""How the clients of a pipeline job train together: the job's table [pipeline]."""

import re
from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedring.schedules.schedule import Schedule, Versions, make, pipedream
from fedring.schedules.simulation import check
from fedring.train.bounds import Count, Positive, PositiveCount, Text

CREDITS = 4
"""Messages of a kind that a stage sends ahead of their use."""

MAX_CELLS = 1 << 16
"""Stages times micro-batches: a schedule lists them all, and is tried out before the job is taken."""

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Pipeline(BaseModel):
    """Everything that pipeline training can be told. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    stages: int = Field(2, ge=1, le=256, description="parts that the model is cut into")
    stages_per_worker: int = Field(1, ge=1, le=64, description="stages of each worker (interleaved_1f1b)")
    replicas: int = Field(
        1, ge=1, le=256, description="pipelines side by side, whose gradients are averaged; each takes its own batches"
    )
    cut: Text | list[Count] | list[Text] = Field(
        "parameters",
        description="where the model is cut: evenly by parameters, or by time; at these layers (each begins a stage); "
        "by the number of layers of each stage; or module:attribute, which takes the model and returns its stages",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "pipedream"] = Field(
        "1f1b", description="who does what when"
    )
    micro_batches: PositiveCount | Literal["auto"] = Field(
        4,
        description="parts of a batch; of pipedream, the micro-batches from one flush to the next; auto = what is the "
        f"fastest in the first steps; times stages, at most {MAX_CELLS:,}",
    )
    recompute: bool = Field(False, description="keep inputs instead of activations, and repeat the forward")
    update_interval: Count = Field(
        0, description="micro-batches of a batch (pipedream); 0 = one, or of macrobatch, as many as there are stages"
    )
    versions: Literal["stashed", "vertical", "macrobatch"] = Field(
        "stashed", description="the weights that a forward uses (pipedream)"
    )
    warmups: list[Count] = Field(
        default_factory=list, description="forwards of each stage before its first backward (pipedream); [] = the least"
    )
    compute_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float32", description="what stages compute in; the optimizer's parameters stay as they are"
    )
    loss_scale: Positive = Field(1.0, description="the loss is multiplied by it, and gradients divided (float16)")
    checkpoint_every: Count = Field(
        100, description="steps after which all workers keep a copy of all stages; 0 = only at the end of a round"
    )
    replacement_seconds: float = Field(
        60.0, ge=0, le=3600, description="how long the others wait for a lost stage to come back or to be replaced"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stages % self.stages_per_worker:
            raise ValueError(f"{self.stages} stages do not spread evenly, {self.stages_per_worker} on each worker")
        if self.stages_per_worker > 1 and self.schedule != "interleaved_1f1b":
            raise ValueError(f"{self.schedule} has one stage a worker; interleaved_1f1b may have more")
        if self.schedule != "pipedream" and (self.update_interval or self.warmups or self.versions != "stashed"):
            raise ValueError("update_interval, versions and warmups belong to the schedule pipedream")
        if self.schedule == "pipedream" and self.micro_batches == "auto":
            raise ValueError("micro_batches of pipedream is no part of a batch, and cannot be auto")
        self._check_cut()
        micro_batches = self.unit if self.micro_batches == "auto" else self.micro_batches
        if self.stages * micro_batches > MAX_CELLS:
            raise ValueError(
                f"{self.stages} stages times {micro_batches} micro_batches are above MAX_CELLS = {MAX_CELLS}"
            )
        check(self.schedule_of(micro_batches), credits=CREDITS)
        return self

    def _check_cut(self) -> None:
        if isinstance(self.cut, str):
            if self.cut not in ("parameters", "time") and not _NAME.fullmatch(self.cut):
                raise ValueError(f"cut {self.cut!r} is not parameters, time, or of the form module:attribute")
            return
        counted = all(isinstance(one, int) for one in self.cut)
        wanted = self.stages if counted and self.cut else self.stages - 1
        if len(self.cut) != wanted:
            raise ValueError(f"cut has {len(self.cut)} entries; {self.stages} stages need {wanted}")

    @property
    def width(self) -> int:
        """Workers of one pipeline."""
        return self.stages // self.stages_per_worker

    @property
    def workers(self) -> int:
        """Clients of a group: neither more nor fewer."""
        return self.width * self.replicas

    @property
    def unit(self) -> int:
        """What the number of micro-batches must be a multiple of."""
        return self.width if self.schedule == "interleaved_1f1b" else 1

    @property
    def interval(self) -> int:
        """The micro-batches of a batch; of the synchronous schedules, all of a run (0 = to be found)."""
        if self.schedule != "pipedream":
            return 0 if self.micro_batches == "auto" else self.micro_batches
        return self.update_interval or (self.stages if self.versions == "macrobatch" else 1)

    def schedule_of(self, micro_batches: int) -> Schedule:
        """What every worker of a pipeline does in a run of so many; ScheduleError if that cannot be."""
        if self.schedule != "pipedream":
            return make(self.schedule, self.stages, micro_batches, workers=self.width)
        return pipedream(
            self.stages,
            micro_batches,
            warmups=self.warmups or None,
            interval=self.interval,
            versions=Versions(self.versions),
        )
