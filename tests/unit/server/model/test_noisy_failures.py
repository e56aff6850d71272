"""Failed trainings in jobs with noise and without masks."""

import threading
from contextlib import nullcontext
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from scipy.stats import kstest
from tests.kept import kept_of, kept_residual
from tests.ledgers import account_in
from tests.unit.training_client import client, plug_in, user_module
from torch import Tensor, nn
from torch.utils.data import Dataset

from fedring.client import UpdateRefused, connect
from fedring.codec import decode
from fedring.data import Samples, Split
from fedring.train.losses import cross_entropy
from fedring.train.tensors.state import read_vectors, schema_of
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

SECONDS = 60.0
CLASS = 3
DP = '{"noise_multiplier": 1.0, "clip": 0.5, "adaptive": false}'
SAMPLE_DP = '{"noise_multiplier": 2.0, "max_grad_norm": 0.5}'


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """An empty module of the user."""
    return user_module(monkeypatch)


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(200, 7)


def job(**fields: Any) -> pb.JobSpec:
    given: dict[str, Any] = {"mode": "federated", "rounds": 9, "job_id": 1, "model_args": "{}"}
    given |= {"loss": "fedring.train.losses:cross_entropy", "optimizer": "fedring.train.optimizers:sgd"}
    return pb.JobSpec(**given | fields)


def parts(module: ModuleType, *labels: int) -> dict[str, str]:
    """Return the names of a model, and of samples with these labels."""

    def linear() -> nn.Module:
        return nn.Linear(200, 7)

    def data(root: Any, download: bool) -> Split:
        samples = Samples(torch.ones(len(labels), 200), torch.tensor(labels))
        return Split(samples, samples, 7)

    return {"model": plug_in(module, linear), "data": plug_in(module, data)}


def failing(outputs: Tensor, labels: Tensor) -> Tensor:
    """A loss that fails for samples of one class."""
    if labels.max().item() == CLASS:
        raise KeyError("Jane Doe")
    return cross_entropy(outputs, labels)


def overflowing() -> nn.Module:
    """Return a model whose loss overflows on samples of one class."""
    model = nn.Linear(200, 7)
    with torch.no_grad():
        model.bias[CLASS] = -3e38
    return model


def sent(server: "ScriptedServer", encoding: str = "fp32") -> NDArray[np.float32]:
    header, payload = server.accepted.get(timeout=SECONDS)
    assert (header.packets[0].num_samples, header.train_seconds, dict(header.metrics)) == (1, 0.0, {})
    return decode(payload, name=encoding, length=7 * 201)


def account(settings: dict[str, Any]) -> dict[str, Any]:
    known: dict[str, Any] = account_in(settings["state_dir"])
    return known


def test_with_noise_by_the_server_a_failure_is_an_update_of_zeros_that_is_charged(
    server: "ScriptedServer", settings: dict[str, Any], module: ModuleType
) -> None:
    with client(settings, **parts(module, 0, CLASS, CLASS)):
        server.joins.get(timeout=SECONDS)
        server.train(server.command(overflowing(), job=job(dp=DP)))
        assert not sent(server).any()
    assert server.failures.empty()
    assert account(settings)["rounds"] == {"1.0": 1}


def test_what_past_updates_left_out_stays(
    server: "ScriptedServer", settings: dict[str, Any], module: ModuleType, model: nn.Module
) -> None:
    sparse: dict[str, Any] = {"encoding": "fp32_sparse", "job": job(dp=DP)}
    with client(settings, **parts(module, 0, CLASS, CLASS)):
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, **sparse))
        assert sent(server, "fp32_sparse").any()
        server.publish(2, schema_of(model), read_vectors(overflowing()))
        server.train(server.command(model, round_=2, model_version=2, **sparse))
        header, _ = server.accepted.get(timeout=SECONDS)
    assert header.round == 2
    left = kept_residual(settings["state_dir"])
    assert left is not None
    assert np.count_nonzero(left) > 0.5 * left.size
    with client(settings, **parts(module, 0, 1, 1)):
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, round_=3, lr=1e-30, job=job(dp=DP)))
        np.testing.assert_allclose(sent(server), left, rtol=1e-5)


@pytest.mark.parametrize("label", [0, CLASS], ids=["trained", "failed"])
def test_with_noise_of_its_own_a_failed_training_delivers_the_noise_and_is_charged(
    server: "ScriptedServer", settings: dict[str, Any], module: ModuleType, model: nn.Module, label: int
) -> None:
    loss = plug_in(module, failing)
    with client(settings, loss=loss, **parts(module, *[label] * 4)):
        server.joins.get(timeout=SECONDS)
        noisy: dict[str, Any] = {"batch_size": 2, "epochs": 3, "lr": 0.5, "momentum": 0.0}
        server.train(server.command(model, **noisy, job=job(sample_dp=SAMPLE_DP)))
        values = sent(server)
    assert server.failures.empty()
    (entry,) = account(settings)["samples"]
    assert (entry["rate"], entry["steps"]) == (0.5, 6)
    if label == CLASS:
        deviation = 0.5 * 6**0.5 * 2.0 * 0.5 / 2  # of the sum of six steps
        assert kstest(values / deviation, "norm").pvalue > 1e-6
    else:
        assert np.abs(values).max() > 0


OWN = '{"method": "ditto", "mu": 0.1, "epochs": 1}'


@pytest.mark.parametrize("personal", ["", OWN], ids=["without", "with-own-model"])
def test_with_noise_of_its_own_one_sample_does_not_decide_whether_the_others_count(
    server: "ScriptedServer", settings: dict[str, Any], module: ModuleType, model: nn.Module, personal: str
) -> None:
    too_large = 7  # a label that the model has no output for
    with client(settings, **parts(module, *[0] * 100, too_large)):
        server.joins.get(timeout=SECONDS)
        asked = job(sample_dp='{"noise_multiplier": 0.1, "max_grad_norm": 0.5}', personal=personal)
        server.train(server.command(model, batch_size=101, lr=1.0, momentum=0.0, job=asked))
        values = sent(server)
    assert server.failures.empty()
    assert np.linalg.norm(values) == pytest.approx(0.5 * 100 / 101, rel=0.05)  # the noise alone has a norm of 0.02


def test_a_training_that_diverges_by_its_noise_delivers_zeros_and_is_charged(
    server: "ScriptedServer", settings: dict[str, Any], module: ModuleType, model: nn.Module
) -> None:
    with client(settings, **parts(module, 0, 1)):
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, batch_size=2, lr=3e38, job=job(sample_dp=SAMPLE_DP)))
        assert not sent(server).any()
    assert server.failures.empty()
    assert account(settings)["samples"][0]["steps"] == 1


def test_what_cannot_be_trained_even_without_samples_delivers_zeros_and_ends_no_client(
    server: "ScriptedServer", settings: dict[str, Any], module: ModuleType, model: nn.Module
) -> None:
    def broken(parameters: Any, lr: float, momentum: float) -> Any:
        raise ValueError("Jane Doe")

    with client(settings, optimizer=plug_in(module, broken), **parts(module, 0, 1)):
        server.joins.get(timeout=SECONDS)
        for round_ in (1, 2):
            server.train(server.command(model, round_=round_, batch_size=2, job=job(sample_dp=SAMPLE_DP)))
            assert not sent(server).any()
    assert server.failures.empty()


@pytest.mark.parametrize("seed", range(3))
def test_a_server_cannot_choose_the_sample_whose_shape_is_looked_at(
    server: "ScriptedServer", settings: dict[str, Any], module: ModuleType, model: nn.Module, seed: int
) -> None:
    class Uneven(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return torch.ones(100 if index else 200), 0

    def uneven(root: Any, download: bool) -> Split:
        return Split(Uneven(), Uneven(), 7)

    with client(settings, partition_count=4, **parts(module, 0) | {"data": plug_in(module, uneven)}):
        server.joins.get(timeout=SECONDS)
        asked = job(sample_dp=SAMPLE_DP, partition="iid", seed=seed)
        server.train(server.command(model, batch_size=2, job=asked))
        assert sent(server).any()
    assert server.failures.empty()


def test_the_noise_of_a_failed_training_does_not_come_into_private_tensors(
    server: "ScriptedServer", settings: dict[str, Any], module: ModuleType
) -> None:
    def halves() -> nn.Module:
        return nn.Sequential(nn.Linear(200, 4), nn.Linear(4, 7))

    private = job(sample_dp=SAMPLE_DP, private=["1.*"])
    names = parts(module, CLASS, CLASS) | {"model": plug_in(module, halves), "loss": plug_in(module, failing)}
    with client(settings, **names):
        server.joins.get(timeout=SECONDS)
        server.train(server.command(halves(), names=["0.weight", "0.bias"], job=private))
        server.accepted.get(timeout=SECONDS)
        first = kept_of(settings["state_dir"], "private")
        assert first is not None
        server.train(server.command(halves(), round_=2, names=["0.weight", "0.bias"], job=private))
        server.accepted.get(timeout=SECONDS)
    assert server.failures.empty()
    last = kept_of(settings["state_dir"], "private")
    assert last is not None
    assert all(torch.equal(last.tensors[name], values) for name, values in first.tensors.items())


@pytest.mark.parametrize("way", ["fail", "submit", "nothing", "raise"])
def test_a_script_that_may_not_train_says_the_same_whatever_has_failed(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, way: str
) -> None:
    def take_part() -> None:
        waiting = threading.Thread(target=lambda: list(federation))
        with connect(**settings) as federation:
            server.joins.get(timeout=SECONDS)
            server.train(server.command(model, job=job(sample_dp=SAMPLE_DP)))
            task = next(federation)
            task.load_into(model)
            match way:
                case "fail":
                    task.fail("no_data", "Jane Doe is not among my patients")
                case "raise":
                    raise KeyError("Jane Doe")
                case "submit":
                    with pytest.raises(UpdateRefused):
                        task.submit(model, samples=1)
                case "nothing":
                    waiting.start()
            told.append(server.failures.get(timeout=SECONDS))
            federation.close()
            if way == "nothing":
                waiting.join()

    told: list[pb.Failure] = []
    with pytest.raises(KeyError) if way == "raise" else nullcontext():
        take_part()
    failure = told[0] if told else server.failures.get(timeout=SECONDS)
    sentence = "the job has [sample_dp], and only the training of fl-client adds its noise"
    assert (failure.reason, failure.detail) == ("no_sample_dp", sentence)
    assert server.accepted.empty()
