"""Selection of the entries to send, on the host and on devices."""

import dataclasses

import pytest
import torch
from torch import Tensor

from fedring.compress import dgc_select
from fedring.compress.dgc import DGC
from fedring.compress.dgc_select import select

CONFIG = DGC()
DEVICES = [
    "cpu",
    "as if on a device",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")),
]


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the device of the entries; the code for accelerators also runs on the host."""
    if request.param == "as if on a device":
        monkeypatch.setattr(dgc_select, "_HostEntries", dgc_select._DeviceEntries)
        return "cpu"
    return str(request.param)


def normal(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def best(values: Tensor, count: int) -> Tensor:
    return values.abs().topk(count).indices.sort().values


@pytest.mark.parametrize("count", [1, 10, 200])
def test_the_selection_from_a_small_tensor_is_exact(device: str, count: int) -> None:
    values = normal(200).to(device)
    assert torch.equal(select(values, count, CONFIG), best(values, count))


@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize("resample", [True, False])
def test_the_selection_from_a_large_tensor_is_near_the_wanted_count_and_never_above(
    device: str, strided: bool, resample: bool
) -> None:
    config = dataclasses.replace(CONFIG, strided=strided, resample=resample)
    for step in range(5):
        values = normal(300_000, step).to(device)
        found = select(values, 300, config, step=step)
        assert 0.8 * 300 <= found.numel() <= 300
        assert torch.equal(found, best(values, found.numel()))  # always the largest, in rising order


def test_with_resampling_nearly_every_selection_is_exact() -> None:
    counts = [select(normal(100_000, step), 100, CONFIG, step=step).numel() for step in range(20)]
    assert counts.count(100) >= 15


def test_of_too_many_entries_the_largest_are_taken_and_not_the_first(device: str) -> None:
    values = torch.full((10_000,), 1.0, device=device)
    values[-5:] = 2.0
    for resample in (True, False):
        config = dataclasses.replace(CONFIG, resample=resample, max_iterations=0)
        found = select(values, 10, config)
        assert found.numel() == 10
        assert found[-5:].tolist() == [9995, 9996, 9997, 9998, 9999]


def test_entries_that_the_sample_missed_are_found() -> None:
    values = torch.zeros(100_000)
    values[1::2300] = 1.0  # one place in 23 is sampled, from 0 on
    found = select(values, 30, CONFIG)
    assert found.numel() == 30
    assert values[found].eq(1).all()


def test_a_threshold_that_is_far_too_high_is_lowered() -> None:
    values = normal(100_000) * 0.001
    values[::23] = 100.0  # every place that is sampled
    config = dataclasses.replace(CONFIG, resample=False, max_iterations=200)
    assert select(values, 10_000, config).numel() >= 8000
    assert select(values, 10_000, dataclasses.replace(config, max_iterations=0)).numel() < 8000


def test_zeros_are_never_sent() -> None:
    values = torch.zeros(1000)
    values[[3, 500]] = torch.tensor([1e-44, -1.0])
    assert select(values, 100, CONFIG).tolist() == [3, 500]
    assert select(torch.zeros(1000), 100, CONFIG).tolist() == []


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_are_selected_first(device: str, bad: float) -> None:
    values = normal(50_000).to(device)
    values[[7, 40_000]] = bad
    found = select(values, 50, CONFIG).tolist()
    assert {7, 40_000} <= set(found)


@pytest.mark.parametrize("strided", [True, False])
def test_the_same_step_selects_the_same_entries(strided: bool) -> None:
    config = dataclasses.replace(CONFIG, strided=strided, resample=False, max_iterations=0)
    values = normal(100_000)
    choices = [select(values, 1000, config, step=step).numel() for step in (0, *range(20))]
    assert choices[0] == choices[1]
    assert len(set(choices)) > 1  # other steps look at other places
