"""The schema of a job.

A job says what to train, on how many clients, and for how many rounds.
"""

from math import ceil
from typing import Self

from pydantic import ValidationError, model_validator

from fedring.offers import PARTS, named
from fedring.train.bounds import MAX_JOB_BYTES
from fedring.train.jobs.aggregation_table import MEAN
from fedring.train.jobs.algorithm_checks import BUILT_IN_LOOP, SCAFFOLD, check_keys
from fedring.train.jobs.job_keys import JobKeys
from fedring.train.jobs.job_table import Budget, JobTable, TrainingMode
from fedring.train.jobs.round_settings import SCHEDULED, RoundSettings, SettingSchedule, check_schedules, settings_of
from fedring.train.tensors.sharing import Sharing

_FEDERATED = TrainingMode()


class Job(JobKeys):
    """All settings of a job. Unknown keys are errors."""

    @model_validator(mode="after")
    def _enough_clients(self) -> Self:
        if self.min_clients_to_aggregate > self.min_clients:
            raise ValueError(
                f"min_clients_to_aggregate must be at most min_clients={self.min_clients}, and is "
                f"{self.min_clients_to_aggregate}"
            )
        return self

    @model_validator(mode="after")
    def _results_are_known(self) -> Self:
        by_training = " train/" in self.best_by or (self.aggregation.own and " server/" in self.best_by)
        if self.patience and not (self.evaluates or by_training):
            raise ValueError("patience compares results: it needs evaluate = true or evaluate_on_server = true")
        if (self.min_delta or self.min_rounds) and not self.patience:
            raise ValueError("min_delta and min_rounds belong to patience: set it, or leave them out")
        if self.min_rounds > self.rounds:
            raise ValueError(f"min_rounds must be at most rounds={self.rounds}, and is {self.min_rounds}")
        if 0 < self.straggler_factor < 1:
            raise ValueError(f"straggler_factor must be 0 or at least 1, and is {self.straggler_factor:g}")
        return self

    @model_validator(mode="after")
    def _fits_its_mode(self) -> Self:
        if self.training.grouped and (self.trainer or self.mu):
            raise ValueError(f"trainer and mu belong to the mode federated: leave them out of a {self.mode} job")
        if self.normalize_steps and (self.training.grouped or self.mu):
            what = f"a {self.mode} job, in which all updates are one" if self.training.grouped else f"mu={self.mu:g}"
            raise ValueError(f"normalize_steps does not go with {what}: leave one of them out")
        dampening = self.optimizer_args.get("dampening", 0.0)
        if self.normalize_steps and isinstance(dampening, int | float) and not 0 <= dampening <= 1:
            raise ValueError(f"normalize_steps needs optimizer_args.dampening from 0 to 1, and it is {dampening:g}")
        if self.training.grouped and (self.shared != ["*"] or self.private or self.send_frozen):
            raise ValueError(
                "shared, private and send_frozen belong to the mode federated: leave them out of a "
                f"{self.mode} job, whose workers train one whole model"
            )
        self.training.check(self)
        return self

    @model_validator(mode="after")
    def _algorithms_fit(self) -> Self:
        if self.scaffold:
            check_keys(self, "scaffold = true", SCAFFOLD)
        if self.clip_norm:
            check_keys(self, f"clip_norm = {self.clip_norm:g}", BUILT_IN_LOOP)
        if self.precision != "fp32":
            check_keys(self, f'precision = "{self.precision}"', BUILT_IN_LOOP)
        for table in self.tables.values():
            table.check(self)
        return self

    @model_validator(mode="after")
    def _transforms_fit(self) -> Self:
        if self.training.grouped and self.transforms:
            raise ValueError(f"transforms belong to the mode federated: leave them out of a {self.mode} job")
        names = [each.name for each in self.transforms]
        if twice := next((name for name in names if names.count(name) > 1), ""):
            raise ValueError(f"transforms: {twice} is named twice, and each may be named once")
        return self

    @model_validator(mode="after")
    def _schedules_fit(self) -> Self:
        check_schedules(self.scheduled, rounds=self.rounds)
        if self.training.grouped and self.scheduled:
            key = next(iter(self.scheduled))
            raise ValueError(f"{key} follows a schedule in the mode federated only: give a {self.mode} job a number")
        return self

    @model_validator(mode="after")
    def _rule_has_enough_updates(self) -> Self:
        if self.training.grouped and (self.aggregation.rule != MEAN or self.update_clip or self.update_clip_factor):
            raise ValueError(
                f"aggregation, update_clip and update_clip_factor belong to the mode federated: a {self.mode} job has "
                "one update in each round"
            )
        if self.aggregation.data and (self.private or self.shared != ["*"]):
            raise ValueError("fltrust trains the whole model on the server: leave out shared and private")
        updates, each = self.fewest_updates, ""
        for table in self.tables.values():
            updates, why = table.updates_of(updates)
            each += why
        if shortage := self.aggregation.too_few(updates):
            raise ValueError(f"aggregation: {shortage}{each}, in a round with the fewest clients that this job allows")
        return self

    @model_validator(mode="after")
    def _overrides_fit(self) -> Self:
        if self.override and self.training.grouped:
            raise ValueError(
                f"override belongs to the mode federated: leave it out of a {self.mode} job, whose workers share each "
                "batch"
            )
        for place, override in enumerate(self.override):
            try:
                type(self).model_validate({**self.model_dump(exclude={"override"}), **override.values})
            except ValidationError as error:  # its values are valid, so keys of the job do not go with them
                cause = error.errors()[0].get("ctx", {}).get("error", error)
                raise ValueError(f"override.{place}: {cause}") from error
        return self

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        ranges = self.bounds.ranges
        if ranges and not self.aggregation.own:
            key = next(iter(ranges))
            raise ValueError(f"bounds.{key} is for a strategy of the job's own, and aggregation.rule names none")
        warmed = [schedule.warmup_rounds + 1 for schedule in self.scheduled.values()]
        for job_round in sorted({1, self.rounds, *warmed}):  # where a schedule is lowest or highest
            settings = self.settings_of(job_round)._asdict()
            for key, (least, most) in ranges.items():
                value = settings.get(key, getattr(self, key))
                if not least <= value <= most:
                    raise ValueError(
                        f"{key} is {value:g} in round {job_round}, outside of bounds.{key} = [{least:g}, {most:g}]"
                    )
        return self

    @model_validator(mode="after")
    def _fits_a_message(self) -> Self:
        size = len(self.model_dump_json())
        if size > MAX_JOB_BYTES:
            longest = max(type(self).model_fields, key=lambda key: len(self.model_dump_json(include={key})))
            raise ValueError(
                f"the job is {size} bytes of JSON, above MAX_JOB_BYTES = {MAX_JOB_BYTES}, most of them in {longest}: "
                "let the code that the job names load long content itself"
            )
        return self

    @property
    def seed_is_open(self) -> bool:
        """Whether fl-server chooses the seed when the job starts."""
        return "seed" not in self.model_fields_set and any(table.opens_seed for table in self.tables.values())

    @property
    def code(self) -> list[str]:
        """All code that the job names, as entries of `trusted`."""
        table = self.aggregation
        keys = named(**{key: getattr(self, key) for key in PARTS})
        combined = named(rule=table.rule if table.own else "", data=table.data)
        workers = (f"{name} as {kind}" for _, kind, name in self.training.own_code(self.momentum))
        return list(dict.fromkeys([*keys, *combined, *workers]))

    @property
    def scheduled(self) -> dict[str, SettingSchedule]:
        """The settings that follow a schedule, by key."""
        values = {key: getattr(self, key) for key in SCHEDULED}
        return {key: value for key, value in values.items() if isinstance(value, SettingSchedule)}

    def settings_of(self, job_round: int) -> RoundSettings:
        """Return the values of the scheduled settings in a round.

        They are `lr`, `epochs` and `subset_size`.

        Args:
            job_round: the number of the round within the job, from 1 to `rounds`.
        """
        return settings_of(self.lr, self.epochs, self.subset_size, job_round=job_round, rounds=self.rounds)

    @property
    def training(self) -> TrainingMode:
        """How the clients train together: the table of the job's mode."""
        modes: dict[str, TrainingMode] = {"data_parallel": self.data_parallel, "pipeline": self.pipeline}
        return modes.get(self.mode, _FEDERATED)

    @property
    def tables(self) -> dict[str, JobTable]:
        """The tables of the algorithms that the job turns on, by key."""
        values = {key: getattr(self, key) for key in type(self).model_fields}
        return {
            key: value
            for key, value in values.items()
            if isinstance(value, JobTable)
            and not isinstance(value, TrainingMode)  # the table of a mode is always there
        }

    @property
    def fewest_updates(self) -> int:
        """The fewest updates of a round without failures.

        The round has the fewest clients that the job allows.
        """
        if self.close_at_minimum:
            return self.min_clients_to_aggregate
        if self.asynchronous is not None:
            return self.asynchronous.buffer
        if self.sample_clients:
            return min(self.sample_clients, self.min_clients)
        return ceil(self.sample_ratio * self.min_clients)

    @property
    def budget(self) -> Budget | None:
        """The privacy budget of its rounds, if the server charges them."""
        return next((budget for table in self.tables.values() if (budget := table.budget) is not None), None)

    @property
    def evaluates(self) -> bool:
        """Whether its models are evaluated, by clients or by the server."""
        return self.evaluate or self.evaluate_on_server

    @property
    def sharing(self) -> Sharing:
        """The choice of the model's tensors that travel."""
        return Sharing(tuple(self.shared), tuple(self.private), not (self.training.grouped or self.send_frozen))
