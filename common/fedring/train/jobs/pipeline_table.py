"""The table [pipeline] of a job: its stages and their training.

It describes how the model is cut into stages, and how the clients train them.
"""

import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from fedring.schedules.schedule import Schedule, Versions, default_interval, make, pipedream
from fedring.schedules.simulation import check
from fedring.train.bounds import Count, Positive, PositiveCount, Text
from fedring.train.jobs.job_table import JobView, TrainingMode
from fedring.train.names.hooks import PARAMETERS, choose_hook, name_of

CREDITS = 4
"""How many messages of one kind a stage may send before the receiver has taken the first of them."""

MAX_CELLS = 1 << 16
"""The largest product of stages and micro-batches, and of either with the workers of a pipeline.

A schedule lists them all, and is simulated before a job starts.
"""

MAX_REPLICAS = 256
"""The largest number of parallel pipelines, and of workers of one stage."""

HOOKS = tuple(name for name in PARAMETERS if name not in ("noop", "dgc"))
"""The hooks that a pipeline job can name: those that leave the optimizer as it is, and all replicas equal."""


def _check_range(replicas: int | list[int]) -> int | list[int]:
    if not all(1 <= count <= MAX_REPLICAS for count in ([replicas] if isinstance(replicas, int) else replicas)):
        raise ValueError(f"must be a number from 1 to {MAX_REPLICAS}, or a list of such numbers, not {replicas}")
    return replicas


_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


class Pipeline(TrainingMode):
    """All settings of pipeline training."""

    grouped: ClassVar[bool] = True
    staged: ClassVar[bool] = True

    stages: int = Field(2, ge=1, le=256, description="number of parts that the model is cut into")
    stages_per_worker: int = Field(
        1, ge=1, le=64, description="number of stages that each worker has (interleaved_1f1b)"
    )
    replicas: Annotated[int | list[int], AfterValidator(_check_range)] = Field(
        1,
        description=f"number of parallel pipelines, from 1 to {MAX_REPLICAS}; each takes its own batches, and their "
        "gradients are averaged. A list gives each stage its own number of workers in one pipeline, which take its "
        "micro-batches by turns and add up their gradients (not with interleaved_1f1b)",
    )
    hook: Text = Field(
        "none",
        description=f"how the gradients of a stage's replicas are sent: {', '.join(HOOKS)}, with parameters in "
        "parentheses if need be",
    )
    cut: Text | list[PositiveCount] | list[Text] = Field(
        "parameters",
        description="where the model is cut: evenly by parameters or by time; a list of the layers that begin stages, "
        "without the first stage; a list of the number of layers of each stage; or module:attribute, which takes the "
        "model and returns its stages",
    )
    schedule: Literal["gpipe", "1f1b", "interleaved_1f1b", "pipedream"] = Field(
        "1f1b", description="order of the forwards, backwards and updates"
    )
    micro_batches: PositiveCount | Literal["auto"] = Field(
        4,
        description="number of micro-batches in a batch; for pipedream, from one flush to the next; auto = the number "
        f"that is fastest in the first steps; times stages, at most {MAX_CELLS:,}",
    )
    recompute: bool = Field(
        False, description="keep inputs instead of activations, and repeat each forward before its backward"
    )
    update_interval: Count = Field(
        0,
        description="number of micro-batches in a batch (pipedream), a multiple of each number of a list of replicas; "
        "0 = as few as possible: 1 without such a list, or the number of stages with the versions macrobatch",
    )
    versions: Literal["stashed", "vertical", "macrobatch"] = Field(
        "stashed", description="which weights a forward uses (pipedream)"
    )
    warmups: list[Count] = Field(
        default_factory=list,
        description="number of forwards of each stage before its first backward (pipedream); [] = as few as possible",
    )
    compute_dtype: Literal["float32", "float16", "bfloat16"] = Field(
        "float32", description="dtype in which stages compute; the optimizer's parameters keep their own"
    )
    loss_scale: Positive = Field(
        1.0, description="factor that the loss is multiplied by, and gradients are divided by (float16)"
    )
    checkpoint_every: Count = Field(
        100, description="steps from one checkpoint to the next; 0 = only at the end of a round"
    )
    first_model: Literal["whole", "by_module"] = Field(
        "whole",
        description="how the server makes a first model: it builds the whole model in memory, as in other modes; or it "
        "calls reset_parameters() of one module after the other, so that only one of them is in memory",
    )
    replacement_seconds: float = Field(
        60.0, ge=0, le=3600, description="how long the other workers wait for a lost stage to come back or be replaced"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.stages % self.stages_per_worker:
            raise ValueError(f"stages={self.stages} must be a multiple of stages_per_worker={self.stages_per_worker}")
        if self.stages_per_worker > 1 and self.schedule != "interleaved_1f1b":
            raise ValueError(
                f"the schedule {self.schedule} has one stage per worker: set stages_per_worker=1 or "
                "schedule=interleaved_1f1b"
            )
        self._check_replicas()
        if self.schedule != "pipedream" and (self.update_interval or self.warmups or self.versions != "stashed"):
            raise ValueError("update_interval, versions and warmups belong to the schedule pipedream")
        if self.schedule == "pipedream" and self.micro_batches == "auto":
            raise ValueError("micro_batches=auto does not work with the schedule pipedream: set a number")
        self._check_cut()
        micro_batches = self.unit if self.micro_batches == "auto" else self.micro_batches
        # Before the schedule is made: its size is this product, and a stranger may have written the job.
        if self.stages * micro_batches > MAX_CELLS:
            raise ValueError(
                f"{self.stages} stages times {micro_batches} micro_batches are above MAX_CELLS = {MAX_CELLS}: use fewer"
            )
        if self.width * max(self.stages, micro_batches) > MAX_CELLS:
            raise ValueError(
                f"replicas has {self.width} workers, and times {self.stages} stages or times {micro_batches} "
                f"micro_batches they are above MAX_CELLS = {MAX_CELLS}: use fewer"
            )
        check(self.schedule_of(micro_batches), credits=CREDITS)
        return self

    def _check_replicas(self) -> None:
        if name_of(self.hook) not in HOOKS:
            raise ValueError(f"hook={self.hook} cannot be used in a pipeline: choose from {', '.join(HOOKS)}")
        if (
            not choose_hook(self.hook).is_plain
            and self.workers == self.width
            and max(self.stage_workers, default=1) == 1
        ):
            raise ValueError(f"hook={self.hook} has no effect on replicas={self.replicas}: no stage has two workers")
        # A number repeats the whole pipeline, under any schedule; only a list gives stages workers of their own.
        if isinstance(self.replicas, int):
            return
        if len(self.replicas) != self.stages:
            raise ValueError(
                f"replicas={self.replicas} has {len(self.replicas)} numbers, but stages={self.stages}: give one for "
                "each stage"
            )
        if self.schedule == "interleaved_1f1b":
            raise ValueError(
                f"replicas={self.replicas} does not work with schedule={self.schedule}: use another one, or give one "
                "number"
            )

    def _check_cut(self) -> None:
        if isinstance(self.cut, str):
            if self.cut not in ("parameters", "time") and not _NAME.fullmatch(self.cut):
                raise ValueError(f"cut={self.cut!r} must be parameters, time, or of the form module:attribute")
            return
        counted = all(isinstance(one, int) for one in self.cut)
        wanted = self.stages if counted and self.cut else self.stages - 1
        if len(self.cut) != wanted:
            raise ValueError(f"cut={self.cut} has {len(self.cut)} entries, but {self.stages} stages need {wanted}")

    @property
    def width(self) -> int:
        """The number of workers of one pipeline."""
        return sum(self.stage_workers) or self.stages // self.stages_per_worker

    @property
    def pipelines(self) -> int:
        """The number of parallel pipelines."""
        return self.replicas if isinstance(self.replicas, int) else 1

    @property
    def stage_workers(self) -> tuple[int, ...]:
        """The number of workers of each stage of a pipeline.

        It is () if no stage has more than one.
        """
        return () if isinstance(self.replicas, int) else tuple(self.replicas)

    @property
    def workers(self) -> int:
        """The exact number of clients in a group."""
        return self.width * self.pipelines

    @property
    def patience(self) -> float:
        """See TrainingMode."""
        return self.replacement_seconds

    @property
    def by_module(self) -> bool:
        """See TrainingMode."""
        return self.first_model == "by_module"

    @property
    def layers(self) -> tuple[str, ...]:
        """See TrainingMode."""
        return tuple(layer for layer in self.cut if isinstance(layer, str)) if isinstance(self.cut, list) else ()

    def own_code(self, momentum: float) -> Iterator[tuple[str, Literal["hook", "cut"], str]]:
        """See TrainingMode."""
        if isinstance(self.cut, str) and ":" in self.cut:
            yield "pipeline.cut", "cut", self.cut

    def check(self, job: JobView) -> None:
        """See JobTable."""
        if job.evaluator or job.evaluate_on_server:
            raise ValueError(
                "evaluator and evaluate_on_server need the whole model in one place, which a pipeline job avoids: "
                "leave them out, and the stages evaluate each model together"
            )
        least = max(self.interval, self.unit)
        if job.batch_size < least:
            raise ValueError(
                f"batch_size={job.batch_size} must be at least {least}, the number of micro-batches in a batch"
            )

    @property
    def unit(self) -> int:
        """The number that micro-batches must be a multiple of."""
        return self.width if self.schedule == "interleaved_1f1b" else 1

    @property
    def interval(self) -> int:
        """The number of micro-batches in a batch.

        For synchronous schedules, it is all of a run, or 0 if that is "auto".
        """
        if self.schedule != "pipedream":
            return 0 if self.micro_batches == "auto" else self.micro_batches
        return self.update_interval or default_interval(
            self.stage_workers or [1] * self.stages, Versions(self.versions)
        )

    def schedule_of(self, micro_batches: int) -> Schedule:
        """Return the schedule of a run of `micro_batches`.

        Raises:
            ScheduleError: If there is no such schedule for this number of stages and micro-batches.
        """
        if self.schedule != "pipedream":
            workers = 0 if self.stage_workers else self.width
            return make(self.schedule, self.stages, micro_batches, workers=workers, replicas=self.stage_workers)
        return pipedream(
            self.stages,
            micro_batches,
            warmups=self.warmups or None,
            interval=self.interval,
            versions=Versions(self.versions),
            replicas=self.stage_workers,
        )
