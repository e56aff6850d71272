"""The model and the optimizer of a job, the models that come with fedring, devices and threads."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedring.train.device import pick_device, threads_for
from fedring.train.errors import SeamError
from fedring.train.models import cifar_cnn, digits_mlp, mnist_cnn, vector
from fedring.train.names.offered import Offered, collect
from fedring.train.names.seam import build_model, optimizer_factory


@pytest.fixture
def offered(monkeypatch: pytest.MonkeyPatch) -> Offered:
    """Return what fedring and a user's module offer."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "fixtures_user_code"))
    return collect(["fedring", "user_seam"])


def test_the_same_seed_builds_the_same_model_and_leaves_the_global_generator_alone(offered: Offered) -> None:
    before = torch.get_rng_state()
    first, again, other = (build_model("user_seam:linear", {"inputs": 5}, seed, offered) for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [next(model.parameters()) for model in (first, again, other)]
    assert weights[0].shape == (3, 5)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(
    ("name", "args", "reason"),
    [
        ("user_seam:linear", {"inputs": -1}, "no_model"),
        ("user_seam:not_a_model", {}, "no_model"),
        ("user_seam:exits", {}, "no_model"),
        ("user_seam:linear", {"width": 3}, "bad_argument"),
        ("user_seam:linear", {"inputs": "4"}, "bad_argument"),
        ("user_seam:my_optimizer", {}, "not_offered"),
        ("user_seam:one_step", {}, "not_offered"),
        ("linear", {}, "bad_name"),
    ],
)
def test_a_model_that_cannot_be_built_is_named(
    offered: Offered, name: str, args: dict[str, object], reason: str
) -> None:
    with pytest.raises(SeamError, match=name) as caught:
        build_model(name, args, 0, offered)
    assert caught.value.reason == reason


def test_the_models_have_the_sizes_that_their_docstrings_say() -> None:
    sizes = [sum(p.numel() for p in m.parameters()) for m in (mnist_cnn(), cifar_cnn(), digits_mlp(), vector(12))]
    assert sizes == [1_199_882, 356_810, 4_810, 12]
    assert mnist_cnn()(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert cifar_cnn()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert digits_mlp()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.programs
def test_reading_a_job_does_not_import_torch() -> None:
    code = "import sys, fedring.train.jobs.job; sys.exit('torch' in sys.modules)"
    path = str(Path(__file__).parents[3] / "common")
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, check=False).returncode == 0


def test_devices_are_checked_before_they_are_used() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("gpu", "cuda:", "cuda:99", "cpu:", "cpu:0", ""):
        with pytest.raises(SeamError) as caught:
            pick_device(name)
        assert caught.value.reason == "no_device"


def test_clients_on_one_host_share_its_cores() -> None:
    assert threads_for(1) >= threads_for(2) >= threads_for(10_000) == 1


def test_an_optimizer_is_made_with_the_jobs_arguments(offered: Offered) -> None:
    parameters = [torch.nn.Parameter(torch.ones(3))]
    args = {"weight_decay": 0.25, "nesterov": True}
    (group,) = optimizer_factory("fedring.train.optimizers:sgd", args, offered)(parameters, 0.1, 0.9).param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"], group["nesterov"]) == (0.1, 0.9, 0.25, True)
    args = {"beta2": 0.5, "eps": 0.1, "amsgrad": True}
    (group,) = optimizer_factory("fedring.train.optimizers:adam", args, offered)(parameters, 0.1, 0.9).param_groups
    assert (group["betas"], group["eps"], group["amsgrad"]) == ((0.9, 0.5), 0.1, True)


@pytest.mark.parametrize(
    ("name", "args", "sentence"),
    [
        ("fedring.train.optimizers:sgd", {"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
        (
            "fedring.train.optimizers:sgd",
            {"weight_decay": 1, "nesterov": True},
            "cannot be made with lr=1, momentum=0 and optimizer_args={'weight_decay': 1, 'nesterov': True}: ",
        ),
        ("user_seam:my_optimizer", {"own": 1}, "returned a int: let it return a torch.optim.Optimizer"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_refused_with_its_arguments(
    offered: Offered, name: str, args: dict[str, object], sentence: str
) -> None:
    with pytest.raises(SeamError) as caught:
        optimizer_factory(name, args, offered)([torch.nn.Parameter(torch.ones(3))], 1, 0)
    assert caught.value.reason == "bad_optimizer"
    assert sentence in str(caught.value)


@pytest.mark.parametrize("args", [{"weight_deacy": 1}, {"lr": 3}, {"parameters": []}, {"weight_decay": "1"}])
def test_arguments_that_an_optimizer_does_not_take_are_refused_before_it_is_made(
    offered: Offered, args: dict[str, object]
) -> None:
    with pytest.raises(SeamError, match=r"fedring\.train\.optimizers:sgd") as caught:
        optimizer_factory("fedring.train.optimizers:sgd", args, offered)
    assert caught.value.reason == "bad_argument"
