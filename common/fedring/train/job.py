"""A job: what to train, on how many clients, for how many rounds."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fedring.codec.encoding import NAMES, TILE, Encoding
from fedring.train.bounds import (
    MAX_JOB_BYTES,
    MAX_SAMPLES,
    MAX_SEED,
    MAX_WHOLE,
    Count,
    NonNegative,
    Positive,
    PositiveCount,
    Seconds,
    Table,
    Text,
)
from fedring.train.data_parallel_table import DataParallel
from fedring.train.pipeline_table import Pipeline

EncodingName = Literal["fp32", "fp16", "bf16", "int8", "fp32_sparse", "sq8", "packed", "uniform"]


class ServerOptimizer(BaseModel):
    """An optimizer of torch.optim that steps on the clients' mean delta (Reddi et al. 2021, algorithm 2)."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Text = Field("SGD", description="a class of torch.optim that steps each value by itself, such as SGD or Adam")
    args: Table = Field(default_factory=lambda: {"lr": 1.0}, description="its keyword arguments")


class Job(BaseModel):
    """Everything a job can be told. Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Text = Field("job", max_length=128, description="for people")
    mode: Literal["federated", "data_parallel", "pipeline"] = Field(
        "federated",
        description="how to train: each client by itself, all as workers that share each batch, or as a model's stages",
    )
    start: int = Field(
        0,
        ge=0,
        le=MAX_WHOLE,
        description="kept model version that the job starts from, whatever came after it; 0 = the newest",
    )
    rounds: int = Field(1, ge=1, le=1_000_000, description="rounds to run, those that are abandoned included")

    model: Text = Field("fedring.train.models:digits_mlp", description="callable that returns the torch.nn.Module")
    model_args: Table = Field(default_factory=dict, description="its keyword arguments")
    data: Text = Field("fedring.data:digits", description="callable that returns the training and test samples")
    loss: Text = Field("fedring.train.losses:cross_entropy", description="callable (outputs, labels) -> scalar")
    optimizer: Text = Field("fedring.train.optimizers:sgd", description="callable (parameters, lr, momentum)")
    trainer: Text = Field("", description="callable that trains in the place of the built-in loop")
    partition: Literal["none", "iid", "shards", "dirichlet"] = Field(
        "iid", description="how samples are divided among the clients that share a data set"
    )
    alpha: Positive = Field(0.5, description="concentration of dirichlet; smaller is more skewed")

    subset_size: int = Field(
        0,
        ge=0,
        le=MAX_SAMPLES,
        description="samples a client draws anew each round; of a group: all workers, each epoch; 0 = all",
    )
    epochs: PositiveCount = Field(1, description="passes over the drawn samples")
    batch_size: PositiveCount = Field(64, description="samples a step")
    lr: Positive = Field(0.05, description="learning rate of the clients' optimizer")
    momentum: float = Field(0.9, ge=0, lt=1, description="momentum of the clients' optimizer")
    mu: NonNegative = Field(0.0, description="FedProx's proximal weight; 0 = FedAvg")
    seed: int = Field(0, ge=0, le=MAX_SEED, description="seed of the initial model, the partition and every drawing")

    encoding: EncodingName = Field("uniform", description="how clients encode their updates")
    chunk: int = Field(8192, ge=1, le=TILE, description="values that share one scale")
    keep_ratio: float = Field(0.1, gt=0, le=1, description="kept share of the entries (sparse encodings)")
    step: Positive = Field(1.0, le=1000, description="quantisation step over the root mean square (uniform)")
    download_encoding: Literal["full"] | EncodingName = Field(
        "full", description="how the server sends a new model to a client that holds the one before; full = as it is"
    )

    min_clients: PositiveCount = Field(2, description="clients that the barrier waits for")
    barrier: Literal["none", "joined", "matched"] = Field(
        "matched", description="what a client must have done to pass it: nothing, joined, or watching both ways"
    )
    barrier_timeout_seconds: Seconds = Field(600.0, description="abandon the round if the barrier stays closed")
    sample_ratio: float = Field(1.0, gt=0, le=1, description="share of the ready clients that take part in a round")
    sample_clients: Count = Field(0, description="number of clients that take part; 0 = by sample_ratio")
    min_clients_to_aggregate: PositiveCount = Field(
        1, description="results without which a round is abandoned; at most min_clients"
    )
    close_at_minimum: bool = Field(False, description="end the round as soon as the minimum has delivered")
    deadline_seconds: Seconds = Field(600.0, description="longest time from the command to the last result")

    data_parallel: DataParallel = Field(
        default_factory=lambda: DataParallel.model_validate({}),
        description="how workers train together (data_parallel)",
    )
    pipeline: Pipeline = Field(
        default_factory=lambda: Pipeline.model_validate({}), description="how the model is cut, and trained (pipeline)"
    )
    server_optimizer: ServerOptimizer | None = Field(None, description="step on the mean delta; none = FedAvg")
    evaluate: bool = Field(True, description="clients evaluate each new model on their held-out samples")
    evaluate_seconds: Seconds = Field(120.0, description="longest time for that")
    evaluate_on_server: bool = Field(False, description="the server evaluates it, too, on the whole test set")
    max_abandoned: PositiveCount = Field(3, description="abandoned rounds in a row that fail the job")

    @model_validator(mode="after")
    def _enough_clients(self) -> Self:
        if self.min_clients_to_aggregate > self.min_clients:
            raise ValueError("min_clients_to_aggregate must be at most min_clients")
        return self

    @model_validator(mode="after")
    def _fits_its_mode(self) -> Self:
        if self.grouped and (self.trainer or self.mu):
            raise ValueError(f"trainer and mu belong to the mode federated: leave them out of a {self.mode} job")
        if self.mode == "pipeline" and self.batch_size < max(self.pipeline.interval, self.pipeline.unit):
            raise ValueError("batch_size must be at least the number of its micro-batches")
        return self

    @model_validator(mode="after")
    def _fits_a_message(self) -> Self:
        size = len(self.model_dump_json())
        if size > MAX_JOB_BYTES:
            longest = max(type(self).model_fields, key=lambda key: len(self.model_dump_json(include={key})))
            raise ValueError(
                f"the job is {size} bytes of JSON, above MAX_JOB_BYTES = {MAX_JOB_BYTES}, most of them in {longest}: "
                "let the code load what is long"
            )
        return self

    @property
    def grouped(self) -> bool:
        """Whether the clients of a round are the workers of one group, one of which delivers for all."""
        return self.mode != "federated"

    @property
    def upload_encoding(self) -> Encoding:
        """How clients encode their updates."""
        return Encoding(self.encoding, self.chunk, self.keep_ratio, self.step)

    @property
    def delta_encoding(self) -> Encoding | None:
        """How the server encodes the step from one model to the next; None = not at all."""
        if self.download_encoding == "full":
            return None
        return Encoding(self.download_encoding, self.chunk, self.keep_ratio, self.step)


if set(NAMES) != set(EncodingName.__args__):  # type: ignore[attr-defined]  # the members of a Literal
    raise RuntimeError("EncodingName and fedring.codec.encoding.NAMES differ")
