"""Which entries are sent."""

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
    """Where the entries are; what an accelerator does is also done on the host, where there is none."""
    if request.param == "as if on a device":
        monkeypatch.setattr(dgc_select, "_HostEntries", dgc_select._DeviceEntries)
        return "cpu"
    return str(request.param)


def normal(size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def best(values: Tensor, count: int) -> Tensor:
    return values.abs().topk(count).indices.sort().values


@pytest.mark.parametrize("count", [1, 10, 200])
def test_a_small_tensors_largest_magnitudes_are_found_exactly(device: str, count: int) -> None:
    values = normal(200).to(device)
    assert torch.equal(select(values, count, CONFIG), best(values, count))


@pytest.mark.parametrize("strided", [True, False])
@pytest.mark.parametrize("resample", [True, False])
def test_a_large_tensors_selection_is_near_and_never_above_the_wanted_count(
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


def test_what_is_too_many_is_cut_to_the_largest_and_not_to_the_first(device: str) -> None:
    values = torch.full((10_000,), 1.0, device=device)
    values[-5:] = 2.0
    for resample in (True, False):
        config = dataclasses.replace(CONFIG, resample=resample, max_iterations=0)
        found = select(values, 10, config)
        assert found.numel() == 10
        assert found[-5:].tolist() == [9995, 9996, 9997, 9998, 9999]


def test_a_sample_that_missed_everything_is_made_up_for() -> None:
    values = torch.zeros(100_000)
    values[1::2300] = 1.0  # one place in 23 is sampled, from 0 on
    found = select(values, 30, CONFIG)
    assert found.numel() == 30
    assert values[found].eq(1).all()


def test_a_threshold_far_too_high_is_lowered() -> None:
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
def test_what_is_not_finite_is_selected_first(device: str, bad: float) -> None:
    values = normal(50_000).to(device)
    values[[7, 40_000]] = bad
    found = select(values, 50, CONFIG).tolist()
    assert {7, 40_000} <= set(found)


@pytest.mark.parametrize("strided", [True, False])
def test_the_same_step_selects_the_same(strided: bool) -> None:
    config = dataclasses.replace(CONFIG, strided=strided, resample=False, max_iterations=0)
    values = normal(100_000)
    choices = [select(values, 1000, config, step=step).numel() for step in (0, *range(20))]
    assert choices[0] == choices[1]
    assert len(set(choices)) > 1  # other steps look at other places
