"""What a job can name as "module:attribute", the models that come with fedring, devices and threads."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedring.train.device import pick_device, threads_for
from fedring.train.errors import SeamError
from fedring.train.models import cifar_cnn, digits_mlp, mnist_cnn, vector
from fedring.train.seam import build_model, optimizer_factory, resolve

TRUSTED = ["fedring", "torchvision", "user_seam", "user_broken"]


@pytest.fixture(autouse=True)
def _user_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "fixtures_user_code"))


def refusal(name: str, trusted: list[str] = TRUSTED) -> SeamError:
    with pytest.raises(SeamError) as caught:
        resolve(name, trusted)
    return caught.value


def test_a_name_below_a_trusted_module_is_imported() -> None:
    assert resolve("fedring.train.models:mnist_cnn", ["fedring.train"]) is mnist_cnn
    assert resolve("user_seam:linear", ["user_seam"])(2, 1)(torch.zeros(1, 2)).shape == (1, 1)


def test_a_module_whose_name_only_starts_like_a_trusted_one_is_refused() -> None:
    error = refusal("user_seam:linear", ["user_sea"])
    assert error.reason == "not_trusted"
    assert "user_seam" in str(error)
    assert "start it with trusted='" in str(error)


def test_an_untrusted_module_is_not_even_imported() -> None:
    assert refusal("antigravity:fly", ["fedring"]).reason == "not_trusted"
    assert "antigravity" not in sys.modules


def test_nothing_is_trusted_by_default() -> None:
    assert refusal("fedring.train.models:mnist_cnn", []).reason == "not_trusted"


def test_a_job_cannot_reach_what_a_trusted_module_imported() -> None:
    error = refusal("user_seam:run")
    assert error.reason == "not_trusted"
    assert "subprocess" in str(error)


@pytest.mark.parametrize(
    "name", ["", "user_seam", "user_seam:", ":linear", "user_seam:a.b", "user seam:x", "..x:y", "a:b:c"]
)
def test_a_name_that_is_not_module_and_attribute_is_refused(name: str) -> None:
    assert refusal(name).reason == "bad_name"


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("resnet18", "torchvision:resnet18"),
        ("digits_mlp", "fedring.train.models:digits_mlp"),
        ("mnist", "fedring.data:mnist"),
        ("cross_entropy", "fedring.train.losses:cross_entropy"),
    ],
)
def test_a_name_without_its_module_is_completed(name: str, whole: str) -> None:
    assert str(refusal(name)).endswith(f"is not of the form module:attribute: did you mean {whole}?")


def test_only_a_name_that_is_near_is_suggested() -> None:
    assert str(refusal("torchvision:resnet81")).endswith("did you mean torchvision:resnet18?")
    assert str(refusal("torchvision:transformer")).endswith("correct the name.")


def test_a_missing_module_is_named() -> None:
    error = refusal("fedring.nothing:model")
    assert error.reason == "no_module"
    assert "fedring.nothing" in str(error)


def test_an_error_names_the_missing_module_and_the_one_that_needs_it() -> None:
    error = refusal("user_broken:model")
    assert error.reason == "no_module"
    assert "a_module_that_is_not_installed" in str(error)
    assert "user_broken:model" in str(error)


def test_the_nearest_attribute_is_suggested() -> None:
    error = refusal("fedring.train.models:mnist_cn")
    assert error.reason == "no_attribute"
    assert "did you mean fedring.train.models:mnist_cnn?" in str(error)


def test_a_private_attribute_cannot_be_named() -> None:
    assert refusal("user_seam:_private").reason == "no_attribute"


def test_an_attribute_that_cannot_be_called_is_refused() -> None:
    error = refusal("torch:nn", ["torch"])
    assert error.reason == "not_callable"
    assert "torch:nn is a module" in str(error)


def test_the_same_seed_builds_the_same_model_and_leaves_the_global_generator_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (build_model("user_seam:linear", {"inputs": 5}, seed, TRUSTED) for seed in (7, 7, 8))
    assert torch.equal(torch.get_rng_state(), before)
    weights = [next(model.parameters()) for model in (first, again, other)]
    assert weights[0].shape == (3, 5)
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])


@pytest.mark.parametrize(("name", "args"), [("user_seam:linear", {"width": 3}), ("user_seam:not_a_model", {})])
def test_a_model_that_cannot_be_built_is_named(name: str, args: dict[str, int]) -> None:
    with pytest.raises(SeamError, match=name) as caught:
        build_model(name, args, 0, TRUSTED)
    assert caught.value.reason == "no_model"


def test_a_torchvision_model_is_named_as_torchvision_names_it() -> None:
    model = build_model("torchvision:resnet18", {"num_classes": 10}, 0, TRUSTED)
    assert sum(p.numel() for p in model.parameters()) == 11_181_642
    assert refusal("torchvision:resnet18", ["fedring"]).reason == "not_trusted"
    assert "torchvision:resnet18?" in str(refusal("torchvision:resnet_18"))


def test_a_job_cannot_make_a_client_download_weights() -> None:
    with pytest.raises(SeamError, match="weights"):
        build_model("torchvision:resnet18", {"weights": "DEFAULT"}, 0, TRUSTED)


def test_the_models_have_the_sizes_that_their_docstrings_say() -> None:
    sizes = [sum(p.numel() for p in m.parameters()) for m in (mnist_cnn(), cifar_cnn(), digits_mlp(), vector(12))]
    assert sizes == [1_199_882, 356_810, 4_810, 12]
    assert mnist_cnn()(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
    assert cifar_cnn()(torch.zeros(2, 3, 32, 32)).shape == (2, 10)
    assert digits_mlp()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.programs
def test_reading_a_job_does_not_import_torch() -> None:
    code = "import sys, fedring.train.job; sys.exit('torch' in sys.modules)"
    path = str(Path(__file__).parents[2] / "common")
    assert subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, check=False).returncode == 0


def test_devices_are_checked_before_they_are_used() -> None:
    assert pick_device("cpu") == torch.device("cpu")
    assert pick_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
    for name in ("gpu", "cuda:", "cuda:99", "cpu:0", ""):
        with pytest.raises(SeamError) as caught:
            pick_device(name)
        assert caught.value.reason == "no_device"


def test_clients_on_one_host_share_its_cores() -> None:
    assert threads_for(1) >= threads_for(2) >= threads_for(10_000) == 1


def test_an_optimizer_is_made_with_the_jobs_arguments() -> None:
    parameters = [torch.nn.Parameter(torch.ones(3))]
    args = {"weight_decay": 0.25, "nesterov": True}
    (group,) = optimizer_factory("fedring.train.optimizers:sgd", args, TRUSTED)(parameters, 0.1, 0.9).param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"], group["nesterov"]) == (0.1, 0.9, 0.25, True)
    args = {"beta2": 0.5, "eps": 0.1, "amsgrad": True}
    (group,) = optimizer_factory("fedring.train.optimizers:adam", args, TRUSTED)(parameters, 0.1, 0.9).param_groups
    assert (group["betas"], group["eps"], group["amsgrad"]) == ((0.9, 0.5), 0.1, True)


@pytest.mark.parametrize(
    ("name", "args", "sentence"),
    [
        ("fedring.train.optimizers:sgd", {"weight_deacy": 1}, "momentum=0.9 and optimizer_args={'weight_deacy': 1}: "),
        ("fedring.train.optimizers:sgd", {"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
        ("user_seam:my_optimizer", {"own": 1}, "returned a int: let it return a torch.optim.Optimizer"),
    ],
)
def test_an_optimizer_that_cannot_be_made_is_refused_with_its_arguments(
    name: str, args: dict[str, object], sentence: str
) -> None:
    with pytest.raises(SeamError) as caught:
        optimizer_factory(name, args, TRUSTED)([torch.nn.Parameter(torch.ones(3))], 1, 0.9)
    assert caught.value.reason == "bad_optimizer"
    assert sentence in str(caught.value)
