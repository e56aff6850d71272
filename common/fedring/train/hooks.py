"""The communication hooks that have a name, and every parameter that each of them takes.

Jobs, `flctl profile`, `flctl bench data-parallel` and scripts name hooks in the same way: by a name, followed by those
parameters whose defaults do not fit, as in a call:

    none    topk(ratio=0.05, feedback=ef21)    powersgd(matrix_approximation_rank=2)

This module describes hooks and does not import torch, so that the server can check a job. The parameters are those of
the states in `fedring.ddp.hooks`, and `fedring.ddp.hooks.by_name` makes the hooks.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from fedring.train.bounds import MAX_SEED, Count, NonNegative, Positive, PositiveCount

_CALL = re.compile(r"(\w+)(?:\((.*)\))?", re.DOTALL)
_OUTSIDE_PARENTHESES = re.compile(r",(?![^(]*\))")
_MAX_RANDOM_SEED = 2**32 - 1  # numpy's RandomState takes no larger seed

Share = Annotated[float, Field(gt=0, le=1)]
Feedback = Literal["none", "ef", "ef21"]


class Parameters(BaseModel):
    """The parameters of one kind of hook, with their defaults; names that are not listed are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Int8Parameters(Parameters):
    """The parameters of `fedring.ddp.hooks.Int8State`."""

    chunk: int = Field(256, ge=4, le=1 << 20, multiple_of=4)
    feedback: Feedback = "ef"


class TopKParameters(Parameters):
    """The parameters of `fedring.ddp.hooks.TopKState`."""

    ratio: Share = 0.01
    precision: Literal["fp32", "fp16", "sign"] = "fp16"
    feedback: Feedback = "ef"


class PowerSGDParameters(Parameters):
    """The parameters of `fedring.ddp.hooks.PowerSGDState`, under torch's names."""

    matrix_approximation_rank: PositiveCount = 1
    start_powerSGD_iter: Count = 2  # the first step that can be compressed; torch waits for 1000 steps
    min_compression_rate: Positive = 2
    use_error_feedback: bool = True
    warm_start: bool = True
    orthogonalization_epsilon: NonNegative = 0
    random_seed: int = Field(0, ge=0, le=min(MAX_SEED, _MAX_RANDOM_SEED))
    compression_stats_logging_frequency: Count = 10_000
    batch_tensors_with_same_shape: bool = False

    @model_validator(mode="after")
    def _start_after_buckets_are_rebuilt(self) -> Self:
        if self.start_powerSGD_iter <= 1 and (self.use_error_feedback or self.warm_start):
            raise ValueError("start_powerSGD_iter must be above 1 if use_error_feedback or warm_start is on")
        return self


class DGCParameters(Parameters):
    """The parameters of `fedring.ddp.DGC`, which says what each of them does."""

    ratio: Share = 0.001
    warmup_epochs: Count = 4
    momentum: float = Field(0.9, ge=0, lt=1)
    nesterov: bool = False
    masking: bool = True
    clip: Annotated[Positive | None, BeforeValidator(lambda value: None if value == "none" else value)] = None
    clip_norm: Literal["tensor", "global"] = "tensor"
    precision: Literal["fp32", "fp16", "sign"] = "fp16"
    min_numel_to_compress: Count = 256
    sample_ratio: Share = 0.01
    strided: bool = True
    lower_bound: float = Field(0.8, gt=0, lt=1)
    upper_bound: float = Field(1.3, gt=1, allow_inf_nan=False)
    resample: bool = True
    max_iterations: Count = 10

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov needs a momentum above 0")
        return self


PARAMETERS: Mapping[str, type[Parameters]] = {
    "none": Parameters,
    "fp16": Parameters,
    "bf16": Parameters,
    "int8": Int8Parameters,
    "topk": TopKParameters,
    "powersgd": PowerSGDParameters,
    "batched_powersgd": PowerSGDParameters,
    "dgc": DGCParameters,
    "noop": Parameters,  # sends nothing: for measurements only
}
"""The name of every hook, and the parameters that it takes."""


class HookChoice(NamedTuple):
    """A hook by name, with a value for each of its parameters."""

    name: str
    parameters: dict[str, Any]


def choose_hook(text: str, given: Mapping[str, Any] | None = None) -> HookChoice:
    """Parse the name of a hook and check its parameters.

    Args:
        text: A name such as `topk`, or a call such as `topk(ratio=0.05, feedback=ef21)`.
        given: Values for parameters that the call does not name.

    Returns:
        The name, and a value for each parameter of the hook: from the call, from `given`, or else its default.

    Raises:
        ValueError: If there is no such hook or parameter, or if a value does not fit. The text lists what there is.
    """
    call = _CALL.fullmatch(text.strip())
    name = call.group(1) if call else text.strip()
    if call is None or name not in PARAMETERS:
        raise ValueError(f"there is no hook {name!r}: choose from {', '.join(PARAMETERS)}")
    values = {**(given or {}), **_arguments(call.group(2) or "")}
    try:
        return HookChoice(name, PARAMETERS[name].model_validate(values).model_dump())
    except ValidationError as error:
        raise ValueError("; ".join(_sentence(name, dict(one)) for one in error.errors())) from None


def split_hooks(text: str) -> list[str]:
    """Split a comma-separated list of hooks; commas between the parentheses of a call do not count.

    Args:
        text: Such as `none,topk(ratio=0.05,feedback=ef21)`.

    Returns:
        The hooks in their order, without spaces around them. Empty places are left out.
    """
    return [hook.strip() for hook in _OUTSIDE_PARENTHESES.split(text) if hook.strip()]


def _arguments(text: str) -> dict[str, str]:
    """Return the arguments of a call as texts, by name."""
    found: dict[str, str] = {}
    for argument in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in argument.partition("="))
        if not equals or name in found:
            raise ValueError(f"write each parameter of a hook once, as name=value, not {argument!r}")
        found[name] = value
    return found


def _sentence(hook: str, error: dict[str, Any]) -> str:
    """Return what is wrong with one parameter of the hook, as one sentence."""
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        known = ", ".join(PARAMETERS[hook].model_fields) or "none at all"
        return f"hook {hook} has no parameter {name!r}: it takes {known}"
    reason = str(error["msg"]).removeprefix("Value error, ")
    return f"hook {hook} cannot work with {name}={error['input']!r}: {reason}" if name else f"hook {hook}: {reason}"
