"""Rounds with attackers in one process: clients train with fedring's loop, and the server's ModelMaker combines.

The attackers know the honest updates of the round before they choose their own.
"""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from fedring.client.round_plan import own_seed
from fedring.codec import CodecError, Encoding, encode
from fedring.codec.digest import name_of
from fedring.codec.schema import Vectors
from fedring.data import Samples
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.aggregation.rule import RuleError
from fedring.server.aggregation.versions import ModelVersions
from fedring.server.config import ServerConfig
from fedring.server.model.making import ModelMaker
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.rows import ModelRow, UpdateRow, lay_out
from fedring.train.errors import TrainError
from fedring.train.evaluation import evaluate
from fedring.train.jobs.job import Job
from fedring.train.loop import train
from fedring.train.names.offered import Offered
from fedring.train.names.seam import build_model, optimizer_factory
from fedring.train.plan import Plan
from fedring.train.tensors.state import fill, read_vectors, schema_of
from tests.attacks import formulas
from tests.attacks.attacker import Attack, Attacker
from tests.attacks.formulas import Float32
from tests.closed_rounds import FixedPast, closed_round

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

    def __init__(self, job: Job, offered: Offered) -> None:
        self._job = job
        self.model = build_model(job.model, job.model_args, job.seed, offered)
        self.schema = schema_of(self.model)
        self._loss = offered.get("loss", job.loss)
        self._optimizer = optimizer_factory(job.optimizer, job.optimizer_args, offered)

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
    job: Job,
    study: Study,
    attack: Attack,
    config: ServerConfig,
    *,
    z: float = 1.0,
) -> Result:
    """Run all rounds of a job under an attack, and return what its last model does.

    Args:
        job: the job, with its rule.
        study: the clients' samples.
        attack: what the malicious clients do; "none" = what honest ones do.
        config: names what is trusted, and the folder of the server's own samples.
        z: as Attacker has it.
    """
    ended = ""
    clients = len(study.honest) + len(study.malicious)
    with ExitStack() as stack:
        blobs = FileBlobs(Path(stack.enter_context(TemporaryDirectory())))
        stack.callback(blobs.close)
        executor = stack.enter_context(ThreadPoolExecutor(1))
        maker = ModelMaker(blobs, executor, config, "robust", ModelVersions(blobs))
        trainer = _Trainer(job, maker.offered)
        attackers = [
            Attacker(attack, samples, study.classes, study.bright, clients, len(study.malicious), z, seed)
            for seed, samples in enumerate(study.malicious)
        ]
        last_median = 0.0
        model = maker.first(job, 1)
        for number in range(1, job.rounds + 1):
            base, seed = _read(blobs, model), job.seed * 1_000_003 + number
            try:
                sent = _round(trainer, base, seed, study.honest, attackers)
                rows = [_row(number, f"client-{client:02}", *each) for client, each in enumerate(sent)]
                past = FixedPast({"median_norm": last_median})
                closed = closed_round(job, rows, number, seed=seed, job_round=number, past=past)
                prepared = maker.prepare(closed)
                made = maker.next(model, prepared, number + 1)
            except (TrainError, CodecError, RuleError) as error:  # the model is spoilt, or the rule gives up
                ended = f"round {number}: {error}"
                break
            last_median = prepared.stats().get("median_norm", 0.0)
            for name in {*model.files} - {*made.files}:
                blobs.delete(name)
            model = made
        last = _read(blobs, model)
        backdoor = formulas.triggered(study.test, study.bright)
        return Result(trainer.accuracy(last, study.test), trainer.accuracy(last, backdoor), ended)


def _round(
    trainer: _Trainer, base: Vectors, seed: int, honest: Sequence[Samples], attackers: Sequence[Attacker]
) -> list[tuple[Float32, int]]:
    """Return the update of each client, [D], and the number of samples that it reports."""

    def learn(samples: Samples, client: str) -> Float32:
        return trainer.delta(base, samples, own_seed(seed, client))

    learned = np.stack([learn(samples, f"honest-{client}") for client, samples in enumerate(honest)])
    sent = [(delta, len(samples)) for delta, samples in zip(learned, honest, strict=True)]
    for number, attacker in enumerate(attackers):
        sent.append(attacker.send(partial(learn, client=f"malicious-{number}"), lambda: learned))
    return sent


def _read(blobs: FileBlobs, row: ModelRow) -> Vectors:
    with blobs.reader(row.blob) as blob:
        return ModelReader(blob).vectors()


def _row(number: int, client: str, delta: Float32, samples: int) -> UpdateRow:
    payload = encode(np.asarray(delta, np.float32), Encoding("fp32"))
    packets = lay_out([("parameters", "delta", "fp32", len(payload))])
    norm = float(np.linalg.norm(delta))
    digest = name_of(payload)
    return UpdateRow(number, client, digest, digest, packets, samples, len(payload), 0.0, norm, 0.0, payload=payload)
