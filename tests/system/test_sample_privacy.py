"""Jobs with differential privacy for single samples, with real daemons, and what such a training reaches on MNIST."""

from pathlib import Path
from typing import Any

import pytest
import torch

from fedring.client.config import ClientConfig
from fedring.client.policy.ledger import LEDGER
from fedring.client.training.job_loading import load_job
from fedring.client.training.local_training import PrivateLoop
from fedring.control.failure import Failure
from fedring.data import Samples
from fedring.privacy.account import SampledSteps, sampled_epsilon
from fedring.train.evaluation import run_evaluator
from fedring.train.jobs.job import Job
from fedring.train.names.offered import collect
from fedring.train.orders.commands import job_spec
from fedring.train.plan import Plan
from fedring.train.private_loop import sampled_steps
from tests.conftest import path_to
from tests.fleets import Control, Fleet, run_job, until_watching
from tests.ledgers import account_in
from tests.metrics_page import Page, address_of

PRIVATE: dict[str, Any] = {"weights": "uniform", "evaluate": False, "evaluate_on_server": True, "max_abandoned": 1}
JOB: dict[str, Any] = {
    "min_clients": 2,
    "min_clients_to_aggregate": 2,
    "rounds": 3,
    "epochs": 4,
    "batch_size": 128,
    "lr": 1.0,
    "momentum": 0.5,
    "sample_dp": {"noise_multiplier": 1.0},
    **PRIVATE,
}
SIZES = (719, 718)
"""The training samples of two clients that share the digits."""


def spent(size: int, rounds: int) -> float:
    steps = sampled_steps(Plan(epochs=4, batch_size=128), Job.model_validate(JOB).sample_dp, size)  # type: ignore[arg-type]  # it has one
    return sampled_epsilon([SampledSteps(steps.rate, 1.0, rounds * steps.steps)], 1e-5)


def test_clients_train_privately_and_keep_an_account_that_the_server_does_not_see(tmp_path: Path) -> None:
    clients = [{}, {"metrics_listen": "127.0.0.1:0"}]
    with Fleet(tmp_path, {}, clients) as fleet, Control(fleet.control) as control:
        until_watching(control, 2)
        done = run_job(control, JOB)
        assert (done.state, done.rounds_done) == ("completed", 3), done.reason
        rounds = control.rounds(job_id=done.job_id)
        assert rounds[0].metrics["server/accuracy"] > 0.75
        for round_ in rounds:
            assert not [name for name in round_.metrics if not name.startswith("server/")]
            for client in round_.clients:
                assert (client.num_samples, client.train_seconds, dict(client.metrics)) == (1, 0.0, {})
        assert control.privacy().rounds_without == 0  # the clients bound them
        shown = Page(address_of(fleet.clients[1]))("fl_client_sample_epsilon")
        assert shown == pytest.approx(spent(SIZES[1], 3), rel=0.02)
        for number in (0, 1):
            ledger = account_in(tmp_path / "state" / f"client-{number}")
            (entry,) = ledger["samples"]
            assert (entry["job"], entry["steps"]) == (done.job_id, 3 * 4 * 6)
            assert entry["rate"] == pytest.approx(128 / 719, rel=0.01)


def test_a_client_stops_by_itself_at_its_limits_and_refuses_what_is_weaker(tmp_path: Path) -> None:
    limit = (spent(719, 2) + spent(719, 3)) / 2
    strict = {"privacy": {"min_sample_noise_multiplier": 0.9, "max_sample_epsilon": limit}}
    with Fleet(tmp_path, {}, [{}, strict]) as fleet, Control(fleet.control) as control:
        until_watching(control, 2)
        for keys, reason in (
            ({"sample_dp": None}, "demands a job with [sample_dp]"),
            ({"sample_dp": {"noise_multiplier": 0.8}}, "is above the job's sample_dp.noise_multiplier = 0.8"),
            ({"sample_dp": {"noise_multiplier": 1.0, "max_epsilon": 0.5}}, "above sample_dp.max_epsilon = 0.5."),
        ):
            refused = run_job(control, JOB | keys)
            assert (refused.state, refused.rounds_done) == ("failed", 0)
            assert "privacy_policy" in refused.reason
            assert reason in refused.reason
        folder = tmp_path / "state" / "client-1"
        assert not (folder / LEDGER).exists()
        ended = run_job(control, JOB)
        assert ended.rounds_done == 2
        assert "above its privacy.max_sample_epsilon = " in ended.reason
        assert sum(entry["steps"] for entry in account_in(folder)["samples"]) == 2 * 4 * 6


def test_a_model_with_batch_norm_is_refused_when_it_is_queued(tmp_path: Path) -> None:
    trusted = {"trusted": ["fedring", "user_models"]}
    advice = r"sample_dp: the layer norm \(BatchNorm1d\) computes with several samples at once.*: use GroupNorm"
    with (
        Fleet(tmp_path, trusted, env=path_to(Path(__file__).parent)) as fleet,
        Control(fleet.control) as control,
        pytest.raises(Failure, match=advice),
    ):
        control.start_job(JOB | {"model": "user_models:normed"})


@pytest.mark.soak
@pytest.mark.timeout(1200)
def test_mnist_is_learned_well_with_a_small_epsilon(data_root: Path) -> None:
    job = Job.model_validate(
        {
            "model": "fedring.train.models:mnist_tanh_cnn",
            "data": "fedring.data:mnist",
            "epochs": 14,
            "batch_size": 1024,
            "lr": 2.0,
            "momentum": 0.0,
            "sample_dp": {"noise_multiplier": 1.9, "max_grad_norm": 0.5},
            **PRIVATE,
        }
    )
    cpu = torch.device("cpu")
    config = ClientConfig.model_construct(data_root=data_root, trusted=["fedring"])
    loaded = load_job(job_spec(job, 1), config, collect(config.trusted), cpu)
    plan = Plan(epochs=14, batch_size=job.batch_size, lr=2.0, momentum=job.momentum)
    samples = loaded.split.train
    assert isinstance(samples, Samples)
    assert job.sample_dp is not None
    epsilon = sampled_epsilon([sampled_steps(plan, job.sample_dp, len(samples))], 1e-5)
    result = PrivateLoop(job.sample_dp).train(loaded, samples, plan, device=cpu)
    accuracy = run_evaluator(None, loaded.model, loaded.split.test, loss=loaded.loss, device=cpu).accuracy
    print(f"accuracy {accuracy:.4f}, epsilon {epsilon:.3f}, {result.steps} steps, {result.seconds:.0f} s")
    assert len(samples) == 60_000
    assert epsilon <= 1.2
    assert accuracy is not None
    assert accuracy >= 0.945
