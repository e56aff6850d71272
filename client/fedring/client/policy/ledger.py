"""The ledger of a client: spent privacy, and failures told to nobody."""

import hashlib
import json
from collections.abc import Callable, Mapping
from math import isfinite
from pathlib import Path
from typing import Any, NamedTuple

from fedring.client.policy.promises import dp_of
from fedring.daemon.config import ConfigError
from fedring.daemon.durable import replace_with_digest, text_after_digest
from fedring.privacy.account import NoAccountant, SampledSteps, epsilon, sampled_epsilon
from fedring.privacy.charges import Charge, SkellamCharge, charge_of
from fedring.train.bounds import MAX_COUNT
from fedring.train.jobs.privacy_table import ClientPrivacy
from fedring.train.jobs.sample_privacy_table import SamplePrivacy
from fedring.untrusted import parse_json
from fedring.v1 import federation_pb2 as pb

LEDGER = "privacy.json"
_MAX_STEPS = 2**63 - 1

TELL_SECONDS = 86_400
"""After a client has told that it failed in a job, it does not tell that of another one for so long."""

_JobKey = tuple[str, int]  # the run of the server, and the number of the job in it
_KEEP_JOBS = 64
_MOST_RUN = 64  # characters; fl-server gives a run 32


class JobNote(NamedTuple):
    """A client's memory of a job whose rounds are covered (`is_covered`)."""

    failed: int = 0  # rounds in a row
    samples: int = 0  # that its last update counted for; 0 = not known
    epoch: int = 0  # of the last round that failed
    round: int = 0  # its number; 0 = none has failed


class Ledger:
    """The cost of a client's updates, and its failures, on disk.

    An update for a job with [dp] is charged by its name, before it leaves the client for the first time. The same bytes
    cost nothing when they are sent again. Another update of the same round costs again: a server could ask for a round
    many times, and get many updates of one client. Noise of the client's own is charged by a name of its update, too:
    that of what covers this one only. A training of a job with [sample_dp] is charged before its update is spooled:
    each has noise of its own.

    The file has the SHA-256 of what follows in its first line. That of an earlier version has none: it gets one.

    Args:
        folder: the state folder of the client.

    Raises:
        ConfigError: if its file is damaged.
    """

    def __init__(self, folder: Path) -> None:
        self._path = folder / LEDGER
        self._last = ""
        self._counts: dict[Charge, int] = {}
        self._samples: dict[tuple[_JobKey, float, float], int] = {}  # steps, by job, sampling rate and noise
        self._jobs: dict[_JobKey, JobNote] = {}  # the newest last
        self._told: tuple[_JobKey, int] | None = None  # of which job the failures were told last, and when
        try:
            data = self._path.read_bytes()
            adopted = data.startswith(b"{")  # no digest does
            known = parse_json(data if adopted else text_after_digest(data))
            self._last, counts = str(known["last"]), known["rounds"]
            self._counts = {charge_of(text): int(count) for text, count in counts.items()}
            for charge, count in self._counts.items():
                if isinstance(charge, float):
                    ClientPrivacy.model_validate({"noise_multiplier": charge})
                if not 0 < count <= MAX_COUNT:
                    raise ValueError(f"{count} rounds")
            for entry in known.get("samples", []):
                key, steps = _sample_entry(entry)
                if steps:  # 1.0.0 has noted trainings of no epochs, too
                    self._samples[key] = self._samples.get(key, 0) + steps
            for entry in known.get("jobs", []):
                note = JobNote(**{field: int(entry[field]) for field in JobNote._fields})
                if min(note) < 0:
                    raise ValueError(f"{entry} has a figure below 0")
                self._jobs[str(entry["run"]), int(entry["job"])] = note
            if told := known.get("told"):
                self._told = (str(told["run"]), int(told["job"])), int(told["at"])
            if adopted:
                self._write()
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ConfigError(
                f"{self._path} says what privacy this client has spent, and cannot be read ({error}): restore it, or "
                "remove it to begin at zero"
            ) from error

    def epsilon_with(
        self,
        command: pb.TrainCmd,
        delta: float,
        charge: SkellamCharge | None = None,
        *,
        update: str = "",
    ) -> float:
        """Return the epsilon of all rounds, with an update for the command.

        Args:
            command: of the round.
            delta: the probability that epsilon may fail.
            charge: what noise of this client's own costs; None = about as much as Gaussian noise as the job says.
            update: the name of the update; empty = one that is not made yet.

        Raises:
            NoAccountant: if dp-accounting is not installed.
        """
        privacy = dp_of(command.job)
        cost: Charge | None = charge or (privacy.noise_multiplier if privacy else None)
        if charge is None and privacy is not None and privacy.by_clients:
            known = self._last.startswith(_name_of(command, ""))
        else:
            known = self._last == (_name_of(command, update) if charge else _name_of(command, f"{cost} {update}"))
        more = [] if known or cost is None else [cost]
        return epsilon([*(each for each, count in self._counts.items() for _ in range(count)), *more], delta)

    def epsilons(self, command: pb.TrainCmd, delta: float) -> dict[str, float]:
        """Return the epsilon of this client's updates with a round, by name.

        Empty in jobs without [dp], or without an accountant.

        Args:
            command: of the round.
            delta: the probability that epsilon may fail, which comes with it.
        """
        return _told(lambda: {"epsilon": self.epsilon_with(command, delta)}, delta) if command.job.dp else {}

    def sample_epsilons(self, delta: float) -> dict[str, float]:
        """Return the epsilon of this client's samples, by name.

        Empty without an accountant.

        Args:
            delta: the probability that epsilon may fail, which comes with it.
        """
        return _told(lambda: {"sample_epsilon": self.sample_epsilon(delta)}, delta)

    def charge(self, command: pb.TrainCmd, update: str) -> None:
        """Charge durably an update that the server adds noise to.

        The update that was charged last costs nothing.

        Args:
            command: of the round.
            update: the name of the update.

        Raises:
            OSError: if that is impossible.
        """
        privacy = dp_of(command.job)
        if privacy is not None and not privacy.by_clients:
            multiplier = privacy.noise_multiplier
            self._charge(_name_of(command, f"{multiplier} {update}"), multiplier)

    def charge_own(self, command: pb.TrainCmd, charge: SkellamCharge, update: str) -> None:
        """Charge an update with this client's own noise, once, durably.

        An update that was charged before costs nothing.

        Args:
            command: of the round.
            charge: what the round costs.
            update: the name of the update.

        Raises:
            OSError: if that is impossible.
        """
        self._charge(_name_of(command, update), charge)

    def _charge(self, name: str, cost: Charge) -> None:
        if name != self._last:
            self._write(last=name, counts=self._counts | {cost: self._counts.get(cost, 0) + 1})

    def sample_epsilon(self, delta: float, *, of: pb.TrainCmd | None = None, more: SampledSteps | None = None) -> float:
        """Return the epsilon of this client's samples.

        Args:
            delta: The probability that epsilon may fail.
            of: A command of the only job that counts; None = all jobs count.
            more: Steps that count as well, though they are not charged.

        Raises:
            NoAccountant: if dp-accounting is not installed.
        """
        known = self._samples.items()
        spent = [SampledSteps(rate, z, steps) for (job, rate, z), steps in known if of is None or job == _job_of(of)]
        return sampled_epsilon([*spent, *([more] if more else [])], delta)

    def has_charged(self, command: pb.TrainCmd) -> bool:
        """Return whether a training of the command's job was charged before."""
        return any(job == _job_of(command) for job, _, _ in self._samples)

    def charge_samples(self, command: pb.TrainCmd, spent: SampledSteps) -> None:
        """Note durably that an update of such a training may go out.

        Raises:
            OSError: if that is impossible.
        """
        key = (_job_of(command), spent.rate, spent.noise_multiplier)
        # A server may ask for any number of epochs, also for none, and this file must be readable afterwards.
        steps = min(self._samples.get(key, 0) + spent.steps, _MAX_STEPS)
        if steps:
            self._write(samples=self._samples | {key: steps})

    def note_of(self, command: pb.TrainCmd) -> JobNote:
        """Return this client's memory of the command's job."""
        return self._jobs.get(_job_of(command), JobNote())

    def note_failed(self, command: pb.TrainCmd) -> None:
        """Note durably that one more round of a job has failed.

        The round that was noted last does not count again.

        Raises:
            OSError: if that is impossible.
        """
        note, at = self.note_of(command), (command.epoch, command.round)
        if at != (note.epoch, note.round):
            self._note(command, JobNote(note.failed + 1, note.samples, *at))

    def may_tell(self, command: pb.TrainCmd, now: float) -> bool:
        """Return whether the server may learn of a job's repeated failures.

        It could start many jobs, each of which fails for other samples. So it learns of one failing job a day.

        Args:
            command: Of the job.
            now: The time, in seconds since 1970.
        """
        if self._told is None:
            return True
        return self.has_told(command) or not 0 <= now - self._told[1] < TELL_SECONDS

    def has_told(self, command: pb.TrainCmd) -> bool:
        """Return whether failures of the command's job were told last."""
        return self._told is not None and self._told[0] == _job_of(command)

    def note_told(self, command: pb.TrainCmd, now: float) -> None:
        """Note durably that the server will learn of a failing job.

        Raises:
            OSError: if that is impossible.
        """
        if not self.has_told(command):
            self._write(told=(_job_of(command), int(now)))

    def note_trained(self, command: pb.TrainCmd, samples: int) -> None:
        """Note durably that a round was trained.

        Args:
            command: Of the round.
            samples: For how many its update counts; 0 = updates do not count by their samples.

        Raises:
            OSError: if that is impossible.
        """
        self._note(command, JobNote(samples=samples))

    def _note(self, command: pb.TrainCmd, note: JobNote) -> None:
        if note != self.note_of(command):
            key, told = _job_of(command), self._told and self._told[0]
            jobs = {job: each for job, each in self._jobs.items() if job != key} | {key: note}
            # The job whose failures were told is kept: it may be told of again at any time, so it must not begin anew.
            for job in [job for job in jobs if job != told][: max(0, len(jobs) - _KEEP_JOBS)]:
                del jobs[job]
            self._write(jobs=jobs)

    def _write(
        self,
        *,
        last: str | None = None,
        counts: dict[Charge, int] | None = None,
        samples: dict[tuple[_JobKey, float, float], int] | None = None,
        jobs: dict[_JobKey, JobNote] | None = None,
        told: tuple[_JobKey, int] | None = None,
    ) -> None:
        """Write changed values durably, and use them from then on only."""
        last, counts = self._last if last is None else last, self._counts if counts is None else counts
        samples, jobs = self._samples if samples is None else samples, self._jobs if jobs is None else jobs
        told = told or self._told
        known: dict[str, Any] = {
            "last": last,
            "rounds": {str(charge): count for charge, count in counts.items()},
        }
        if samples:
            known["samples"] = [
                {"run": run, "job": job, "rate": rate, "noise_multiplier": multiplier, "steps": steps}
                for ((run, job), rate, multiplier), steps in samples.items()
            ]
        if jobs:
            known["jobs"] = [{"run": run, "job": job, **note._asdict()} for (run, job), note in jobs.items()]
        if told:
            (run, job), at = told
            known["told"] = {"run": run, "job": job, "at": at}
        replace_with_digest(self._path, json.dumps(known).encode())
        self._last, self._counts, self._samples, self._jobs, self._told = last, counts, samples, jobs, told


def _told(spent: Callable[[], Mapping[str, float]], delta: float) -> dict[str, float]:
    """Return epsilons with their delta, for a log; empty without an accountant."""
    try:
        known = {key: round(value, 6) for key, value in spent().items() if isfinite(value)}
    except NoAccountant:
        return {}
    return {**known, "delta": delta}


def _sample_entry(entry: Mapping[str, Any]) -> tuple[tuple[_JobKey, float, float], int]:
    """Return the checked key and steps of an account's entry."""
    rate, multiplier, steps = float(entry["rate"]), float(entry["noise_multiplier"]), int(entry["steps"])
    SamplePrivacy.model_validate({"noise_multiplier": multiplier})
    if not (0 < rate <= 1 and 0 <= steps <= _MAX_STEPS):
        raise ValueError(f"{steps} steps with the sampling rate {rate:g}")
    return ((str(entry["run"]), int(entry["job"])), rate, multiplier), steps


def _job_of(command: pb.TrainCmd) -> _JobKey:
    return _run_of(command), command.job.job_id


def _name_of(command: pb.TrainCmd, noise: str) -> str:
    return f"{_run_of(command)} {command.epoch} {command.round} {command.model_digest} {noise}"


def _run_of(command: pb.TrainCmd) -> str:
    """Return the name of a command's run.

    It is a digest of it if a server has given a very long one.
    """
    run = command.run_id
    return run if len(run) <= _MOST_RUN else hashlib.sha256(run.encode()).hexdigest()
