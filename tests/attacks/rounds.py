"""Rounds with attackers in one process: clients train with fedring's loop, and the server's ModelMaker combines.

The attackers know the honest updates of the round before they choose their own.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

import numpy as np
import torch

from fedring.client.task import own_seed
from fedring.codec import CodecError, Encoding, encode
from fedring.codec.digest import name_of
from fedring.codec.schema import Vectors
from fedring.data import Samples
from fedring.server.config import ServerConfig
from fedring.server.model.guards import guard
from fedring.server.model.making import ModelMaker
from fedring.server.model.modelfile import ModelReader
from fedring.server.model.rule import RuleError
from fedring.server.model.versions import ModelVersions, files_of
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.rows import ModelRow, UpdateRow, lay_out
from fedring.train.errors import TrainError
from fedring.train.evaluation import evaluate
from fedring.train.job import Job
from fedring.train.loop import train
from fedring.train.plan import Plan
from fedring.train.seam import build_model, optimizer_factory, resolve
from fedring.train.state import fill, read_vectors, schema_of
from tests.attacks import formulas
from tests.attacks.formulas import Float32

Attack = Literal[
    "none", "sign_flip", "label_flip", "little_is_enough", "inner_product", "mimic", "backdoor", "inflation"
]
ATTACKS: tuple[Attack, ...] = (
    "none",
    "sign_flip",
    "label_flip",
    "little_is_enough",
    "inner_product",
    "mimic",
    "backdoor",
    "inflation",
)

_EPSILON = 2.0
"""The factor of inner-product manipulation; an attacker may be longer than honest clients, too."""

_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, eq=False)
class Study:
    """Who takes part, and with which samples."""

    honest: Sequence[Samples]
    malicious: Sequence[Samples]  # as they would be, if the attackers were honest
    test: Samples
    classes: int
    bright: float  # the value of the trigger's pixels


@dataclass(frozen=True, slots=True)
class Result:
    """What the last model does with the test samples."""

    accuracy: float
    backdoor: float  # the share of triggered images that it takes for formulas.TARGET
    ended: str = ""  # why there are no more rounds, if that is so


class _Trainer:
    """Trains clients from the model of a round."""

    def __init__(self, job: Job, trusted: Sequence[str]) -> None:
        self._job = job
        self.model = build_model(job.model, job.model_args, job.seed, trusted)
        self.schema = schema_of(self.model)
        self._loss = resolve(job.loss, trusted)
        self._optimizer = optimizer_factory(job.optimizer, job.optimizer_args, trusted)

    def delta(self, base: Vectors, samples: Samples, seed: int) -> Float32:
        """Return what a client that trains on these samples learns in a round, [D]."""
        job = self._job
        fill(self.model, self.schema, base)
        plan = Plan(job.settings_of(1).epochs, job.batch_size, job.settings_of(1).lr, job.momentum, seed=seed)
        train(self.model, samples, plan, loss=self._loss, optimizer_factory=self._optimizer, device=_CPU)
        return read_vectors(self.model).parameters - base.parameters

    def accuracy(self, base: Vectors, samples: Samples) -> float:
        """Return the accuracy of a model."""
        fill(self.model, self.schema, base)
        counts = evaluate(self.model, samples, loss=self._loss, batch_size=1000, device=_CPU)
        return counts.accuracy or 0.0


def run(
    job: Job, study: Study, attack: Attack, config: ServerConfig, after_round: Callable[[], None] = lambda: None
) -> Result:
    """Run all rounds of a job under an attack, and return what its last model does.

    Args:
        job: the job, with its rule.
        study: the clients' samples.
        attack: what the malicious clients do; "none" = what honest ones do.
        config: names the trusted modules and the folder of the server's own samples.
        after_round: called after each round.
    """
    trainer, ended = _Trainer(job, config.trusted), ""
    with ExitStack() as stack:
        blobs = FileBlobs(Path(stack.enter_context(TemporaryDirectory())))
        stack.callback(blobs.close)
        executor = stack.enter_context(ThreadPoolExecutor(1))
        maker = ModelMaker(blobs, executor, config, "robust", ModelVersions(blobs))
        attackers, last_median = _Attackers(attack, study, trainer), 0.0
        model = maker.first(job, 1)
        for number in range(1, job.rounds + 1):
            base, seed = _read(blobs, model), job.seed * 1_000_003 + number
            try:
                honest = np.stack(
                    [
                        trainer.delta(base, samples, own_seed(seed, f"honest-{client}"))
                        for client, samples in enumerate(study.honest)
                    ]
                )
                sent = [*((delta, len(study.honest[0])) for delta in honest), *attackers.send(base, honest, seed)]
                rows = [_row(number, f"client-{client:02}", *each) for client, each in enumerate(sent)]
                guarded = guard(job, rows, last_median, job_round=number)
                made = maker.next(
                    model, rows, job, number, number + 1, seed=seed, job_round=number, guarded=guarded
                )
            except (TrainError, CodecError, RuleError) as error:  # the model is spoilt, or the rule gives up
                ended = f"round {number}: {error}"
                break
            last_median = guarded.median_norm
            for name in {*files_of(model)} - {*files_of(made), ""}:
                blobs.delete(name)
            model = made
            after_round()
        last = _read(blobs, model)
        backdoor = formulas.triggered(study.test, study.bright)
        return Result(trainer.accuracy(last, study.test), trainer.accuracy(last, backdoor), ended)


class _Attackers:
    """The malicious clients of a study, who know each other and the honest updates."""

    def __init__(self, attack: Attack, study: Study, trainer: _Trainer) -> None:
        self._attack, self._study, self._trainer = attack, study, trainer
        self._victim: int | None = None

    def send(self, base: Vectors, honest: Float32, seed: int) -> list[tuple[Float32, int]]:
        """Return the updates of all malicious clients, each with the number of samples that it reports."""
        count = len(self._study.malicious)
        clients, own = len(honest) + count, len(self._study.honest[0])
        match self._attack:
            case "little_is_enough":
                return [(formulas.little_is_enough(honest, clients, count), own)] * count
            case "inner_product":
                return [(formulas.inner_product(honest, _EPSILON), own)] * count
            case "mimic":
                self._victim = formulas.victim(honest) if self._victim is None else self._victim
                return [(honest[self._victim], own)] * count
        learned = [
            self._trainer.delta(base, self._poison(samples), own_seed(seed, f"malicious-{client}"))
            for client, samples in enumerate(self._study.malicious)
        ]
        match self._attack:
            case "sign_flip":
                return [(formulas.sign_flip(delta), own) for delta in learned]
            case "backdoor":
                return [(formulas.boosted(delta, clients), own) for delta in learned]
            case "inflation":
                return [(delta, formulas.MOST_SAMPLES) for delta in learned]
        return [(delta, own) for delta in learned]

    def _poison(self, samples: Samples) -> Samples:
        match self._attack:
            case "label_flip" | "inflation":
                return formulas.flip_labels(samples, self._study.classes)
            case "backdoor":
                return formulas.poisoned(samples, self._study.bright)
        return samples


def _read(blobs: FileBlobs, row: ModelRow) -> Vectors:
    with blobs.reader(row.blob) as blob:
        return ModelReader(blob).vectors()


def _row(number: int, client: str, delta: Float32, samples: int) -> UpdateRow:
    payload = encode(np.asarray(delta, np.float32), Encoding("fp32"))
    packets = lay_out([("parameters", "delta", "fp32", len(payload))])
    norm = float(np.linalg.norm(delta.astype(np.float64)))
    digest = name_of(payload)
    return UpdateRow(number, client, digest, digest, packets, samples, len(payload), 0.0, norm, 0.0, payload=payload)
