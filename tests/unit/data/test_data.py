"""Data sets, samples in memory, and the part of them that one client holds."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from fedring import vision
from fedring.data import (
    ClientPart,
    DataError,
    Samples,
    Scale,
    Split,
    cifar10,
    digits,
    fashion_mnist,
    load_part,
    load_split,
    mnist,
    takes_part,
)

ROOT = Path(__file__).parents[3]
DATA = Path(os.environ.get("FEDRING_TEST_DATA", ROOT.parent / "shared" / "data"))

needs_mnist = pytest.mark.skipif(
    not (DATA / "MNIST").is_dir(), reason="MNIST is missing: set FEDRING_TEST_DATA to a folder that holds MNIST/raw"
)


def stacked(samples: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Return all inputs and labels."""
    assert isinstance(samples, Samples)
    return samples.batch(torch.arange(len(samples)))


def test_digits_need_no_folder_and_are_split_evenly_by_class() -> None:
    split = digits()
    (inputs, labels), (test_inputs, test_labels) = stacked(split.train), stacked(split.test)
    assert inputs.shape == (1437, 1, 8, 8)
    assert test_inputs.shape == (360, 1, 8, 8)
    assert inputs.dtype == torch.float32
    assert torch.cat([inputs, test_inputs]).mean().abs() < 1e-4
    assert torch.cat([inputs, test_inputs]).std().sub(1).abs() < 1e-4
    assert set(torch.bincount(test_labels).tolist()) <= {35, 36, 37}
    assert split.classes == len(set(labels.tolist())) == 10


def test_digits_are_the_same_every_time() -> None:
    assert torch.equal(stacked(digits().test)[0], stacked(digits(None, True).test)[0])


@needs_mnist
def test_mnist_is_stored_as_bytes_and_returned_normalised() -> None:
    split = mnist(DATA)
    assert isinstance(split.train, Samples)
    assert split.train.inputs.dtype == torch.uint8
    assert len(split.train) == 60_000
    inputs, labels = stacked(split.test)
    assert inputs.shape == (10_000, 1, 28, 28)
    assert inputs.dtype == torch.float32
    assert labels.bincount().tolist()[:3] == [980, 1135, 1032]
    inputs, _ = split.train.batch(torch.randperm(60_000, generator=torch.Generator().manual_seed(0))[:20_000])
    assert inputs.mean().abs() < 0.01
    assert inputs.std().sub(1).abs() < 0.01


@pytest.mark.parametrize("load", [mnist, fashion_mnist, cifar10])
def test_an_error_about_missing_data_says_what_to_do(load: Callable[..., Split], tmp_path: Path) -> None:
    for root in (None, tmp_path):
        with pytest.raises(DataError, match="set data_root to the folder that holds it") as caught:
            load(root)
        assert caught.value.reason == "no_data"
    assert not any(tmp_path.iterdir())


@pytest.mark.programs
def test_torchvision_is_not_imported_before_it_is_needed() -> None:
    code = "import sys, fedring.data; sys.exit(bool({'sklearn', 'torchvision'} & set(sys.modules)))"
    env = {"PYTHONPATH": str(ROOT / "common")}
    assert subprocess.run([sys.executable, "-c", code], env=env, check=False).returncode == 0


def test_torchvision_loads_with_and_without_its_compiled_part() -> None:
    torchvision = vision.load()
    assert vision.load() is torchvision
    assert hasattr(torch.ops.torchvision, "nms")
    assert torchvision.models.resnet18(weights=None).fc.out_features == 1000


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_a_batch_equals_its_samples_read_one_by_one(dtype: torch.dtype) -> None:
    scale = Scale(torch.tensor([100.0]).view(1, 1, 1), torch.tensor([50.0]).view(1, 1, 1))
    samples = Samples(torch.arange(0, 240, 10, dtype=dtype).view(6, 1, 2, 2), torch.arange(6), scale)
    inputs, labels = samples.batch(torch.tensor([4, 1]))
    assert inputs[0].flatten().tolist() == pytest.approx([1.2, 1.4, 1.6, 1.8])
    assert labels.tolist() == [4, 1]
    for place, index in enumerate((4, 1)):
        assert torch.equal(samples[index][0], inputs[place])
        assert torch.equal(samples[index][0], inputs[place])  # what is kept has not changed
    loaded, _ = next(iter(DataLoader(samples, batch_sampler=[[4, 1]])))
    assert torch.equal(loaded, inputs)


def test_a_subset_does_not_keep_the_other_samples_in_memory() -> None:
    samples = Samples(torch.arange(1000.0).view(1000, 1), torch.arange(1000))
    subset = samples.subset(np.array([5, 3]))
    assert subset.labels.tolist() == [5, 3]
    assert subset.inputs.untyped_storage().nbytes() == 8


def test_inputs_without_labels_are_refused() -> None:
    with pytest.raises(DataError):
        Samples(torch.zeros(3, 1), torch.zeros(2))


@pytest.mark.parametrize("partition", ["iid", "shards", "dirichlet"])
def test_the_parts_of_all_clients_make_up_the_whole_data_set(partition: str) -> None:
    whole = digits()
    parts = [load_part(whole, partition, index=i, count=3, alpha=0.3, seed=5) for i in range(3)]
    for name in ("train", "test"):
        inputs = torch.cat([stacked(getattr(part, name))[0] for part in parts])
        expected = stacked(getattr(whole, name))[0]
        assert sorted(inputs.sum((1, 2, 3)).tolist()) == sorted(expected.sum((1, 2, 3)).tolist())
    assert [len(stacked(part.test)[1]) for part in parts] == [120, 120, 120]
    assert parts[0].classes == 10


def test_without_a_partition_a_client_keeps_all_samples() -> None:
    part = load_part(digits(), "none", index=2, count=3, alpha=1.0, seed=0)
    assert (len(stacked(part.train)[1]), len(stacked(part.test)[1])) == (1437, 360)


def test_any_map_style_dataset_can_be_divided() -> None:
    whole = TensorDataset(torch.arange(10), torch.arange(10))
    parts = [load_part(Split(whole, whole, 10), "iid", index=i, count=2, alpha=1.0, seed=0) for i in range(2)]
    held = [int(part.train[i][0]) for part in parts for i in range(5)]
    assert sorted(held) == list(range(10))
    unlabelled = Unlabelled()
    with pytest.raises(DataError) as caught:
        load_part(Split(unlabelled, unlabelled, 10), "shards", index=0, count=2, alpha=1.0, seed=0)
    assert caught.value.reason == "no_labels"


class Unlabelled(Dataset[Tensor]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Tensor:
        return torch.zeros(1)


@pytest.mark.parametrize("partition", ["shards", "dirichlet"])
def test_the_last_tensor_of_a_tensor_dataset_are_its_labels(partition: str) -> None:
    labels = torch.arange(100) % 10
    whole, same = TensorDataset(torch.randn(100, 3), labels), Samples(torch.zeros(100, 3), labels)
    for index in range(3):
        mine, theirs = (
            load_part(Split(each, each, 10), partition, index=index, count=3, alpha=0.3, seed=5).train
            for each in (whole, same)
        )
        assert [int(mine[i][-1]) for i in range(len(mine))] == stacked(theirs)[1].tolist()  # type: ignore[arg-type]


@pytest.mark.parametrize("last", [torch.rand(4), torch.zeros(4, 2, dtype=torch.int64)])
def test_a_last_tensor_that_cannot_be_labels_is_refused(last: Tensor) -> None:
    whole = TensorDataset(torch.rand(4, 3), last)
    with pytest.raises(DataError, match="let the last tensor of the TensorDataset be whole numbers"):
        load_part(Split(whole, whole, 2), "dirichlet", index=0, count=2, alpha=1.0, seed=0)


def test_a_data_function_is_given_its_part_only_if_it_declares_it() -> None:
    seen: list[object] = []

    def plain(root: Path | None, download: bool) -> Split:
        seen.append((root, download))
        return digits()

    def divided(root: Path | None, download: bool, part: ClientPart) -> Split:
        seen.append(part)
        return digits()

    load_split(plain, None, True, ClientPart(1, 3, "ann"))
    load_split(divided, None, False, ClientPart(1, 3, "ann"))
    load_split(divided, None, False)
    assert seen == [(None, True), ClientPart(1, 3, "ann"), ClientPart(0, 1, "")]
    assert [takes_part(each) for each in (plain, divided, dict)] == [False, True, False]


@pytest.mark.parametrize(("partition", "index", "reason"), [("iid", 2, "bad_part"), ("random", 0, "bad_partition")])
def test_a_part_that_does_not_exist_is_refused(partition: str, index: int, reason: str) -> None:
    with pytest.raises(DataError) as caught:
        load_part(digits(), partition, index=index, count=2, alpha=1.0, seed=0)
    assert caught.value.reason == reason
