"""The communication hooks that have a name, and their parameters.

Jobs, `flctl profile`, benchmarks and scripts name hooks in the same way: by a name, followed by those
parameters whose defaults do not fit, as in a call:

    none    topk(ratio=0.05, feedback=ef21)    fp16(powersgd(matrix_approximation_rank=2))

In the last example, `fp16` wraps another hook, as torch's fp16_compress_wrapper does.

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
_FEEDBACK = "what happens to the part of the gradient that messages leave out"
_PRECISION = "of the values that are sent; sign = only their signs, and one magnitude for each tensor"


class Parameters(BaseModel):
    """The parameters of one kind of hook, with their defaults.

    Other names are errors.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)


class Int8Parameters(Parameters):
    """The parameters of `fedring.ddp.hooks.Int8State`."""

    chunk: int = Field(256, ge=4, le=1 << 20, multiple_of=4, description="entries that share a scale, a multiple of 4")
    feedback: Feedback = Field("ef", description=_FEEDBACK)


class TopKParameters(Parameters):
    """The parameters of `fedring.ddp.hooks.TopKState`."""

    ratio: Share = Field(0.01, description="share of the entries that is sent")
    precision: Literal["fp32", "fp16", "sign"] = Field("fp16", description=_PRECISION)
    feedback: Feedback = Field("ef", description=_FEEDBACK)


class PowerSGDParameters(Parameters):
    """The parameters of `fedring.ddp.hooks.PowerSGDState`, under torch's names."""

    matrix_approximation_rank: PositiveCount = Field(
        1, description="rank of the factors; a higher one sends more, and keeps more of the gradient"
    )
    start_powerSGD_iter: Count = Field(  # 2 is the first step that can be compressed; torch waits for 1000 steps
        2, description="first steps, which send whole gradients; at least 2 with error feedback or a warm start"
    )
    min_compression_rate: Positive = Field(
        2, description="a matrix is sent whole unless its factors have this many times fewer entries"
    )
    use_error_feedback: bool = Field(True, description="add what the factors leave out to the next gradient")
    warm_start: bool = Field(
        True, description="start from the right factor of the step before, not from random numbers"
    )
    orthogonalization_epsilon: NonNegative = Field(
        0,
        description="added to the norms of columns before they are divided by them; a column of zeros needs none here",
    )
    random_seed: int = Field(
        0, ge=0, le=min(MAX_SEED, _MAX_RANDOM_SEED), description="seed of the random factors, equal on all workers"
    )
    compression_stats_logging_frequency: Count = Field(
        10_000, description="steps between two log lines that state the compression rate"
    )
    batch_tensors_with_same_shape: bool = Field(
        False, description="factor matrices of one shape together; powersgd only"
    )

    @model_validator(mode="after")
    def _start_after_buckets_are_rebuilt(self) -> Self:
        if self.start_powerSGD_iter <= 1 and (self.use_error_feedback or self.warm_start):
            raise ValueError("start_powerSGD_iter must be above 1 if use_error_feedback or warm_start is on")
        return self


class DGCParameters(Parameters):
    """The parameters of `fedring.ddp.DGC`."""

    ratio: Share = Field(0.001, description="share of the entries that is sent after the warm-up")
    warmup_epochs: Count = Field(4, description="epochs in which the share falls exponentially to `ratio`")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the correction; in a job, the job's momentum")
    nesterov: bool = Field(False, description="whether the momentum is Nesterov's")
    masking: bool = Field(True, description="forget the momentum of entries that were sent")
    clip: Annotated[Positive | None, BeforeValidator(lambda value: None if value == "none" else value)] = Field(
        None, description="largest norm of a gradient over all workers; none = do not clip"
    )
    clip_norm: Literal["tensor", "global"] = Field(
        "tensor", description="clip each tensor's gradient by its own norm, or all together"
    )
    precision: Literal["fp32", "fp16", "sign"] = Field("fp16", description=_PRECISION)
    min_numel_to_compress: Count = Field(256, description="tensors with fewer entries are sent whole")
    sample_ratio: Share = Field(0.01, description="share of the entries from which the threshold is estimated")
    strided: bool = Field(True, description="sample entries at equal distances; false = at random")
    lower_bound: float = Field(
        0.8, gt=0, lt=1, description="lower the threshold if it selects less than this share of the wanted entries"
    )
    upper_bound: float = Field(
        1.3,
        gt=1,
        allow_inf_nan=False,
        description="change the threshold, or select again, if it selects more than this multiple of those wanted",
    )
    resample: bool = Field(
        True, description="of too many entries, keep the largest; false = raise the threshold, which may send fewer"
    )
    max_iterations: Count = Field(10, description="how often the threshold is changed at most")

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

WRAPPERS = ("fp16", "bf16")
"""The hooks that can also wrap another one, which then works on gradients of that precision."""


class HookChoice(NamedTuple):
    """A hook by name, with a value for each of its parameters."""

    name: str
    parameters: dict[str, Any]
    wrapper: str = ""  # one of WRAPPERS; empty = none

    @property
    def is_plain(self) -> bool:
        """Whether gradients are added up as they are."""
        return self.name == "none" and not self.wrapper


def choose_hook(text: str, given: Mapping[str, Any] | None = None) -> HookChoice:
    """Parse the name of a hook and check its parameters.

    Args:
        text: A name such as `topk`, a call such as `topk(ratio=0.05, feedback=ef21)`, or a hook in a wrapper such as
            `fp16(powersgd)`.
        given: Values for parameters that the call does not name.

    Returns:
        The name, and a value for each parameter of the hook: from the call, from `given`, or else its default.

    Raises:
        ValueError: If there is no such hook or parameter, or if a value does not fit. The text lists the choices.
    """
    wrapper, inner = split_wrapper(text)
    call = _CALL.fullmatch(inner)
    name = call.group(1) if call else inner
    if call is None or name not in PARAMETERS:
        raise ValueError(f"there is no hook {name!r}: choose from {', '.join(PARAMETERS)}")
    if wrapper and name in WRAPPERS:
        raise ValueError(f"hook {wrapper} cannot wrap {name!r}: it wraps a hook other than {' and '.join(WRAPPERS)}")
    # The call wins over `given`: it is the more exact of the two.
    values = {**(given or {}), **_arguments(call.group(2) or "")}
    try:
        return HookChoice(name, PARAMETERS[name].model_validate(values).model_dump(), wrapper)
    except ValidationError as error:
        raise ValueError("; ".join(_sentence(name, dict(one)) for one in error.errors())) from None


def split_wrapper(text: str) -> tuple[str, str]:
    """Split `fp16(powersgd(...))` into the wrapper and the hook that it wraps.

    Returns:
        The wrapper, or an empty text if there is none, and the rest of `text`; both without spaces around them.
    """
    call = _CALL.fullmatch(text.strip())
    inner = (call.group(2) or "").strip() if call else ""
    if call is None or call.group(1) not in WRAPPERS or not inner or "=" in inner.partition("(")[0]:
        return "", text.strip()
    return call.group(1), inner


def name_of(text: str) -> str:
    """Return the hook's name without a wrapper and parameters.

    An example is "powersgd" for `fp16(powersgd(...))`.
    """
    return split_wrapper(text)[1].partition("(")[0].strip()


def split_hooks(text: str) -> list[str]:
    """Split a comma-separated list of hooks.

    Commas between the parentheses of a call do not count.

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
    """Return the error of one parameter of a hook as a sentence."""
    name = ".".join(map(str, error["loc"]))
    if error["type"] == "extra_forbidden":
        known = ", ".join(PARAMETERS[hook].model_fields) or "none at all"
        return f"hook {hook} has no parameter {name!r}: it takes {known}"
    reason = str(error["msg"]).removeprefix("Value error, ")
    return f"hook {hook} cannot work with {name}={error['input']!r}: {reason}" if name else f"hook {hook}: {reason}"
