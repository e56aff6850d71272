"""FLTrust: what the server's own update makes of the others, and what becomes of a round without trust."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.closed_rounds import next_model

from fedring.codec import Encoding, encode
from fedring.codec.digest import name_of
from fedring.data import DataError, Samples, Split
from fedring.offers import offers
from fedring.server.aggregation.modelfile import ModelReader
from fedring.server.aggregation.robust import FLTrust
from fedring.server.aggregation.rule import RuleError
from fedring.server.aggregation.versions import ModelVersions
from fedring.server.config import ServerConfig
from fedring.server.model.making import ModelMaker
from fedring.server.state.blobs import FileBlobs
from fedring.server.state.rows import ModelRow, UpdateRow, lay_out
from fedring.train.errors import SeamError
from fedring.train.jobs.job import Job
from fedring.train.loop import train
from fedring.train.losses import cross_entropy
from fedring.train.models import digits_mlp
from fedring.train.optimizers import sgd
from fedring.train.plan import Plan, TrainResult
from fedring.train.tensors.state import fill, read_vectors, schema_of

Float64 = NDArray[np.float64]

SIZE = schema_of(digits_mlp()).num_parameters


def trusted_mean(deltas: Float64, own: Float64) -> Float64:
    """Cao et al. 2021, algorithm 2, lines 8 to 17, on the vectors themselves."""
    length, lengths = np.linalg.norm(own), np.linalg.norm(deltas, axis=1)
    trust = np.maximum(deltas @ own / lengths / length, 0.0)
    return np.asarray(trust @ (deltas * (length / lengths)[:, None]) / trust.sum())


@pytest.mark.parametrize("seed", range(3))
def test_the_rule_equals_its_formula_on_vectors(seed: int) -> None:
    rng = np.random.default_rng(seed)
    own = rng.standard_normal(40)
    deltas = 10.0 ** rng.integers(-3, 6, (9, 1)) * (rng.standard_normal((9, 40)) + 0.3 * own)
    rows = np.vstack([deltas, own])
    found = FLTrust().coefficients(rows @ rows.T, np.full(10, 0.1)) @ rows
    np.testing.assert_allclose(found, trusted_mean(deltas, own), rtol=1e-9)


@pytest.mark.parametrize("own", [[1.0, 0.0], [0.0, 0.0]])
def test_without_an_update_that_points_like_the_servers_there_is_no_result(own: list[float]) -> None:
    rows = np.array([[-1.0, 2.0], [0.0, 1.0], [0.0, 0.0], own])
    with pytest.raises(RuleError, match="no update points in the direction of the server's own") as caught:
        FLTrust().coefficients(rows @ rows.T, np.full(4, 0.25))
    assert caught.value.reason == "none_trusted"


@offers("data")
def few(root: Path | None, download: bool, count: int = 50, seed: int = 0) -> Split:
    """Return random digits of two classes, which are easy to tell apart."""
    assert not download
    generator = torch.Generator().manual_seed(seed)
    labels = torch.arange(count) % 2
    inputs = torch.randn(count, 1, 8, 8, generator=generator) + labels[:, None, None, None]
    return Split(Samples(inputs, labels), Samples(inputs, labels), 10)


@offers("data")
def drawn(root: Path | None, download: bool) -> Split:
    """Return samples that torch draws without a seed."""
    return few(root, download, seed=int(torch.randint(1 << 30, ())))


@offers("data")
def unreadable(root: Path | None, download: bool) -> Split:
    """Raise an error."""
    raise OSError("the disk is not mounted")


@offers("trainer")
def trainer(model: torch.nn.Module, samples: Samples, plan: Plan) -> TrainResult:
    """Raise an error in the second round, end the process in the third, and change the model in the fourth."""
    if plan.job_round == 2:
        raise ValueError("two is too much")
    if plan.job_round == 3:
        raise SystemExit(3)
    if plan.job_round == 4:
        torch.nn.utils.parametrizations.weight_norm(next(m for m in model.modules() if isinstance(m, torch.nn.Linear)))
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    return TrainResult(len(samples))


def job(data: str = "few", **keys: Any) -> Job:
    table = {"rule": "fltrust", "data": f"{__name__}:{data}", **keys.pop("aggregation", {})}
    return Job.model_validate({"aggregation": table, "batch_size": 16, "epochs": 2, **keys})


@pytest.fixture
def maker(tmp_path: Path) -> Iterator[ModelMaker]:
    config = ServerConfig.model_validate({"state_dir": tmp_path, "trusted": ["fedring", __name__]})
    blobs = FileBlobs(tmp_path)
    with ThreadPoolExecutor(2) as executor:
        yield ModelMaker(blobs, executor, config, "run-1", ModelVersions(blobs))
    blobs.close()


def rows_of(deltas: Sequence[NDArray[np.float32]]) -> list[UpdateRow]:
    rows = []
    for client, delta in enumerate(deltas):
        payload = encode(delta, Encoding("fp32"))
        packets = lay_out([("parameters", "delta", "fp32", len(payload))])
        name, digest, norm = f"client-{client}", name_of(payload), float(np.linalg.norm(delta))
        rows.append(UpdateRow(1, name, digest, digest, packets, 5, len(payload), 0.0, norm, 0.0, payload=payload))
    return rows


def parameters(folder: Path, row: ModelRow) -> Float64:
    blobs = FileBlobs(folder)
    with blobs.reader(row.blob) as blob:
        found = ModelReader(blob).vectors().parameters.astype(np.float64)
    blobs.close()
    return found


def own_delta(base: Float64, spec: Job, seed: int) -> Float64:
    """Train as a client would."""
    model = digits_mlp()
    schema, vectors = schema_of(model), read_vectors(model)
    vectors.parameters[:] = base
    fill(model, schema, vectors)
    plan = Plan(spec.epochs if isinstance(spec.epochs, int) else 0, spec.batch_size, 0.05, spec.momentum, seed=seed)
    split = few(None, False)
    train(model, split.train, plan, loss=cross_entropy, optimizer_factory=sgd, device=torch.device("cpu"))
    return read_vectors(model).parameters.astype(np.float64) - base


def test_the_server_trains_from_the_rounds_model_with_the_jobs_settings(maker: ModelMaker, tmp_path: Path) -> None:
    spec, rng = job(), np.random.default_rng(0)
    moved = rows_of([rng.standard_normal(SIZE).astype(np.float32)])
    base = next_model(maker, maker.first(spec, 1), moved, Job.model_validate({}), 1, 2)
    start = parameters(tmp_path, base)
    own = own_delta(start, spec, seed=77)
    deltas = [(rng.standard_normal(SIZE) * 0.1 + s * own).astype(np.float32) for s in (1, 2, -1, 0.5)]
    made = next_model(maker, base, rows_of(deltas), spec, 2, 3, seed=77)
    expected = trusted_mean(np.array(deltas, np.float64), own)
    np.testing.assert_allclose(parameters(tmp_path, made) - start, expected, atol=1e-6)
    again = next_model(maker, base, rows_of(deltas), spec, 2, 3, seed=77)
    assert again.digest == made.digest, "the second time, the samples and the model have been used before"
    assert next_model(maker, base, rows_of(deltas), spec, 2, 3, seed=78).digest != made.digest


def test_samples_that_are_drawn_are_the_same_after_a_restart(maker: ModelMaker, tmp_path: Path) -> None:
    spec, deltas = job("drawn"), [np.full(SIZE, value, np.float32) for value in (0.1, -0.1)]
    base = maker.first(spec, 1)
    made = next_model(maker, base, rows_of(deltas), spec, 1, 2)
    blobs, config = FileBlobs(tmp_path), ServerConfig.model_validate({"trusted": ["fedring", __name__]})
    with ThreadPoolExecutor(1) as executor:
        again = ModelMaker(blobs, executor, config, "run-1", ModelVersions(blobs))
        assert next_model(again, base, rows_of(deltas), spec, 1, 2).digest == made.digest
    blobs.close()


def test_buckets_hold_clients_only(maker: ModelMaker, tmp_path: Path) -> None:
    spec = job(aggregation={"bucketing": 4})
    base = maker.first(spec, 1)
    start = parameters(tmp_path, base)
    own = own_delta(start, spec, seed=5)
    deltas = [(s * own).astype(np.float32) for s in (1, 2, 3, 4)]
    made = next_model(maker, base, rows_of(deltas), spec, 1, 2, seed=5)
    np.testing.assert_allclose(parameters(tmp_path, made) - start, own, atol=1e-6)


def test_a_round_without_trusted_updates_makes_no_model(maker: ModelMaker, tmp_path: Path) -> None:
    spec = job()
    base = maker.first(spec, 1)
    own = own_delta(parameters(tmp_path, base), spec, seed=5)
    with pytest.raises(RuleError, match="the rule fltrust failed: no update points in the direction") as caught:
        next_model(maker, base, rows_of([-own.astype(np.float32)] * 3), spec, 1, 2, seed=5)
    assert caught.value.reason == "none_trusted"


def test_the_jobs_own_trainer_trains_on_the_server_too(maker: ModelMaker, tmp_path: Path) -> None:
    spec = job(trainer=f"{__name__}:trainer", rounds=4)
    base = maker.first(spec, 1)
    delta = np.zeros(SIZE, np.float32)
    delta[:4096] = 0.1
    made = next_model(maker, base, rows_of([delta] * 2), spec, 1, 2, job_round=1)
    change = parameters(tmp_path, made) - parameters(tmp_path, base)
    np.testing.assert_allclose(change[:4096], 1.0, atol=1e-6)
    sentences = (
        "ValueError: two is too much",
        r"CodeEnded: the job's code called sys.exit\(3\)",
        "its trainer has changed the model: ",
    )
    for job_round, sentence in enumerate(sentences, start=2):
        with pytest.raises(RuleError, match=f"the server cannot train: {sentence}") as caught:
            next_model(maker, base, rows_of([delta] * 2), spec, job_round, 2, job_round=job_round)
        assert caught.value.reason == "no_server_update"


@pytest.mark.parametrize(
    ("spec", "error", "sentence"),
    [
        (job("unreadable"), DataError, "The data cannot be loaded: OSError: the disk is not mounted."),
        (job("nothing"), SeamError, "nothing is not offered here as data"),
        (job(aggregation={"args": {"cuont": 3}}), SeamError, "few cannot be called with .*cuont"),
        (job(aggregation={"args": {"count": 0}}), DataError, "returned no training samples: fltrust needs some"),
    ],
)
def test_samples_that_do_not_load_are_found_when_the_job_is_checked(
    maker: ModelMaker, spec: Job, error: type[Exception], sentence: str
) -> None:
    with pytest.raises(error, match=sentence):
        maker.check_samples(spec)
