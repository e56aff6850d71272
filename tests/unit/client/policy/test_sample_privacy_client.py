"""What a client does with jobs with [sample_dp]: its account, its limits, and what it never sends."""

import json
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.ledgers import account_in
from tests.unit import training_client
from torch import Tensor, nn

from fedring.client import Federation, connect
from fedring.client.consent.audit import FOLDER
from fedring.client.errors import UpdateRefused
from fedring.client.policy.ledger import Ledger
from fedring.client.policy.privacy import SitePolicy, may_count, refusal
from fedring.client.transfer.own_values import line_of
from fedring.client.transfer.sample_charge import overspent
from fedring.daemon.chain import read_chain
from fedring.daemon.config import ConfigError
from fedring.data import Samples, Split, digits
from fedring.privacy.account import SampledSteps, epsilon, sampled_epsilon
from fedring.rpc.errors import FedringError, Unavailable
from fedring.train.jobs.sample_privacy_table import SamplePrivacy
from fedring.train.models import digits_mlp
from fedring.v1 import federation_pb2 as pb

if TYPE_CHECKING:
    from tests.scripted_server import ScriptedServer

SECONDS = 60.0


def noisy(multiplier: float, **keys: float) -> SamplePrivacy:
    return SamplePrivacy.model_validate({"noise_multiplier": multiplier, **keys})


SAMPLE = noisy(1.0)
STEPS = SampledSteps(0.1, 1.0, 10)
NAMES: dict[str, Any] = {
    "model": "fedring.train.models:digits_mlp",
    "model_args": "{}",
    "data": "fedring.data:digits",
    "loss": "fedring.train.losses:cross_entropy",
    "optimizer": "fedring.train.optimizers:sgd",
    "partition": "iid",
    "alpha": 0.5,
}


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return digits_mlp()


def job(number: int = 1, private: SamplePrivacy | None = SAMPLE, **fields: Any) -> pb.JobSpec:
    text = private.model_dump_json() if private else ""
    return pb.JobSpec(mode="federated", rounds=9, job_id=number, sample_dp=text, **NAMES | fields)


def client(settings: dict[str, Any], **keys: Any) -> AbstractContextManager[Federation]:
    """Run the main loop of a daemon in a thread, with 359 or 360 samples."""
    return training_client.client(settings, partition_count=4, **keys)


def samples_in(settings: dict[str, Any]) -> list[dict[str, Any]]:
    entries: list[dict[str, Any]] = account_in(settings["state_dir"])["samples"]
    return entries


def values_of(payload: bytes, model: nn.Module) -> NDArray[np.float32]:
    """Return the values of an update that is encoded as fp32."""
    count = sum(parameter.numel() for parameter in model.parameters())
    return np.frombuffer(payload[-4 * count :], "<f4")


# In rounds


def test_an_update_says_nothing_of_the_data_and_is_charged_before_it_leaves(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    charged: list[list[dict[str, Any]]] = []

    def see(header: pb.UpdateHeader) -> FedringError | None:
        charged.append(samples_in(settings))
        return None

    server.on_header = see
    with client(settings) as federation:
        server.joins.get(timeout=SECONDS)
        for number in (1, 2):
            server.train(server.command(model, round_=number, batch_size=36, epochs=2, job=job()))
            header, _ = server.accepted.get(timeout=SECONDS)
            assert [packet.num_samples for packet in header.packets] == [1]
            assert (header.train_seconds, dict(header.metrics)) == (0.0, {})
        server.train(server.command(model, round_=3, batch_size=36, job=job(2)))
        server.accepted.get(timeout=SECONDS)
        for spec, counted in ((job(2), 0), (job(3, None), 90)):
            server.send(pb.ServerEvent(evaluate=server.evaluation(1, job=spec, round=3)))
            assert server.evaluations.get(timeout=SECONDS).total == counted
        shown = federation._link.metrics.registry.get_sample_value("fl_client_sample_epsilon")
    entry = {"run": "run-1", "job": 1, "rate": 36 / 360, "noise_multiplier": 1.0}
    assert charged[0] == [entry | {"steps": 20}]
    assert charged[1] == [entry | {"steps": 40}]
    assert charged[2] == [entry | {"steps": 40}, entry | {"job": 2, "steps": 10}]
    assert shown == pytest.approx(sampled_epsilon([SampledSteps(0.1, 1.0, 50)], 1e-5))


@pytest.mark.parametrize("lr", [0.1, 1e30], ids=["trains", "diverges"])
def test_the_log_of_the_client_says_what_each_training_has_spent(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, lr: float
) -> None:
    with client(settings, audit={"chain": True}):
        server.joins.get(timeout=SECONDS)
        for number in (1, 2):
            server.train(server.command(model, round_=number, batch_size=36, lr=lr, job=job()))
            server.accepted.get(timeout=SECONDS)
    lines = [line.facts for line in read_chain(settings["state_dir"] / FOLDER)]
    told = [(each["round"], each["sample_epsilon"], each["delta"]) for each in lines if each["what"] == "charged"]
    spent = [sampled_epsilon([SampledSteps(0.1, 1.0, steps)], 1e-5) for steps in (10, 20)]
    assert told == [(1, pytest.approx(spent[0]), 1e-5), (2, pytest.approx(spent[1]), 1e-5)]
    assert [each["what"] for each in lines if each["what"] in ("trains", "charged", "sends")] == [
        *("trains", "charged", "sends"),
        *("trains", "charged", "sends"),
    ]


def test_an_update_that_is_sent_again_after_a_restart_is_charged_once(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    server.on_header = lambda header: Unavailable("not now")
    command = server.command(model, batch_size=36, job=job())
    with client(settings):
        server.joins.get(timeout=SECONDS)
        server.train(command)
        first = server.offers.get(timeout=SECONDS)
    (entry,) = samples_in(settings)
    assert entry["steps"] == 10
    server.on_header = lambda header: None
    with client(settings):
        server.joins.get(timeout=SECONDS)
        server.train(command)
        server.accepted.get(timeout=SECONDS)
    assert server.offers.queue[-1].name == first.name
    assert samples_in(settings) == [entry]


def test_a_server_that_asks_for_no_epochs_does_not_spoil_the_account(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    for number, epochs in ((1, 1), (2, 0), (3, 1)):
        with client(settings):  # which reads the account
            server.joins.get(timeout=SECONDS)
            server.train(server.command(model, round_=number, batch_size=36, epochs=epochs, job=job(number)))
            server.accepted.get(timeout=SECONDS)
    assert [(entry["job"], entry["steps"]) for entry in samples_in(settings)] == [(1, 10), (3, 10)]


def test_a_server_cannot_fill_the_account_with_names_of_its_runs(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path)
    for number in range(4):
        asked = command(dp='{"noise_multiplier": 1.0}')
        asked.run_id = f"{number}" * 1_000_000
        ledger.charge_samples(asked, STEPS)
        ledger.charge(asked, "update")
        ledger.note_failed(asked)
        again = Ledger(tmp_path)
        assert (again.has_charged(asked), again.note_of(asked).failed) == (True, 1)
    assert len(account_in(tmp_path)["samples"]) == 4
    assert (tmp_path / "privacy.json").stat().st_size < 5000


def test_the_account_can_be_read_after_any_number_of_steps(tmp_path: Path) -> None:
    ledger, many = Ledger(tmp_path), SampledSteps(0.1, 1.0, 2**62)
    for _ in range(3):
        ledger.charge_samples(command(), many)
    ledger.charge_samples(command(2), SampledSteps(0.1, 1.0, 0))
    (entry,) = account_in(tmp_path)["samples"]
    assert (entry["job"], entry["steps"]) == (1, 2**63 - 1)
    assert Ledger(tmp_path).has_charged(command())
    spoilt = entry | {"job": 2, "steps": 0}  # as 1.0.0 has written it
    (tmp_path / "privacy.json").write_text(json.dumps({"last": "", "rounds": {}, "samples": [entry, spoilt]}))
    assert [Ledger(tmp_path).has_charged(command(number)) for number in (1, 2)] == [True, False]


def test_a_client_does_not_train_above_its_limit_and_tells_no_figure(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    limit = sampled_epsilon([SampledSteps(0.1, 1.0, 15)], 1e-5)
    with client(settings, privacy={"max_sample_epsilon": limit}):
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, batch_size=36, job=job()))
        server.accepted.get(timeout=SECONDS)
        for number, spec in ((2, job()), (3, job(2))):  # another job does not help
            server.train(server.command(model, round_=number, batch_size=36, job=spec))
            failure = server.failures.get(timeout=SECONDS)
            assert failure.reason == "privacy_policy"
            assert failure.detail == (
                "One more round would take the epsilon of this client's samples above its privacy.max_sample_epsilon = "
                f"{limit:g}."
            )
        server.train(server.command(model, round_=4, batch_size=36, job=job(3, None)))
        assert "demands a job with [sample_dp]" in server.failures.get(timeout=SECONDS).detail
    assert samples_in(settings)[0]["steps"] == 10


def test_only_the_built_in_training_can_be_submitted(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = ModuleType("my_project")

    def my_trainer(model: Any, samples: Any, plan: Any) -> int:
        return 17

    my_trainer.__module__ = "my_project"
    module.my_trainer = my_trainer  # type: ignore[attr-defined]  # a module takes any attribute
    monkeypatch.setitem(sys.modules, "my_project", module)
    with client(settings, trainer="my_project:my_trainer"):
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, job=job()))
        assert server.failures.get(timeout=SECONDS).reason == "no_sample_dp"
    with connect(**settings) as federation:
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, round_=2, job=job()))
        task = next(federation)
        task.load_into(model)
        with pytest.raises(UpdateRefused, match="only the training of fl-client adds its noise"):
            task.submit(model, 5)
        assert server.failures.get(timeout=SECONDS).reason == "no_sample_dp"
    assert server.accepted.empty()
    assert not (settings["state_dir"] / "privacy.json").exists()


def test_a_loss_that_fails_for_all_samples_fails_before_one_is_read_and_is_told_without_its_text(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def my_loss(outputs: Tensor, labels: Tensor) -> Tensor:
        raise KeyError("Jane Doe")

    name = training_client.plug_in(training_client.user_module(monkeypatch), my_loss)
    with client(settings, loss=name):
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, job=job()))
        failure = server.failures.get(timeout=SECONDS)
        told = "The model or the loss fails for samples that are made up (KeyError)."
        assert (failure.reason, failure.detail) == ("no_sample_dp", told)
    assert not (settings["state_dir"] / "privacy.json").exists()


@pytest.mark.parametrize("label", [3, 7])
def test_what_is_checked_before_the_charge_says_nothing_of_the_first_samples(
    server: "ScriptedServer", settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch, label: int
) -> None:
    def my_data(root: Any, download: bool) -> Split:
        whole = digits()
        assert isinstance(whole.train, Samples)
        chosen = [int((whole.train.labels == each).nonzero()[0]) for each in (3, label)]
        return Split(Samples(whole.train.inputs[chosen], whole.train.labels[chosen]), whole.test, 10)

    torch.manual_seed(2)
    model = digits_mlp()
    first, last = (layer for layer in model.modules() if isinstance(layer, nn.Linear))
    with torch.no_grad():  # Gradients of a 3 and of a 7 cancel but for rounding, so that two ways to add them differ.
        first.weight.mul_(0.01)
        first.bias.copy_(1e6 * (1 + torch.rand_like(first.bias)))
        last.weight.copy_(1e-13 * torch.randn_like(last.weight))
        last.bias.fill_(-1e4)
        last.bias[[3, 7]] = 0.0
    name = training_client.plug_in(training_client.user_module(monkeypatch), my_data)
    with training_client.client(settings, data=name):
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, batch_size=2, job=job(partition="none")))
        server.accepted.get(timeout=SECONDS)
    assert server.failures.empty()


def test_a_client_tells_no_text_of_errors_in_its_data(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module, monkeypatch: pytest.MonkeyPatch
) -> None:
    def my_data(root: Any, download: bool) -> Any:
        raise ValueError("could not convert string to float: 'Jane Doe'")

    name = training_client.plug_in(training_client.user_module(monkeypatch), my_data)
    with client(settings, data=name):
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, job=job()))
        failure = server.failures.get(timeout=SECONDS)
        assert (failure.reason, failure.detail) == ("no_data", "ValueError; the log of this client says more")


def test_what_rounds_without_noise_have_left_does_not_come_into_private_ones(
    server: "ScriptedServer", settings: dict[str, Any], model: nn.Module
) -> None:
    still: dict[str, Any] = {"lr": 1e-12, "momentum": 0.0, "batch_size": 36}
    quiet = noisy(1e-9)
    with client(settings):
        server.joins.get(timeout=SECONDS)
        server.train(server.command(model, encoding="fp32_sparse", job=job(1, None)))
        server.accepted.get(timeout=SECONDS)
        server.train(server.command(model, round_=2, job=job(2, quiet), **still))
        _, payload = server.accepted.get(timeout=SECONDS)
        assert np.abs(values_of(payload, model)).max() < 1e-6
        server.train(server.command(model, round_=3, encoding="fp32_sparse", batch_size=36, job=job(2, quiet)))
        server.accepted.get(timeout=SECONDS)
        server.train(server.command(model, round_=4, job=job(2, quiet), **still))
        _, payload = server.accepted.get(timeout=SECONDS)
        assert np.abs(values_of(payload, model)).max() > 1e-6  # what the round before has left out
    plain, private = (pb.TrainCmd(run_id="run", schema_hash=b"1" * 32, job=each) for each in (job(1, None), job()))
    assert line_of(plain) != line_of(private)  # of private tensors, and of the client's own model
    assert line_of(plain).model == plain.schema_hash


# What a site demands


def command(number: int = 1, *, mode: str = "federated", sample: str | None = None, dp: str = "") -> pb.TrainCmd:
    text = SAMPLE.model_dump_json() if sample is None else sample
    spec = pb.JobSpec(mode=mode, job_id=number, min_results=5, sample_dp=text, dp=dp)
    return pb.TrainCmd(run_id="run", round=number, job=spec)


@pytest.mark.parametrize(
    ("policy", "asked", "sentence"),
    [
        ({}, command(sample='{"noise": 1}'), """does not understand the job's sample_dp = {"noise": 1}"""),
        ({}, command(mode="data_parallel"), "in the mode data_parallel other workers see this client's gradients"),
        (
            {"min_sample_noise_multiplier": 1.0},
            command(sample=""),
            "privacy.min_sample_noise_multiplier = 1 demands a job with [sample_dp], and this job has none",
        ),
        (
            {"min_sample_noise_multiplier": 1.1},
            command(),
            "privacy.min_sample_noise_multiplier = 1.1 is above the job's sample_dp.noise_multiplier = 1",
        ),
        ({"max_sample_epsilon": 1.0}, command(sample=""), "privacy.max_sample_epsilon = 1 demands a job with"),
        (
            {"max_sample_epsilon": 1.0},
            command(sample="", mode="pipeline"),
            "privacy.max_sample_epsilon = 1 refuses the mode pipeline",
        ),
    ],
    ids=str,
)
def test_a_job_that_is_weaker_than_the_policy_is_refused(
    policy: dict[str, Any], asked: pb.TrainCmd, sentence: str, tmp_path: Path
) -> None:
    assert sentence in refusal(SitePolicy.model_validate(policy), Ledger(tmp_path), asked)


def test_a_job_that_is_strong_enough_is_taken(tmp_path: Path) -> None:
    policy = SitePolicy.model_validate({"min_sample_noise_multiplier": 1.0, "max_sample_epsilon": 3.0})
    assert refusal(policy, Ledger(tmp_path), command()) == ""
    assert refusal(SitePolicy.model_validate({}), Ledger(tmp_path), command(sample="")) == ""
    assert not may_count(policy, pb.JobSpec())
    assert not may_count(SitePolicy.model_validate({}), command().job)
    assert may_count(SitePolicy.model_validate({}), pb.JobSpec())


# The account


def test_the_account_is_kept_beside_that_of_whole_clients(tmp_path: Path) -> None:
    path = tmp_path / "privacy.json"
    path.write_text('{"last": "run 0 7 ", "rounds": {"2.0": 3}}')  # of a client that knew no [sample_dp]
    ledger = Ledger(tmp_path)
    assert ledger.sample_epsilon(1e-5) == 0.0
    ledger.charge_samples(command(1), STEPS)
    ledger.charge(command(8, dp='{"noise_multiplier": 2.0}'), "update 8")
    ledger.charge_samples(command(1), STEPS)
    ledger.charge_samples(command(2), SampledSteps(0.2, 1.0, 5))
    for known in (ledger, Ledger(tmp_path)):
        assert known.epsilon_with(command(8), 1e-5, update="update 8") == epsilon([2.0] * 4, 1e-5)
        assert known.sample_epsilon(1e-5, of=command(1)) == sampled_epsilon([STEPS, STEPS], 1e-5)
        total = sampled_epsilon([STEPS, STEPS, SampledSteps(0.2, 1.0, 5)], 1e-5)
        assert known.sample_epsilon(1e-5) == total
        assert known.sample_epsilon(1e-5, more=STEPS) > total
        assert [known.has_charged(command(number)) for number in (1, 2, 3)] == [True, True, False]
    assert account_in(tmp_path)["rounds"] == {"2.0": 4}
    assert [each.name for each in tmp_path.iterdir()] == ["privacy.json"]


def test_the_limit_of_a_job_is_its_own(tmp_path: Path) -> None:
    ledger, any_policy = Ledger(tmp_path), SitePolicy.model_validate({})
    ledger.charge_samples(command(1), STEPS)
    limit = sampled_epsilon([STEPS], 1e-5)
    limited = noisy(1.0, max_epsilon=limit).model_dump_json()
    assert "above sample_dp.max_epsilon" in overspent(any_policy, ledger, command(1, sample=limited), STEPS)
    assert overspent(any_policy, ledger, command(2, sample=limited), STEPS) == ""
    strict = SitePolicy.model_validate({"max_sample_epsilon": limit})
    assert "above its privacy.max_sample_epsilon" in overspent(strict, ledger, command(2), STEPS)


def test_a_charge_that_cannot_be_written_is_no_charge(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError("no space left")

    ledger = Ledger(tmp_path)
    monkeypatch.setattr("fedring.client.policy.ledger.replace_with_digest", full)
    with pytest.raises(OSError, match="no space left"):
        ledger.charge_samples(command(), STEPS)
    assert not ledger.has_charged(command())


@pytest.mark.parametrize(
    "entry",
    [
        '"x"',
        "{}",
        '{"run": "r", "job": 1, "rate": 0, "noise_multiplier": 1, "steps": 1}',
        '{"run": "r", "job": 1, "rate": 1.5, "noise_multiplier": 1, "steps": 1}',
        '{"run": "r", "job": 1, "rate": 1, "noise_multiplier": 1e200, "steps": 1}',
        '{"run": "r", "job": 1, "rate": 1, "noise_multiplier": 1, "steps": -1}',
        '{"run": "r", "job": "x", "rate": 1, "noise_multiplier": 1, "steps": 1}',
        '{"run": "r", "job": 1, "rate": 1, "noise_multiplier": 1, "steps": 1e400}',
        '{"run": "r", "job": 1, "rate": NaN, "noise_multiplier": 1, "steps": 1}',
    ],
)
def test_a_damaged_account_is_not_taken_for_an_empty_one(entry: str, tmp_path: Path) -> None:
    (tmp_path / "privacy.json").write_text(f'{{"last": "", "rounds": {{}}, "samples": [{entry}]}}')
    with pytest.raises(ConfigError, match=r"privacy\.json says what privacy this client has spent"):
        Ledger(tmp_path)
