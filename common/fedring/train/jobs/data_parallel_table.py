"""The table [data_parallel] of a job: training with equal models.

It describes how the clients train together as workers.
"""

import re
from collections.abc import Iterator
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from fedring.train.bounds import MAX_COUNT, Count, NonNegative, Positive, PositiveCount, Text
from fedring.train.jobs.job_table import JobView, TrainingMode
from fedring.train.names.hooks import PARAMETERS, WRAPPERS, HookChoice, choose_hook, name_of

HOOKS = tuple(name for name in PARAMETERS if name != "noop")
"""The hooks that a job can name: those that leave all workers with equal parameters."""

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
_ANY_MOMENTUM = 0.9  # a job's momentum is in another table


class DataParallel(TrainingMode):
    """All settings of data-parallel training."""

    grouped: ClassVar[bool] = True

    hook: Text = Field(
        "none",
        description=f"how gradients are sent: {', '.join(HOOKS)}, with parameters in parentheses if need be; "
        f"{' or '.join(WRAPPERS)} around another one, such as fp16(powersgd); or a communication hook of your own as "
        "module:attribute",
    )
    ratio: float | None = Field(
        None,
        gt=0,
        le=1,
        description="share of the gradient's entries that dgc and topk send; none = 0.001 for dgc and 0.01 for topk",
    )
    warmup_epochs: Count = Field(1, description="epochs in which the share that dgc sends falls to ratio")
    rank: PositiveCount = Field(1, description="rank of the factors that powersgd and batched_powersgd send")
    start_iteration: int = Field(
        10,
        ge=2,
        le=MAX_COUNT,
        description="first steps of the job in which powersgd and batched_powersgd send whole gradients",
    )
    feedback: Literal["ef", "ef21", "none"] = Field(
        "ef",
        description="error feedback: what happens to the part of the gradient that int8, topk and powersgd leave out; "
        "ef21 is for int8 and topk",
    )
    clip: Positive | None = Field(None, description="largest norm of the gradient; for dgc, see clip_norm")
    clip_norm: Literal["tensor", "global"] = Field(
        "tensor",
        description="whether dgc clips the gradient of each tensor by its own norm, or by the norm of the whole "
        "gradient; with global, it sends nothing during the backward pass",
    )

    bucket_mb: Positive = Field(25.0, le=4096, description="size of a bucket of gradients, in MiB")
    accumulation_steps: PositiveCount = Field(
        1, description="batches whose gradients a worker adds up before it sends them"
    )
    find_unused_parameters: bool = Field(False, description="allow steps in which some parameters are not used")
    buffers: Literal["every_step", "before_evaluation"] | PositiveCount = Field(
        "every_step",
        description="when workers take over rank 0's buffers (BatchNorm): every_step, before_evaluation, or a number "
        "of steps",
    )

    lr_schedule: Literal["constant", "cosine", "step"] = Field(
        "constant", description="how the learning rate decreases over the job"
    )
    lr_warmup_epochs: NonNegative = Field(0.0, description="epochs in which the learning rate rises to lr")
    lr_step_epochs: Positive = Field(10.0, description="epochs between two decreases of the learning rate (step)")
    lr_gamma: float = Field(0.1, gt=0, le=1, description="factor of each decrease of the learning rate (step)")

    checkpoint_every: Count = Field(
        100,
        description="steps between two checkpoints that each worker writes to its state_dir; it also writes one at the "
        "end of each round; 0 = none at all",
    )
    replacement_seconds: float = Field(
        10.0,
        ge=0,
        le=3600,
        description="how long a group waits for a replacement before it continues with fewer workers",
    )
    hash_every: Count = Field(
        100, description="steps between two comparisons of all workers' parameters; 0 = only at the end of a round"
    )

    @property
    def patience(self) -> float:
        """See TrainingMode."""
        return self.replacement_seconds

    def applied_momentum(self, momentum: float) -> float:
        """See TrainingMode."""
        hook = self.chosen_hook(momentum)
        applied: float = hook.parameters["momentum"] if hook is not None and hook.name == "dgc" else 0.0
        return applied

    def own_code(self, momentum: float) -> Iterator[tuple[str, Literal["hook", "cut"], str]]:
        """See TrainingMode."""
        if self.chosen_hook(momentum) is None:
            yield "data_parallel.hook", "hook", self.hook

    def check(self, job: JobView) -> None:
        """See JobTable."""
        self.chosen_hook(job.momentum)

    @property
    def hook_name(self) -> str:
        """The name of the hook, without a wrapper and parameters."""
        return name_of(self.hook)

    def chosen_hook(self, momentum: float) -> HookChoice | None:
        """Return the hook that the job names, with all its parameters.

        The table's own keys give the parameters that `hook` itself does not name.

        Args:
            momentum: The job's momentum, which dgc applies before it sends.

        Returns:
            The hook, or None for a hook of the user's own, module:attribute.

        Raises:
            ValueError: If there is no such hook or parameter, or if a value does not fit.
        """
        if _NAME.fullmatch(self.hook):
            return None
        if self.hook_name not in HOOKS:
            raise ValueError(
                f"a job cannot name the hook {self.hook_name!r}: choose from {', '.join(HOOKS)}, or name your own as "
                "module:attribute"
            )
        ratio = {} if self.ratio is None else {"ratio": self.ratio}
        powersgd = {
            "matrix_approximation_rank": self.rank,
            "start_powerSGD_iter": self.start_iteration,
            "use_error_feedback": self.feedback == "ef",
        }
        # Each hook names its parameters differently; torch's names are those of powersgd.
        keys: dict[str, dict[str, Any]] = {
            "int8": {"feedback": self.feedback},
            "topk": {**ratio, "feedback": self.feedback},
            "powersgd": powersgd,
            "batched_powersgd": powersgd,
            "dgc": {
                **ratio,
                "warmup_epochs": self.warmup_epochs,
                "momentum": momentum,
                "clip": self.clip,
                "clip_norm": self.clip_norm,
            },
        }
        return choose_hook(self.hook, keys.get(self.hook_name))

    @model_validator(mode="after")
    def _known_hook(self) -> Self:
        self.chosen_hook(momentum=_ANY_MOMENTUM)
        if self.feedback == "ef21" and self.hook_name in ("powersgd", "batched_powersgd"):
            raise ValueError(f"{self.hook_name} takes the feedback ef or none, not ef21")
        return self
