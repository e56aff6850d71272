"""What a client demands of jobs, whatever the server says, and what it has spent of its privacy."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedring.daemon.config import ConfigError
from fedring.daemon.durable import replace_durably
from fedring.privacy.account import NoAccountant, SampledSteps, check_accountant, epsilon, sampled_epsilon
from fedring.privacy.charges import Charge, SkellamCharge, charge_of
from fedring.privacy.integer_plan import IntegerPlan
from fedring.train.bounds import MAX_COUNT, Count, NonNegative
from fedring.train.privacy_table import ClientPrivacy
from fedring.train.sample_privacy_table import SamplePrivacy
from fedring.v1 import federation_pb2 as pb

LEDGER = "privacy.json"
_MAX_STEPS = 2**63 - 1

_NOISE = ("min_noise_multiplier", "max_clip", "max_epsilon", "noise_by_clients")
"""The keys that demand noise for whole clients."""

_SAMPLE_NOISE = ("min_sample_noise_multiplier", "max_sample_epsilon")
"""The keys that demand noise of the client itself."""

_JobKey = tuple[str, int]  # the run of the server, and the number of the job in it


ClientName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class SitePolicy(BaseModel):
    """The table [privacy] of a client. A job that is weaker is refused by the client. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_clients: Count = Field(0, description="fewest updates that a job may make a model of; 0 = any")
    min_noise_multiplier: NonNegative = Field(
        0.0, description="least noise_multiplier of a job's [dp]; 0 = jobs need no [dp]"
    )
    max_clip: NonNegative = Field(
        0.0, description="largest clip of a job's [dp], which may not be adaptive then; 0 = any, and jobs need no [dp]"
    )
    noise_by_clients: bool = Field(
        False,
        description='only jobs whose [dp] has noise_by = "clients": this client adds its own noise, and need not trust '
        "the server with it",
    )
    trust_clients: bool = Field(
        False,
        description="a client that demands noise takes jobs with dp.trust_clients = true, too: their noise is enough "
        "only if all other clients add theirs, and keep it to themselves",
    )
    max_epsilon: NonNegative = Field(
        0.0,
        description="no round is taken part in that would take the epsilon of all rounds of this client above it; "
        "0 = no limit, and jobs need no [dp]",
    )
    min_sample_noise_multiplier: NonNegative = Field(
        0.0, description="least noise_multiplier of a job's [sample_dp]; 0 = jobs need no [sample_dp]"
    )
    max_sample_epsilon: NonNegative = Field(
        0.0,
        description="no round is trained that would take the epsilon of this client's samples, over all jobs, above "
        "it; 0 = no limit, and jobs need no [sample_dp]",
    )
    delta: Annotated[float, Field(gt=0, lt=1)] = Field(
        1e-5, description="the delta that max_epsilon and max_sample_epsilon belong to"
    )
    require_secure_aggregation: bool = Field(
        False, description="only jobs with secure_aggregation, in which the server learns nothing but sums"
    )
    max_clipped_share: Annotated[float, Field(ge=0, le=1)] = Field(
        0.9,
        description="with secure_aggregation, share of an update's values other than 0 that may be too large for the "
        "levels of the round, which say no more of them than their signs; above it, this client sends zeros with its "
        "ordinary weight, and keeps the update for a round with larger steps; 1 = any share",
    )
    peers: dict[ClientName, Fingerprint] = Field(
        default_factory=dict,
        description="the only clients with which this one adds up updates, and the fingerprints of their keys, such as "
        '{ berlin = "64 hexadecimal digits" }; jobs need secure_aggregation then',
    )

    @property
    def demands(self) -> bool:
        """Whether there is any job that it refuses."""
        return bool(self.min_clients or self.needs_noise or self.needs_sample_noise or self.needs_secure)

    @property
    def needs_secure(self) -> bool:
        """Whether it refuses jobs without secure aggregation."""
        return self.require_secure_aggregation or bool(self.peers)

    @property
    def needs_noise(self) -> bool:
        """Whether it refuses jobs without differential privacy."""
        return bool(self.min_noise_multiplier or self.max_clip or self.max_epsilon or self.noise_by_clients)

    @property
    def needs_sample_noise(self) -> bool:
        """Whether it refuses jobs without differential privacy for single samples."""
        return bool(self.min_sample_noise_multiplier or self.max_sample_epsilon)


class Ledger:
    """What the rounds cost that a client has delivered for, in a file that no server can change.

    A round of a job with [dp] is charged before the update leaves the client for the first time, and once only. Noise
    of the client's own is charged with the masks of its update, which cover one update only: a server could make a
    client forget that it has finished a round, and begin it anew with other masks and other noise. A training of a job
    with [sample_dp] is charged before its update is spooled: each has noise of its own.

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
        try:
            known = json.loads(self._path.read_text())
            self._last, counts = str(known["last"]), known["rounds"]
            self._counts = {charge_of(text): int(count) for text, count in counts.items()}
            for charge, count in self._counts.items():
                if isinstance(charge, float):
                    ClientPrivacy.model_validate({"noise_multiplier": charge})
                if not 0 < count <= MAX_COUNT:
                    raise ValueError(f"{count} rounds")
            for entry in known.get("samples", []):
                key, steps = _sample_entry(entry)
                self._samples[key] = self._samples.get(key, 0) + steps
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            raise ConfigError(
                f"{self._path} says what privacy this client has spent, and cannot be read ({error}): restore it, or "
                "remove it to begin at zero"
            ) from error

    def epsilon_with(
        self, command: pb.TrainCmd, delta: float, charge: SkellamCharge | None = None, masks: bytes = b""
    ) -> float:
        """Return the epsilon of all rounds, among them that of the command, charged or not.

        Args:
            command: of the round.
            delta: the probability that epsilon may fail.
            charge: what noise of this client's own costs; None = about as much as Gaussian noise as the job says.
            masks: what names the masks of the update with this noise; empty = those that were charged last, if they
                are of this round.

        Raises:
            NoAccountant: if dp-accounting is not installed.
        """
        privacy = dp_of(command.job)
        cost: Charge | None = charge or (privacy.noise_multiplier if privacy else None)
        if charge is None and privacy is not None and privacy.by_clients:
            known = self._last.startswith(_name_of(command, ""))
        else:
            known = self._last == _name_of(command, masks.hex() if charge else str(cost))
        more = [] if known or cost is None else [cost]
        return epsilon([*(each for each, count in self._counts.items() for _ in range(count)), *more], delta)

    def charge(self, command: pb.TrainCmd) -> None:
        """Note durably that an update goes out to which the server adds the noise, unless that was noted before.

        Raises:
            OSError: if that is impossible.
        """
        privacy = dp_of(command.job)
        if privacy is not None and not privacy.by_clients:
            multiplier = privacy.noise_multiplier
            self._charge(_name_of(command, str(multiplier)), multiplier)

    def charge_own(self, command: pb.TrainCmd, charge: SkellamCharge, masks: bytes) -> None:
        """Note durably that an update with noise of this client's own goes out, unless that was noted before.

        Args:
            command: of the round.
            charge: what the round costs.
            masks: what names the masks of the update.

        Raises:
            OSError: if that is impossible.
        """
        self._charge(_name_of(command, masks.hex()), charge)

    def _charge(self, name: str, cost: Charge) -> None:
        if name == self._last:
            return
        counts = self._counts | {cost: self._counts.get(cost, 0) + 1}
        self._write(name, counts, self._samples)
        self._last, self._counts = name, counts

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
        """Return whether a training of the command's job was charged to the samples before."""
        return any(job == _job_of(command) for job, _, _ in self._samples)

    def charge_samples(self, command: pb.TrainCmd, spent: SampledSteps) -> None:
        """Note durably that an update of such a training may go out.

        Raises:
            OSError: if that is impossible.
        """
        key = (_job_of(command), spent.rate, spent.noise_multiplier)
        samples = self._samples | {key: self._samples.get(key, 0) + spent.steps}
        self._write(self._last, self._counts, samples)
        self._samples = samples

    def _write(
        self, last: str, counts: Mapping[Charge, int], samples: Mapping[tuple[_JobKey, float, float], int]
    ) -> None:
        known: dict[str, Any] = {
            "last": last,
            "rounds": {str(charge): count for charge, count in counts.items()},
        }
        if samples:
            known["samples"] = [
                {"run": run, "job": job, "rate": rate, "noise_multiplier": multiplier, "steps": steps}
                for ((run, job), rate, multiplier), steps in samples.items()
            ]
        replace_durably(self._path, json.dumps(known).encode())


def _sample_entry(entry: Mapping[str, Any]) -> tuple[tuple[_JobKey, float, float], int]:
    """Return the key and the steps of an entry of the account, checked."""
    rate, multiplier, steps = float(entry["rate"]), float(entry["noise_multiplier"]), int(entry["steps"])
    SamplePrivacy.model_validate({"noise_multiplier": multiplier})
    if not (0 < rate <= 1 and 0 < steps <= _MAX_STEPS):
        raise ValueError(f"{steps} steps with the sampling rate {rate:g}")
    return ((str(entry["run"]), int(entry["job"])), rate, multiplier), steps


def _job_of(command: pb.TrainCmd) -> _JobKey:
    return command.run_id, command.job.job_id


def dp_of(job: pb.JobSpec) -> ClientPrivacy | None:
    """Return the differential privacy that a job promises; None if it promises none that this program understands."""
    try:
        return ClientPrivacy.model_validate_json(job.dp) if job.dp else None
    except ValidationError:
        return None


def sample_dp_of(job: pb.JobSpec) -> SamplePrivacy | None:
    """Return the noise that a job asks of each client; None if it asks for none that this program understands."""
    try:
        return SamplePrivacy.model_validate_json(job.sample_dp) if job.sample_dp else None
    except ValidationError:
        return None


def may_count(policy: SitePolicy, job: pb.JobSpec) -> bool:
    """Return whether a client may tell how many of its samples a model gets right."""
    unsaid = job.dp or job.sample_dp or job.secure_aggregation
    return not (unsaid or policy.needs_noise or policy.needs_sample_noise or policy.needs_secure)


def own_noise_refusal(policy: SitePolicy, ledger: Ledger, command: pb.TrainCmd, plan: IntegerPlan, masks: bytes) -> str:
    """Return why a client does not send an update with its own noise, now that it knows its group; "" if it does."""
    if plan.multiplier < policy.min_noise_multiplier:
        return (
            f"this site's privacy.min_noise_multiplier = {policy.min_noise_multiplier:g} is above the noise of its "
            f"group: {plan.multiplier:g}"
        )
    return _overspent(policy, ledger, command, plan.charge, masks)


def refusal(policy: SitePolicy, ledger: Ledger, command: pb.TrainCmd) -> str:
    """Return one sentence that says why a client does not take part in a round; "" if it does."""
    job = command.job
    privacy = dp_of(job)
    if job.dp and privacy is None:
        return f"this client does not understand the job's dp = {job.dp[:200]}: it may be too old for it"
    sample = sample_dp_of(job)
    if job.sample_dp and sample is None:
        return f"this client does not understand the job's sample_dp = {job.sample_dp[:200]}: it may be too old for it"
    if sample is not None and job.mode != "federated":
        return f"the job has sample_dp, but in the mode {job.mode} other workers see this client's gradients"
    if privacy is not None and privacy.by_clients != command.HasField("secure"):
        return f'dp.noise_by = "{privacy.noise_by}" of this job does not go with what its clients send'
    if not policy.demands:
        return ""
    if policy.needs_secure and not (command.HasField("secure") and job.mode == "federated"):
        key = "require_secure_aggregation = true" if policy.require_secure_aggregation else "peers"
        return f"this site's privacy.{key} demands a federated job with [secure_aggregation], which this job is not"
    if job.mode != "federated":
        key = next(key for key in ("min_clients", *_NOISE, *_SAMPLE_NOISE) if getattr(policy, key))
        return (
            f"this site's privacy.{_written(policy, key)} refuses the mode {job.mode}, in which other workers see its "
            "gradients"
        )
    if job.min_results < policy.min_clients:
        return (
            f"this site's privacy.min_clients = {policy.min_clients} is above the job's "
            f"min_clients_to_aggregate = {job.min_results}"
        )
    if policy.needs_sample_noise and (why := _weak_for_samples(policy, sample)):
        return why
    if not policy.needs_noise:
        return ""
    if privacy is None:
        key = next(key for key in _NOISE if getattr(policy, key))
        return f"this site's privacy.{_written(policy, key)} demands a job with [dp], and this job has none"
    if privacy.noise_multiplier < policy.min_noise_multiplier:
        return (
            f"this site's privacy.min_noise_multiplier = {policy.min_noise_multiplier:g} is above the job's "
            f"dp.noise_multiplier = {privacy.noise_multiplier:g}"
        )
    if policy.noise_by_clients and not privacy.by_clients:
        return "this site's privacy.noise_by_clients = true refuses noise of the server: dp.noise_by must be clients"
    if privacy.by_clients and privacy.trust_clients and not policy.trust_clients:
        return (
            "this site's privacy.trust_clients = false refuses dp.trust_clients = true, with which the noise is enough "
            "only if all other clients add theirs"
        )
    if policy.max_clip and privacy.adaptive:
        return (
            f"this site's privacy.max_clip = {policy.max_clip:g} demands dp.adaptive = false: an adaptive clip may grow"
        )
    if 0 < policy.max_clip < privacy.clip:
        return f"this site's privacy.max_clip = {policy.max_clip:g} is below the job's dp.clip = {privacy.clip:g}"
    return _overspent(policy, ledger, command)


def check_policy(policy: SitePolicy) -> None:
    """Return if a policy can be kept.

    Raises:
        ConfigError: if epsilon cannot be computed, which it needs.
    """
    for key in ("max_epsilon", "max_sample_epsilon"):
        if getattr(policy, key):
            try:
                check_accountant()
            except NoAccountant as error:
                raise ConfigError(f"privacy.{key}: {error}") from error


def _weak_for_samples(policy: SitePolicy, sample: SamplePrivacy | None) -> str:
    if sample is None:
        key = next(key for key in _SAMPLE_NOISE if getattr(policy, key))
        wanted = f"this site's privacy.{key} = {getattr(policy, key):g}"
        return f"{wanted} demands a job with [sample_dp], and this job has none"
    if sample.noise_multiplier < policy.min_sample_noise_multiplier:
        wanted = f"this site's privacy.min_sample_noise_multiplier = {policy.min_sample_noise_multiplier:g}"
        return f"{wanted} is above the job's sample_dp.noise_multiplier = {sample.noise_multiplier:g}"
    return ""


def _name_of(command: pb.TrainCmd, noise: str) -> str:
    return f"{command.run_id} {command.epoch} {command.round} {command.model_digest} {noise}"


def _written(policy: SitePolicy, key: str) -> str:
    value = getattr(policy, key)
    return f"{key} = {'true' if value is True else format(value, 'g')}"


def _overspent(
    policy: SitePolicy, ledger: Ledger, command: pb.TrainCmd, charge: SkellamCharge | None = None, masks: bytes = b""
) -> str:
    if not policy.max_epsilon:
        return ""
    total = ledger.epsilon_with(command, policy.delta, charge, masks)
    if total <= policy.max_epsilon:
        return ""
    return (
        f"one more round would take this client's epsilon to {total:.3g} for delta = {policy.delta:g}, above its "
        f"privacy.max_epsilon = {policy.max_epsilon:g}"
    )
