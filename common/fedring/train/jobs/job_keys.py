"""The keys of a job: their meanings and their values."""

from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from fedring.codec.encoding import NAMES, TILE
from fedring.train.bounds import (
    MAX_SAMPLES,
    MAX_SECONDS,
    MAX_SEED,
    Count,
    NonNegative,
    Positive,
    PositiveCount,
    Seconds,
    Table,
    Text,
)
from fedring.train.jobs.aggregation_table import Aggregation
from fedring.train.jobs.asynchronous_table import Asynchronous
from fedring.train.jobs.bounds_table import Bounds
from fedring.train.jobs.data_parallel_table import DataParallel
from fedring.train.jobs.labels import WantedLabels
from fedring.train.jobs.override_table import Overrides
from fedring.train.jobs.personal_table import Personal
from fedring.train.jobs.pipeline_table import Pipeline
from fedring.train.jobs.privacy_table import ClientPrivacy
from fedring.train.jobs.round_settings import (
    Epochs,
    Rate,
    SubsetSize,
)
from fedring.train.jobs.sample_privacy_table import SamplePrivacy
from fedring.train.jobs.secure_table import SecureAggregation
from fedring.train.jobs.start import NEWEST, Start
from fedring.train.metrics import check_rule

EncodingName = Literal["fp32", "fp16", "bf16", "int8", "fp32_sparse", "sq8", "packed", "uniform"]


class ServerOptimizer(BaseModel):
    """An optimizer that the server applies to the mean delta.

    See Reddi et al. 2021, algorithm 1.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Text = Field(
        "SGD", description="Yogi, or a class of torch.optim that treats each value independently, such as SGD or Adam"
    )
    args: Table = Field(default_factory=lambda: {"lr": 1.0}, description="its keyword arguments")


class NamedTransform(BaseModel):
    """An algorithm that changes updates on their way.

    It acts at the clients and at the server.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Text = Field(pattern=r"^[a-z][a-z0-9_]{0,63}$", description="of a transform, such as feddyn")
    args: Table = Field(default_factory=dict, description="its keyword arguments")


class JobKeys(BaseModel):
    """All settings of a job, each for itself.

    `fedring.train.jobs.job.Job` says which go together.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Text = Field("job", max_length=128, description="name for people to read")
    mode: Literal["federated", "data_parallel", "pipeline"] = Field(
        "federated",
        description="how clients train: each one alone, all as workers that share each batch, or as the stages of a "
        "model",
    )
    start: Start = Field(
        NEWEST,
        description="what the job starts from: fresh = a new model, made from model and seed, or read from init_path; "
        "newest = the newest version of this model; best = its best version by best_by; a version's number; or the "
        "path of a file that init_path allows. flctl run sends fresh unless you say otherwise",
    )
    priority: int = Field(
        0, ge=-100, le=100, description="in the queue, the job begins before those with a lower one (flctl jobs move)"
    )
    rounds: int = Field(1, ge=1, le=1_000_000, description="rounds to run, including those that are abandoned")

    model: Text = Field("fedring.train.models:digits_mlp", description="callable that returns the torch.nn.Module")
    model_args: Table = Field(default_factory=dict, description="its keyword arguments")
    data: Text = Field("fedring.data:digits", description="callable that returns the training and test samples")
    loss: Text = Field("fedring.train.losses:cross_entropy", description="callable (outputs, labels) -> scalar")
    optimizer: Text = Field(
        "fedring.train.optimizers:sgd", description="callable (parameters, lr, momentum) -> torch.optim.Optimizer"
    )
    optimizer_args: Table = Field(
        default_factory=dict,
        description="its further keyword arguments: for sgd weight_decay, dampening, nesterov; for adam weight_decay, "
        "beta2, eps, amsgrad",
    )
    trainer: Text = Field("", description="callable that trains instead of the built-in loop")
    evaluator: Text = Field("", description="callable that evaluates instead of the built-in evaluation")
    partition: Literal["none", "iid", "shards", "dirichlet"] = Field(
        "iid", description="how samples are divided among the clients that share a data set"
    )
    alpha: Positive = Field(
        0.5, description="concentration (dirichlet); smaller values make clients' data more unequal"
    )

    shared: list[Text] = Field(
        default_factory=lambda: ["*"],
        min_length=1,
        description="globs over the names of parameters and buffers: what matches travels; the rest is private "
        "(federated)",
    )
    private: list[Text] = Field(
        default_factory=list,
        description="globs over the same names: what matches never leaves a client, which keeps its own values "
        "(federated)",
    )
    send_frozen: bool = Field(
        False,
        description="parameters that require no gradient travel, too; otherwise, the model's callable must give them "
        "the same values everywhere (federated)",
    )

    subset_size: SubsetSize = Field(
        0, description="samples that a client draws anew for each round, or a group of workers for each epoch; 0 = all"
    )
    epochs: Epochs = Field(1, description="passes over the drawn samples")
    batch_size: PositiveCount = Field(64, description="samples per step")
    lr: Rate = Field(0.05, description="learning rate of the clients' optimizer")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the clients' optimizer")
    mu: NonNegative = Field(0.0, description="weight of FedProx's proximal term; 0 = FedAvg")
    clip_norm: NonNegative = Field(
        0.0,
        description="largest norm of the gradient of a step; a longer one is shortened to it; 0 = any (federated, "
        "without a trainer or sample_dp)",
    )
    precision: Literal["fp32", "bf16"] = Field(
        "fp32",
        description="of the forward pass and the loss in training, by torch.autocast; the model's values are fp32 with "
        "both (federated, without a trainer or sample_dp)",
    )
    seed: int = Field(
        0,
        ge=0,
        le=MAX_SEED,
        description="seed of the initial model, the partition and every random choice, except those of clients in jobs "
        "with masks or noise; with secure_aggregation, a job that sets none gets one that fl-server draws, or that of "
        "the version that it starts from",
    )

    override: Overrides = Field(
        default_factory=list,
        description="other values of some of these keys for the clients with some labels; of two overrides that set "
        "the same key for a client, the later one wins (federated)",
    )

    bounds: Bounds = Field(
        default_factory=lambda: Bounds.model_validate({}),
        description="what may change while the job runs, at sites that check its operator's signature "
        "(flctl run --sign)",
    )

    encoding: EncodingName = Field("uniform", description="how clients encode their updates")
    chunk: int = Field(8192, ge=1, le=TILE, description="number of values that share one scale")
    keep_ratio: float = Field(0.1, gt=0, le=1, description="share of the entries that is sent (sparse encodings)")
    step: Positive = Field(1.0, le=1000, description="quantisation step, relative to the root mean square (uniform)")
    download_encoding: Literal["full"] | EncodingName = Field(
        "full",
        description="how the server encodes the difference to the model before, for clients that hold that one; "
        "full = it sends the whole model; with a lossy encoding, the published model is the one that clients get, and "
        "what was left out goes into the next one (flctl models export --exact adds it)",
    )

    clients: WantedLabels = Field(
        default_factory=dict,
        description="labels of the clients that can take part, each with its value or a list of values; empty = all",
    )
    min_clients: PositiveCount = Field(2, description="clients that the barrier waits for")
    barrier: Literal["none", "joined", "matched"] = Field(
        "matched",
        description="what makes a client count as ready: nothing, a Join call, or a Watch stream that works both ways",
    )
    barrier_timeout_seconds: Seconds = Field(
        600.0, description="longest wait for the barrier; then the round is abandoned"
    )
    approval_timeout_seconds: Seconds = Field(
        604_800.0,
        description="longest wait for people at clients who have not approved the job yet, if they would be enough for "
        "the barrier",
    )
    sample_ratio: float = Field(1.0, gt=0, le=1, description="share of the ready clients that take part in a round")
    sample_clients: Count = Field(0, description="number of clients that take part in a round; 0 = use sample_ratio")
    select_factor: float = Field(
        1.0,
        ge=1,
        le=100,
        allow_inf_nan=False,
        description="draw this many times the clients that sample_ratio or sample_clients say, and end the round as "
        "soon as those have delivered; 1 = draw no more than are needed (federated)",
    )
    min_clients_to_aggregate: PositiveCount = Field(
        1, description="results that a round needs, or it is abandoned; at most min_clients"
    )
    close_at_minimum: bool = Field(
        False, description="end a round as soon as min_clients_to_aggregate results are accepted"
    )
    deadline_seconds: Seconds = Field(600.0, description="longest time from the command to the last result")
    stalled_after_seconds: float = Field(
        120.0,
        ge=0,
        le=MAX_SECONDS,
        allow_inf_nan=False,
        description="time after which a round goes on without a client whose progress has stopped, until it goes on; "
        "0 = never (federated, for trainings that report their progress)",
    )
    straggler_factor: float = Field(
        0.0,
        ge=0,
        le=1000,
        allow_inf_nan=False,
        description="end a round after this many times the median time of the clients that have delivered, once these "
        "are at least half of those that were selected; at least 1, or 0 = wait for all (federated)",
    )

    weights: Literal["samples", "uniform"] = Field(
        "samples", description="what a client's update counts in the mean: its number of samples, or the same for all"
    )
    max_samples: int = Field(
        1 << 20, ge=1, le=MAX_SAMPLES, description="largest number of samples that one client's update counts for"
    )
    update_clip: NonNegative = Field(
        0.0, description="largest norm of one client's update; a longer one is shortened to it; 0 = any (federated)"
    )
    update_clip_factor: NonNegative = Field(
        0.0,
        le=1000,
        description="the same, as a multiple of the median norm in the last round that published a model; in a job's "
        "first round, in that round itself; 0 = any (federated)",
    )
    aggregation: Aggregation = Field(
        default_factory=lambda: Aggregation.model_validate({}),
        description="the rule that combines updates (federated)",
    )
    dp: ClientPrivacy | None = Field(
        None, description="differential privacy for whole clients; none = the models are not private (federated)"
    )
    sample_dp: SamplePrivacy | None = Field(
        None,
        description="differential privacy for single samples, by the clients; none = what they send is not private "
        "(federated)",
    )
    secure_aggregation: SecureAggregation | None = Field(
        None, description="the server learns sums of updates only; none = it sees each update (federated)"
    )

    asynchronous: Asynchronous | None = Field(
        None, description="no round waits for slow clients; none = all clients of a round begin together (federated)"
    )

    data_parallel: DataParallel = Field(
        default_factory=lambda: DataParallel.model_validate({}),
        description="how workers train together (data_parallel)",
    )
    pipeline: Pipeline = Field(
        default_factory=lambda: Pipeline.model_validate({}),
        description="how the model is cut into stages and trained (pipeline)",
    )
    server_optimizer: ServerOptimizer | None = Field(
        None, description="optimizer that the server applies to the mean delta; none = FedAvg"
    )
    normalize_steps: bool = Field(
        False,
        description="divide each client's update by what its number of local steps makes of it, so that clients with "
        "more steps do not count more (FedNova; federated)",
    )
    scaffold: bool = Field(
        False,
        description="correct each local step by control variates, so that clients with different data do not drift "
        'apart (SCAFFOLD; federated, with momentum = 0 and weights = "uniform"); a download is twice as large',
    )
    personal: Personal | None = Field(
        None, description="each client also trains a model of its own, which never leaves it; none = it does not"
    )
    transforms: list[NamedTransform] = Field(
        default_factory=list,
        max_length=8,
        description="further algorithms that change updates on their way, in this order, each at most once (federated)",
    )
    evaluate: bool = Field(True, description="clients evaluate each new model on their held-out samples")
    evaluate_seconds: Seconds = Field(120.0, description="longest time for an evaluation by the clients")
    evaluate_on_server: bool = Field(
        False, description="the server also evaluates each new model, on the whole test set"
    )
    patience: Count = Field(
        0,
        description="number of rounds without a better result, by best_by, after which the job ends early; 0 = run "
        "all rounds",
    )
    min_delta: NonNegative = Field(0.0, description="a result is better only by more than this (patience)")
    min_rounds: Count = Field(0, description="number of rounds that the job runs in any case (patience)")
    best_by: Annotated[Text, AfterValidator(check_rule)] = Field(
        "",
        description='which model is the best, for start = "best", patience, keep_jobs and all tables: "max NAME" or '
        '"min NAME" of a metric, such as "max eval/f1"; empty = the highest accuracy, or the lowest loss if accuracy '
        "is not defined",
    )
    max_abandoned: PositiveCount = Field(
        3, description="number of rounds abandoned in a row after which the job has failed"
    )


if set(NAMES) != set(EncodingName.__args__):  # type: ignore[attr-defined]  # the members of a Literal
    raise RuntimeError("EncodingName and fedring.codec.encoding.NAMES differ")
