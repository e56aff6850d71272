"""What torch has for distributed training works over the ring, as it does over Gloo.

What test_ring_machinery.py and test_ring_compile.py try on the ring in another way is left to the soak run here.
"""

import importlib
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.system.ring_scripts import ranks
from tests.system.ring_scripts.ddp import Plan, train_or_fail
from tests.system.ring_scripts.sharding import SHARDINGS

BACKENDS = ("gloo", "fedring")


def on_both(what: str, folder: Path, /, *, size: int = 2, **arguments: Any) -> tuple[list[Any], list[Any]]:
    """Run a function of ring_scripts over Gloo and over the ring; return the results by rank of both.

    Args:
        what: The module and the function. Only the ranks import it, with the parts of torch that it needs.
        folder: Where the ranks meet.
        size: The number of ranks.
        arguments: Arguments of the function, besides the rank and the number of ranks.
    """
    body = partial(call, what, arguments)
    over_gloo, over_ring = (ranks.run(body, size, folder / backend, backend=backend) for backend in BACKENDS)
    return over_gloo, over_ring


def call(what: str, arguments: dict[str, Any], rank: int, size: int) -> Any:
    """Call a function of ring_scripts on a rank. What torch's own modules warn of is no error."""
    warnings.simplefilter("ignore")
    module, _, function = what.partition(".")
    return getattr(importlib.import_module(f"tests.system.ring_scripts.{module}"), function)(rank, size, **arguments)


def equal_on_both(what: str, folder: Path, /, *, size: int = 2, **arguments: Any) -> list[Any]:
    """Run a function as `on_both` does, check that both backends give equal numbers, and return those of the ring."""
    over_gloo, over_ring = on_both(what, folder, size=size, **arguments)
    torch.testing.assert_close(over_ring, over_gloo, rtol=1e-5, atol=1e-6)
    return over_ring


def test_fsdp1(tmp_path: Path) -> None:
    over_gloo, over_ring = on_both("sharding.train_sharded", tmp_path)
    assert over_ring[0] == over_ring[1]
    for name, sharding in SHARDINGS.items():
        tolerance = 2e-2 if sharding.bf16 else 1e-5
        wanted = torch.tensor(over_gloo[0][name])
        torch.testing.assert_close(torch.tensor(over_ring[0][name]), wanted, rtol=tolerance, atol=tolerance)


def test_fsdp2(tmp_path: Path) -> None:
    first, second = equal_on_both("sharded.fsdp2", tmp_path)
    assert first == second


def test_device_mesh_of_two_dimensions(tmp_path: Path) -> None:
    results = equal_on_both("sharded.mesh_of_two_dimensions", tmp_path, size=4)
    assert all(result == results[0] for result in results)


@pytest.mark.soak
def test_dtensor(tmp_path: Path) -> None:
    first, second = equal_on_both("sharded.dtensor", tmp_path)
    assert first == second


def test_tensor_parallel(tmp_path: Path) -> None:
    first, second = equal_on_both("sharded.tensor_parallel", tmp_path)
    assert first == second


def test_pipelining(tmp_path: Path) -> None:
    first, second = equal_on_both("sharded.pipelining", tmp_path)
    assert not first
    assert len(second) == 8  # of 4 steps, with 2 micro-batches each


@pytest.mark.parametrize(
    "asynchronous", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["save", "async_save"]
)
def test_checkpoint(tmp_path: Path, asynchronous: bool) -> None:
    equal_on_both("sharded.checkpoint", tmp_path, folder=str(tmp_path), asynchronous=asynchronous)


@pytest.mark.soak
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compile(tmp_path: Path, backend: str) -> None:
    first, second = equal_on_both("replicated.compiled", tmp_path, backend=backend)
    assert first == second


def test_join(tmp_path: Path) -> None:
    first, second = equal_on_both("replicated.joined", tmp_path)
    assert first == second


def test_zero(tmp_path: Path) -> None:
    first, second = equal_on_both("replicated.zero", tmp_path)
    assert first[: len(second)] == second


def test_zero_that_overlaps(tmp_path: Path) -> None:
    first, second = ranks.run(partial(call, "replicated.zero_that_overlaps", {}), 2, tmp_path)  # torch refuses Gloo
    assert first == second


@pytest.mark.parametrize(
    "name", ["powerSGD", *(pytest.param(name, marks=pytest.mark.soak) for name in ("fp16", "post_localSGD"))]
)
def test_hooks_of_torch(tmp_path: Path, name: str) -> None:
    equal_on_both("replicated.hook", tmp_path, name=name)


@pytest.mark.soak
def test_differentiable_collectives(tmp_path: Path) -> None:
    equal_on_both("replicated.differentiable_collectives", tmp_path)


def test_object_collectives(tmp_path: Path) -> None:
    over_gloo, over_ring = on_both("replicated.objects", tmp_path)
    assert over_ring == over_gloo


@pytest.mark.soak
def test_distributed_sampler(tmp_path: Path) -> None:
    first, second = equal_on_both("replicated.sampler", tmp_path)
    assert not set(first[-11:]) & set(second[-11:])


@pytest.mark.soak
def test_weight_averages(tmp_path: Path) -> None:
    first, second = equal_on_both("replicated.averages", tmp_path)
    assert first == second


def test_batched_power_sgd_ends_as_over_gloo(tmp_path: Path) -> None:
    """torch 2.13 has a fault: after the hook has resized the bucket, an assertion in it fails on every backend."""
    body = partial(train_or_fail, plan=Plan(hook="batched power", width=40))
    (over_ring, _), (over_gloo, _) = (ranks.run(body, 2, tmp_path / name, backend=name) for name in ("fedring", "gloo"))
    assert over_ring[0] == over_gloo[0]
    torch.testing.assert_close(torch.tensor(over_ring[1]), torch.tensor(over_gloo[1]), rtol=1e-3, atol=1e-4)
