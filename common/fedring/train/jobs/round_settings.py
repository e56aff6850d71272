"""The settings of a job that may change from round to round.

They are `lr`, `epochs` and `subset_size`. Each of them is a number, which holds for all rounds, or a table that
describes a schedule:

    lr = { schedule = "cosine", start = 0.1, end = 0.001, warmup_rounds = 5 }

The value of a round depends on the table, on the number of the round within its job, and on the job's number of rounds
only. So a server that is restarted, and a reader of a job's specification, compute the same values.
"""

import sys
from collections.abc import Mapping
from math import cos, inf, pi
from typing import Annotated, Any, Literal, NamedTuple, Self

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, WrapValidator, model_validator

from fedring.train.bounds import MAX_COUNT, MAX_SAMPLES, Count, Positive, PositiveCount

SCHEDULED = ("lr", "epochs", "subset_size")
"""The keys of a job that take a schedule."""

_EXAMPLE = '{ schedule = "cosine", start = 0.1, end = 0.001 }'


class SettingSchedule(BaseModel):
    """The change of a setting from round to round.

    Unknown keys are errors.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    schedule: Literal["cosine", "linear", "step"] = Field(
        description="how the value goes from start to end: along half a cosine wave, along a line, or in steps"
    )
    start: Positive = Field(description="value of the first round after the warm-up")
    end: Positive | None = Field(None, description="value of the last round (cosine, linear)")
    every: PositiveCount | None = Field(None, description="rounds with the same value (step)")
    gamma: Positive | None = Field(None, description="what the value is multiplied by after each of those (step)")
    warmup_rounds: Count = Field(
        0, description="first rounds, in which the value rises from start / (warmup_rounds + 1) to start in equal steps"
    )

    @model_validator(mode="after")
    def _has_its_keys(self) -> Self:
        needed = ("every", "gamma") if self.schedule == "step" else ("end",)
        for key in ("end", "every", "gamma"):
            given = getattr(self, key) is not None
            if given and key not in needed:
                raise ValueError(f'schedule = "{self.schedule}" takes no {key}, but {" and ".join(needed)}')
            if not given and key in needed:
                raise ValueError(f'schedule = "{self.schedule}" needs {" and ".join(needed)}')
        return self

    def at(self, job_round: int, rounds: int) -> float:
        """Return the value of a round.

        Args:
            job_round: the number of the round within its job, from 1 to `rounds`.
            rounds: the number of rounds of the job.

        Returns:
            With `done` rounds after the warm-up, and the share t = done / (rounds - warmup_rounds - 1) of the way:
            start + t (end - start) for "linear", start + (end - start) (1 - cos(pi t)) / 2 for "cosine" (Loshchilov and
            Hutter 2017, equation 5, without restarts), and start * gamma^(done // every) for "step"; infinity if that
            does not fit into a float.
        """
        done = job_round - self.warmup_rounds - 1
        if done < 0:
            return self.start * job_round / (self.warmup_rounds + 1)
        if self.every is not None and self.gamma is not None:
            try:
                return float(self.start * self.gamma ** (done // self.every))
            except OverflowError:
                return inf
        # The last round has the share 1. If it alone follows the warm-up, max() avoids a division by 0.
        share = done / max(rounds - self.warmup_rounds - 1, 1)
        end = self.start if self.end is None else self.end
        if self.schedule == "cosine":
            share = (1 - cos(pi * share)) / 2
        return self.start + share * (end - self.start)


class RoundSettings(NamedTuple):
    """The values of one round."""

    lr: float
    epochs: int
    subset_size: int  # 0 = all samples


def _number_or_table(number: TypeAdapter[Any]) -> WrapValidator:
    """Return a validator that chooses by the value's type.

    So an error is about the type that its author meant.
    """

    def validate(value: object, _: object) -> object:
        if isinstance(value, Mapping | SettingSchedule):
            return SettingSchedule.model_validate(value)
        try:
            return number.validate_python(value)
        except ValidationError as error:
            if error.errors()[0]["type"] in ("float_type", "float_parsing", "int_type", "int_parsing"):
                raise ValueError(f"must be a number, or a table such as {_EXAMPLE}") from None
            raise

    return WrapValidator(validate)


Samples = Annotated[int, Field(ge=0, le=MAX_SAMPLES)]
Rate = Annotated[Positive | SettingSchedule, _number_or_table(TypeAdapter(Positive))]
Epochs = Annotated[PositiveCount | SettingSchedule, _number_or_table(TypeAdapter(PositiveCount))]
SubsetSize = Annotated[Samples | SettingSchedule, _number_or_table(TypeAdapter(Samples))]


def settings_of(
    lr: float | SettingSchedule,
    epochs: int | SettingSchedule,
    subset_size: int | SettingSchedule,
    *,
    job_round: int,
    rounds: int,
) -> RoundSettings:
    """Return the values of one round.

    Those of `epochs` and `subset_size` are rounded, and at least 1 in a schedule.
    """

    def whole(setting: int | SettingSchedule, most: int) -> int:
        if not isinstance(setting, SettingSchedule):
            return setting
        return max(1, round(min(setting.at(job_round, rounds), most + 1)))

    rate = lr.at(job_round, rounds) if isinstance(lr, SettingSchedule) else lr
    return RoundSettings(rate, whole(epochs, MAX_COUNT), whole(subset_size, MAX_SAMPLES))


def check_schedules(schedules: Mapping[str, SettingSchedule], *, rounds: int) -> None:
    """Check that schedules stay within the bounds of their keys.

    This holds for all rounds.

    Args:
        schedules: those of a job, by its keys.
        rounds: the number of rounds of the job.

    Raises:
        ValueError: if one does not; the sentence names the key.
    """
    most = {"lr": sys.float_info.max, "epochs": MAX_COUNT, "subset_size": MAX_SAMPLES}
    for name, schedule in schedules.items():
        if schedule.warmup_rounds >= rounds:
            raise ValueError(f"{name}.warmup_rounds must be below rounds={rounds}, and is {schedule.warmup_rounds}")
        # A schedule rises or falls all the way from the end of the warm-up to the last round.
        for job_round in (1, schedule.warmup_rounds + 1, rounds):
            value = schedule.at(job_round, rounds)
            if not 0 < value <= most[name]:
                raise ValueError(
                    f"{name} must be above 0 and at most {most[name]:g}, and is {value:g} in round {job_round}"
                )
