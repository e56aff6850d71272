"""Checkpoints of workers: what they hold, which files can be used, and from which one a group goes on."""

import errno
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.unit.group_member import Estimating, Slowing
from torch import nn

from fedring.client.group.checkpoints import JobCheckpoints
from fedring.train.errors import TrainError
from fedring.workers import replica_checkpoints
from fedring.workers.optimizer_groups import read_groups
from fedring.workers.replica import Progress, Replica, read_layout
from fedring.workers.replica_checkpoints import BadCheckpoint, CannotKeep, ReplicaCheckpoints, decode, encode
from fedring.workers.resume import Resumption, choose, replica_content, restore_replica

JOB = "run 0 1"
CONTENT: dict[str, Any] = {
    "tensors": [torch.arange(3), torch.zeros(0, 2, dtype=torch.bfloat16), torch.tensor(1.5)],
    "plain": {"a": None, "b": [1, True, 2.5, "text", []], "c/d": {}},
}


@pytest.fixture
def folder(tmp_path: Path) -> ReplicaCheckpoints:
    return ReplicaCheckpoints(tmp_path / "checkpoints", JOB)


def same(one: Any, other: Any) -> bool:
    """Compare two contents."""
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(same(one[k], other[k]) for k in one)
    if isinstance(one, list):
        return isinstance(other, list) and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


def test_a_checkpoint_is_read_as_it_was_written(folder: ReplicaCheckpoints) -> None:
    folder.write(7, CONTENT)
    assert same(folder.read(7), CONTENT)
    assert folder.bytes_written == (folder.folder / "step-7.safetensors").stat().st_size


def test_tensors_that_share_memory_are_kept_each(folder: ReplicaCheckpoints) -> None:
    whole = torch.arange(6.0)
    content = {"whole": whole, "again": whole, "rows": list(whole.view(2, 3)), "column": whole.view(2, 3)[:, 1]}
    folder.write(1, content)
    assert same(folder.read(1), content)


@pytest.mark.parametrize(
    ("content", "clause"),
    [
        ({"a": {"b": object()}}, "a/b is a object, which is neither a tensor nor a plain value"),
        ({"a": {3: 1}}, "a has the key 3, which is no text"),
        ({"a": {"state": {0: torch.ones(1), 1: 2}}}, "a/state has the key 0, which is no text"),
    ],
)
def test_what_cannot_be_kept_is_named(content: dict[str, Any], clause: str) -> None:
    with pytest.raises(CannotKeep, match=clause):
        encode(content, JOB)


def test_the_two_newest_checkpoints_are_kept(folder: ReplicaCheckpoints) -> None:
    for step in (5, 10, 15):
        folder.write(step, {})
    assert folder.steps() == [15, 10]
    folder.drop_after(12)
    assert folder.steps() == [10]


def _flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def _cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def _change_content(path: Path) -> None:
    tensors, metadata = encode(CONTENT, JOB)
    changed = {**json.loads(metadata["content"]), "more": 1}
    save_file(tensors, path, metadata={**metadata, "content": json.dumps(changed)})


@pytest.mark.parametrize("damage", [_flip_a_bit, _cut, _change_content, lambda path: path.write_bytes(b"")])
def test_a_damaged_checkpoint_is_deleted(
    folder: ReplicaCheckpoints, damage: Any, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write(5, CONTENT)
    folder.write(10, CONTENT)
    damage(folder.folder / "step-10.safetensors")
    assert folder.steps() == [5]
    assert "step-10.safetensors is deleted: it" in caplog.text
    assert [path.name for path in folder.folder.iterdir()] == ["step-5.safetensors"]


def test_files_that_are_not_complete_or_of_another_job_are_deleted(folder: ReplicaCheckpoints) -> None:
    ReplicaCheckpoints(folder.folder, "run 0 2").write(5, CONTENT)
    (folder.folder / "job").mkdir()  # of a pipeline
    (folder.folder / "job" / "5.7.0.safetensors").touch()
    (folder.folder / "step-6.part").write_bytes(b"half")
    assert folder.steps() == []
    assert list(folder.folder.iterdir()) == []


def test_a_checkpoint_that_was_deleted_is_not_offered_any_more(folder: ReplicaCheckpoints) -> None:
    for step in (20, 40):
        folder.write(step, CONTENT)
    checkpoints = JobCheckpoints(folder.folder, JOB)
    assert checkpoints.steps == [40, 20]
    checkpoints.drop_after(20)
    assert checkpoints.steps == [20]


def test_a_checkpoint_of_another_version_is_refused() -> None:
    tensors, metadata = encode(CONTENT, JOB)
    with pytest.raises(BadCheckpoint, match="it is of version '2', not '1'"):
        decode(tensors, {**metadata, "version": "2"}, JOB)


def test_training_goes_on_if_the_disk_is_full(
    folder: ReplicaCheckpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write(5, CONTENT)

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(replica_checkpoints, "sync", full)
    folder.write(10, CONTENT)
    assert "the checkpoint of step 10 was not written: [Errno 28] No space left on device" in caplog.text
    assert [path.name for path in folder.folder.iterdir()] == ["step-5.safetensors"]


def test_a_disk_that_refuses_even_to_remove_what_was_begun_costs_only_the_checkpoint(
    folder: ReplicaCheckpoints, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder.write(5, CONTENT)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(replica_checkpoints, "sync", refuse)
    monkeypatch.setattr(Path, "unlink", refuse)
    folder.write(10, CONTENT)
    assert "the checkpoint of step 10 was not written: [Errno 30] Read-only file system" in caplog.text
    assert folder.read(5)


def test_nothing_is_unpickled(folder: ReplicaCheckpoints) -> None:
    folder.write(5, CONTENT)
    assert len(load_file(folder.folder / "step-5.safetensors")) == len(CONTENT["tensors"])


@pytest.mark.parametrize(
    ("workers", "found"),
    [
        ([(-1, []), (-1, [])], None),
        ([(-1, [20, 10]), (-1, [20, 10])], Resumption(20, on_all=True)),
        ([(-1, [20, 10]), (-1, [10])], Resumption(10, on_all=True)),
        ([(-1, [20, 10]), (-1, [])], Resumption(20, on_all=False)),
        ([(-1, [10]), (-1, [30, 20])], Resumption(30, on_all=False)),
        ([(-1, [20, 10]), (25, [])], None),
        ([(-1, [20, 10]), (20, [20, 10])], None),
        ([(-1, [30, 20]), (12, [10])], Resumption(30, on_all=False)),  # that worker had left the group
        ([(0, []), (-1, [])], None),
    ],
)
def test_a_group_goes_on_from_the_newest_checkpoint_that_all_have_unless_memory_is_newer(
    workers: list[tuple[int, list[int]]], found: Resumption | None
) -> None:
    assert choose(workers) == found


def trained(steps: int, optimizer: Any) -> Replica:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    replica = Replica(model, optimizer(model.parameters(), lr=0.1))
    train(replica, steps)
    replica.progress = Progress(steps=steps, round_steps=2, epoch=1, taken=5)
    return replica


def train(replica: Replica, steps: int) -> None:
    for seed in range(steps):
        replica.optimizer.zero_grad()
        inputs = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        replica.model(inputs).square().sum().backward()
        replica.optimizer.step()


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad, Slowing, Estimating])
def test_a_replica_goes_on_bit_for_bit(folder: ReplicaCheckpoints, optimizer: Any) -> None:
    replica, again = trained(4, optimizer), trained(0, optimizer)
    folder.write(4, replica_content(replica))
    restore_replica(again, folder.read(4), same_round=True)
    assert again.progress == Progress(steps=4, round_steps=2, epoch=1, taken=5)
    for one in (replica, again):
        train(one, 3)
    assert replica.digest() == again.digest()


def test_a_checkpoint_of_1_0_0_has_no_values_of_groups(folder: ReplicaCheckpoints) -> None:
    replica, again = trained(4, torch.optim.Adam), trained(0, torch.optim.Adam)
    content = {key: value for key, value in replica_content(replica).items() if "group" not in key}
    folder.write(4, content)
    restore_replica(again, folder.read(4), same_round=True)
    assert replica.digest() == again.digest()


@pytest.mark.parametrize("told", [[], [{}, {}], {}, "text", [{"params": 1}], [{"lr": 1.0}], [{"betas": [1.0]}], [[]]])
def test_values_that_groups_of_parameters_cannot_have_are_refused(told: Any) -> None:
    with pytest.raises(ValueError, match="group"):
        read_groups(told, 1)
    with pytest.raises(TrainError) as caught:
        read_layout(json.dumps([{}, {"groups": told}]), [torch.zeros(1)])
    assert caught.value.reason == "bad_optimizer"


def described(shape: Any, dtype: str = "float32") -> dict[str, Any]:
    return {"seen": {"shape": shape, "dtype": dtype, "cpu": True}}


@pytest.mark.parametrize(
    "told",
    [
        [],
        [{}, {}],
        {},
        "text",
        [[]],
        [described([7])],
        [described([-1])],
        [described([1 << 40, 1 << 40])],
        [described([1], "complex1")],
        [{"lr": described([1])["seen"]}],
        [{"seen": {"value": 1}}],
        [{str(number): described([1])["seen"] for number in range(17)}],
    ],
)
def test_tensors_that_groups_of_parameters_cannot_have_are_refused(told: Any) -> None:
    with pytest.raises(TrainError) as caught:
        read_layout(json.dumps([{}, {"tensors": told}]), [torch.zeros(6)])
    assert caught.value.reason == "bad_optimizer"


@pytest.mark.parametrize("told", [[{}, {}], {"a": 1}, [[]], [{"lr": torch.ones(1)}], [{"seen": 1.0}]])
def test_a_checkpoint_with_other_tensors_in_groups_is_refused(told: Any) -> None:
    replica, again = trained(4, Estimating), trained(0, Estimating)
    with pytest.raises(ValueError, match="tensors"):
        restore_replica(again, replica_content(replica) | {"group_tensors": told}, same_round=True)


def test_replicas_that_differ_in_the_tensors_of_groups_are_not_equal() -> None:
    one, other = (trained(0, Estimating) for _ in range(2))
    assert one.full_digest() == other.full_digest()
    other.optimizer.param_groups[0]["seen"] = torch.ones(2)
    assert one.full_digest() != other.full_digest()


def test_only_values_that_an_optimizer_has_changed_are_sent() -> None:
    """Workers of 1.0.0 refuse a layout with more."""
    assert trained(2, torch.optim.Adam).groups == []
    assert [group["taken"] for group in trained(2, Slowing).groups] == [2]


def test_in_another_round_the_model_is_the_servers(folder: ReplicaCheckpoints) -> None:
    replica, again = trained(4, torch.optim.Adam), trained(0, torch.optim.Adam)
    before = again.digest()
    folder.write(4, replica_content(replica))
    restore_replica(again, folder.read(4), same_round=False)
    assert again.digest() == before
    assert again.progress == Progress(steps=4)
    assert len(again.optimizer.state) == len(replica.optimizer.state) == 6


def test_the_checkpoint_of_another_model_is_refused(folder: ReplicaCheckpoints) -> None:
    folder.write(4, replica_content(trained(1, torch.optim.SGD)))
    other = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5), nn.Linear(5, 2))
    with pytest.raises(ValueError, match=r"0\.weight is \[4, 3\] in the checkpoint and \[5, 3\] here"):
        restore_replica(Replica(other, torch.optim.SGD(other.parameters(), 0.1)), folder.read(4), same_round=True)


def test_the_cost_of_a_checkpoint_is_that_of_its_tensors(folder: ReplicaCheckpoints, caplog: Any) -> None:
    caplog.set_level(logging.DEBUG)
    model = nn.Linear(1000, 100)
    folder.write(1, {"model": dict(model.state_dict())})
    assert folder.bytes_written == pytest.approx(4 * 100_100, rel=0.01)
    assert "has 40" in caplog.text
