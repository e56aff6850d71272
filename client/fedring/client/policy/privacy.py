"""The demands of a site on jobs, which no server can change."""

import time
from collections.abc import Iterator
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from fedring.client.policy.ledger import Ledger
from fedring.client.policy.promises import dp_of, is_covered, promises_of, sample_dp_of, secure_of
from fedring.codec.digest import is_blake3, is_name
from fedring.daemon.config import ConfigError
from fedring.privacy.account import NoAccountant, check_accountant
from fedring.privacy.charges import SkellamCharge
from fedring.privacy.integer_plan import IntegerPlan
from fedring.train.bounds import Count, NonNegative
from fedring.train.jobs.privacy_table import ClientPrivacy
from fedring.train.jobs.sample_privacy_table import SamplePrivacy
from fedring.v1 import federation_pb2 as pb

_NOISE = ("min_noise_multiplier", "max_clip", "max_epsilon", "noise_by_clients")
"""The keys that demand noise for whole clients."""

_SAMPLE_NOISE = ("min_sample_noise_multiplier", "max_sample_epsilon")
"""The keys that demand noise of the client itself."""

ClientName = Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,128}$")]
Fingerprint = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class SitePolicy(BaseModel):
    """The table [privacy] of a client.

    The client refuses a job that is weaker. Unknown keys are errors.
    """

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
    max_failed_rounds: Count = Field(
        10,
        description="after it has failed in so many rounds of a job in a row, this client takes no further part in it, "
        "if the job has [secure_aggregation], [dp] or [sample_dp]: until then, the server gets zeros. "
        "It says so of one job a day, and goes on with zeros in others; 0 = no limit",
    )
    require_secure_aggregation: bool = Field(
        False, description="only jobs with secure_aggregation, in which the server sees sums of updates and no update"
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


def may_count(policy: SitePolicy, job: pb.JobSpec) -> bool:
    """Return whether a client may report its number of correct predictions."""
    return not (promises_of(job) or policy.needs_noise or policy.needs_sample_noise or policy.needs_secure)


def failed_too_often(policy: SitePolicy, ledger: Ledger, command: pb.TrainCmd) -> str:
    """Return a sentence if the server may learn of a failing job.

    Otherwise it is empty.
    """
    most, note = policy.max_failed_rounds, ledger.note_of(command)
    # The zeros of the round that failed last may have to be sent again. Once the server was told, they may not: it
    # could ask for this round with model after model, and learn from the next round of each whether this client failed.
    again = (note.epoch, note.round) == (command.epoch, command.round) and not ledger.has_told(command)
    before = note.failed - again
    if not (most and is_covered(command) and before >= most and ledger.may_tell(command, time.time())):
        return ""
    return f"this client has failed in {most} rounds of this job in a row: its privacy.max_failed_rounds"


def own_noise_refusal(policy: SitePolicy, ledger: Ledger, command: pb.TrainCmd, plan: IntegerPlan, update: str) -> str:
    """Return why a client withholds an update with its own noise.

    It is asked when the group is known. Empty = the client sends the update.
    """
    if plan.multiplier < policy.min_noise_multiplier:
        return (
            f"this site's privacy.min_noise_multiplier = {policy.min_noise_multiplier:g} is above the noise of its "
            f"group: {plan.multiplier:g}"
        )
    return _overspent(policy, ledger, command, plan.charge, update=update)


def refusal(policy: SitePolicy, ledger: Ledger, command: pb.TrainCmd, *, update: str = "") -> str:
    """Return why a client does not take part in a round.

    Empty = it takes part.

    Args:
        policy: What the site demands.
        ledger: What the client has spent.
        command: The command of the round.
        update: The name of the update that would be sent; empty = it is not made yet.
    """
    privacy, sample = dp_of(command.job), sample_dp_of(command.job)
    return (
        failed_too_often(policy, ledger, command)
        or _broken_promise(command, privacy, sample)
        or _open_to_others(policy, command)
        or _weak_for_samples(policy, sample)
        or _weak_for_clients(policy, privacy)
        or _overspent(policy, ledger, command, update=update)
    )


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


_COVERS = (
    (("min_clients",), "the number of updates that a job says it makes a model of, and with masks, that of a sum"),
    (
        ("min_noise_multiplier", "max_clip", "max_epsilon"),
        "what models reveal of this client as a whole; the server sees its updates, unless their noise is its own",
    ),
    (("noise_by_clients",), "that the noise for whole clients is in what the server sees"),
    (
        ("min_sample_noise_multiplier", "max_sample_epsilon"),
        "what updates and models reveal of one sample; of all samples together, nothing bounds it",
    ),
    (("require_secure_aggregation", "peers"), "that the server sees sums of updates; what sums reveal, nothing bounds"),
)


def coverage(policy: SitePolicy) -> Iterator[str]:
    """Yield one line about the coverage of each group of demands."""
    for keys, what in _COVERS:
        if set_ := [key for key in keys if getattr(policy, key)]:
            verb = "cover" if len(set_) > 1 else "covers"
            yield f"{' and '.join(f'privacy.{key}' for key in set_)} {verb} {what}"
    if policy.demands and may_count(policy, pb.JobSpec()):
        yield (
            "no key of privacy demands masks or noise: the server of a job without them sees this client's updates and "
            "the reasons of its failures, and this client evaluates any model"
        )


def _broken_promise(command: pb.TrainCmd, privacy: ClientPrivacy | None, sample: SamplePrivacy | None) -> str:
    """Return how a command breaks the promises of its job, or nothing."""
    job = command.job
    # A promise that this client cannot read protects nobody, so it is refused without any demand of the site's.
    for key, told, understood in (("dp", job.dp, privacy), ("sample_dp", job.sample_dp, sample)):
        if told and understood is None:
            return f"this client does not understand the job's {key} = {told[:200]}: it may be too old for it"
    if sample is not None and job.mode != "federated":
        return f"the job has sample_dp, but in the mode {job.mode} other workers see this client's gradients"
    if privacy is not None and privacy.by_clients != command.HasField("secure"):
        return f'dp.noise_by = "{privacy.noise_by}" of this job does not go with what its clients send'
    # Nor does a promise that the command does not keep: sites may have approved the job for its masks.
    if job.secure_aggregation and not _has_masks(command):
        return "the job has secure_aggregation, and the server asks for an update without masks"
    return _other_levels(command)


def _open_to_others(policy: SitePolicy, command: pb.TrainCmd) -> str:
    """Return the unmet demand of masks or of others, or nothing."""
    job = command.job
    if not policy.demands:
        return ""
    if command.HasField("secure") and is_name(command.model_digest) and not is_blake3(command.model_digest):
        # A model has two names that clients read. What was released for one of them is not found under the other.
        return "the server names the model by its SHA-256, and could ask this site for the same model twice: use BLAKE3"
    if policy.needs_secure and not _has_masks(command):
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
    return ""


def _weak_for_clients(policy: SitePolicy, privacy: ClientPrivacy | None) -> str:
    """Return the unmet demand of noise for whole clients, or nothing."""
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
    return ""


def _has_masks(command: pb.TrainCmd) -> bool:
    return command.HasField("secure") and command.job.mode == "federated"


def _other_levels(command: pb.TrainCmd) -> str:
    """Return why masked sums differ from those of their job, or nothing.

    Signed jobs have theirs compared with all that follows from the job. Cards and people read the job's table only.
    """
    table = secure_of(command.job)
    if table is None or command.job.dp:  # with the clients' noise, the round has none of these settings
        return ""
    told = {"levels": command.secure.levels, "block": command.secure.block}
    for key, value in told.items():
        if value != (wanted := getattr(table, key)):
            return f"the job has secure_aggregation.{key} = {wanted}, and the server's command has {value}"
    if command.secure.max_weight > table.max_weight:
        return (
            f"the job has secure_aggregation.max_weight = {table.max_weight}, and the server's command has "
            f"{command.secure.max_weight}"
        )
    return ""


def _weak_for_samples(policy: SitePolicy, sample: SamplePrivacy | None) -> str:
    """Return the unmet demand of noise for samples, or nothing."""
    if not policy.needs_sample_noise:
        return ""
    if sample is None:
        key = next(key for key in _SAMPLE_NOISE if getattr(policy, key))
        wanted = f"this site's privacy.{key} = {getattr(policy, key):g}"
        return f"{wanted} demands a job with [sample_dp], and this job has none"
    if sample.noise_multiplier < policy.min_sample_noise_multiplier:
        wanted = f"this site's privacy.min_sample_noise_multiplier = {policy.min_sample_noise_multiplier:g}"
        return f"{wanted} is above the job's sample_dp.noise_multiplier = {sample.noise_multiplier:g}"
    return ""


def _written(policy: SitePolicy, key: str) -> str:
    value = getattr(policy, key)
    return f"{key} = {'true' if value is True else format(value, 'g')}"


def _overspent(
    policy: SitePolicy,
    ledger: Ledger,
    command: pb.TrainCmd,
    charge: SkellamCharge | None = None,
    *,
    update: str = "",
) -> str:
    if not policy.max_epsilon:
        return ""
    total = ledger.epsilon_with(command, policy.delta, charge, update=update)
    if total <= policy.max_epsilon:
        return ""
    return (
        f"one more round would take this client's epsilon to {total:.3g} for delta = {policy.delta:g}, above its "
        f"privacy.max_epsilon = {policy.max_epsilon:g}"
    )
