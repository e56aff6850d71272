"""Checkpoints of a pipeline: who keeps which files, and which checkpoint a group continues from."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from tests.unit.group_member import Estimating, Slowing
from torch import nn

from fedring.offers import named
from fedring.train.errors import SeamError, TrainError
from fedring.train.jobs.pipeline_table import Pipeline
from fedring.train.names.offered import Offered, collect
from fedring.train.optimizers import adam, sgd
from fedring.train.plan import Plan
from fedring.workers.replica import Progress
from fedring.workers.stage_checkpoints import Checkpoint, Held, Layout, StageCheckpoints, missing, newest_complete
from fedring.workers.stage_state import CheckpointFacts, StagedModel, StageState, read_facts
from fedring.workers.state_file import write_tensors

PLAN = Plan(epochs=1, batch_size=4, lr=0.1, momentum=0.0)
FACTS = CheckpointFacts(3, "blake3-base", Progress(7, 5, 1, 20), 40, (2, 3))


def held(*files: tuple[int, int], group: int = 7) -> Held:
    """Return the files of these steps and stages, which a group has written."""
    return frozenset((Checkpoint(step, group), stage) for step, stage in files)


def test_two_workers_keep_each_stage() -> None:
    layout = Layout(stages=4, width=4)
    assert [layout.kept_by(rank) for rank in range(4)] == [{0, 3}, {0, 1}, {1, 2}, {2, 3}]
    shared = Layout(stages=4, width=2)
    assert [shared.stages_of(rank) for rank in range(2)] == [[0, 2], [1, 3]]
    assert [shared.kept_by(rank) for rank in range(2)] == [{0, 1, 2, 3}] * 2
    replicated = Layout(stages=2, width=2, pipelines=2)
    assert [replicated.kept_by(rank) for rank in range(4)] == [{0}, {1}, {0}, {1}]
    assert Layout(stages=1, width=1).kept_by(0) == {0}
    assert [Layout(1, 1).deliverers, layout.deliverers] == [[0], [0, 1]]


def test_the_fastest_number_of_micro_batches_is_kept_for_the_settings_it_was_measured_with(tmp_path: Path) -> None:
    settings = f"64 {Pipeline.model_validate({'micro_batches': 'auto'}).model_dump_json()}"
    kept = StageCheckpoints(tmp_path, "job", max_file_bytes=1)
    assert kept.fastest(settings) == 0
    kept.note_fastest(8, settings)
    kept.keep(None, ())  # a damaged checkpoint takes no measurement with it
    again = StageCheckpoints(tmp_path, "job", max_file_bytes=1)
    assert again.fastest(settings) == 8
    assert again.fastest(settings.replace("64 ", "32 ", 1)) == 0
    (tmp_path / "job" / "fastest").write_text(f"8 {settings}"[:-1])  # the process was killed as it wrote
    assert again.fastest(settings) == 0


def test_a_group_continues_from_the_newest_step_of_which_all_stages_are_there() -> None:
    assert newest_complete([held(), held()], 2) is None
    assert newest_complete([held((10, 0)), held((10, 1))], 2) == (10, 7)
    # Step 20 was being made when the workers were killed.
    assert newest_complete([held((10, 0), (20, 0)), held((10, 1))], 2) == (10, 7)
    assert newest_complete([held((10, 0), (20, 0), (20, 1)), held((10, 1))], 2) == (20, 7)
    assert newest_complete([held((10, 0)), held()], 2) is None


def test_files_that_two_groups_have_written_after_the_same_step_are_no_checkpoint() -> None:
    """A worker was lost after it had written step 20, and the others continued from step 10 without it."""
    returned, other = held((20, 1)), held((20, 0), group=8)
    assert newest_complete([returned, other], 2) is None
    everyone = [returned, other | held((20, 1), group=8)]
    assert newest_complete(everyone, 2) == (20, 8)
    assert list(missing(everyone, Layout(2, 2), Checkpoint(20, 8))) == [(0, 1, 0), (1, 1, 0)]


def test_a_worker_that_comes_without_files_gets_its_own_stage_and_its_neighbours() -> None:
    layout = Layout(stages=3, width=3)
    everyone = [held((5, 0), (5, 2)), held(), held((5, 1), (5, 2))]
    assert list(missing(everyone, layout, Checkpoint(5, 7))) == [(0, 0, 1), (1, 2, 1)]
    full = [held((5, 0), (5, 2)), held((5, 0), (5, 1)), held((5, 1), (5, 2))]
    assert not list(missing(full, layout, Checkpoint(5, 7)))


def test_a_folder_knows_what_is_complete(tmp_path: Path) -> None:
    folder = StageCheckpoints(tmp_path / "checkpoints", "job-a", max_file_bytes=1)
    assert (folder.held(), folder.steps) == (frozenset(), 0)
    files = held((10, 0), (10, 1), (20, 0))
    for file in files:
        write_tensors(folder.path(*file), {}, {})
    old, new = Checkpoint(10, 7), Checkpoint(20, 7)
    folder.path(new, 1).with_name("20.7.1.safetensors.part").touch()
    assert folder.held() == files
    assert folder.steps == 0  # because another worker may have written nothing of these
    folder.keep(old, {0, 1})
    assert (folder.held(), folder.steps) == (held((10, 0), (10, 1)), 10)
    write_tensors(folder.path(new, 0), {}, {})
    assert folder.steps == 10  # because 20 may be incomplete
    folder.note_result(new, "blake3-x")
    again = StageCheckpoints(tmp_path / "checkpoints", "job-a", max_file_bytes=1)
    assert not list((tmp_path / "checkpoints" / "job-a").glob("*.part"))
    assert again.steps == 10
    known = [again.is_result(one, "blake3-x") for one in (new, old, Checkpoint(20, 8))]
    assert known == [True, False, False]
    again.keep(new, {0})
    assert again.held() == held((20, 0))
    assert again.steps == 20


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"", lambda data: data[:-2] + b"\1" + data[-1:]]
)
def test_a_damaged_file_is_no_part_of_a_checkpoint(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    folder = StageCheckpoints(tmp_path, "job", max_file_bytes=1)
    files = held((10, 0), (10, 1))
    for file in files:
        write_tensors(folder.path(*file), {"weight": torch.zeros(3)}, {})
    path = folder.path(Checkpoint(10, 7), 1)
    damaged = damage(path.read_bytes())
    path.write_bytes(damaged)
    assert StageCheckpoints(tmp_path, "job", max_file_bytes=1).held() == held((10, 0))
    assert "10.7.1.safetensors is deleted" in caplog.text
    path.write_bytes(damaged)
    with pytest.raises(TrainError, match="was damaged, and deleted") as caught:
        folder.check(Checkpoint(10, 7), 1)
    assert (caught.value.reason, folder.held()) == ("bad_checkpoint", held((10, 0)))
    folder.check(Checkpoint(10, 7), 0)


class Normed(nn.Sequential):
    """A model whose second stage has buffers, and with a parameter that no stage uses."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4))


def staged() -> StagedModel:
    with torch.device("meta"):
        model = Normed()
    return StagedModel(model, Pipeline.model_validate({"cut": [1, 2]}), [], Offered())


def filled(number: int) -> StageState:
    state = staged().make(number, PLAN, adam, torch.device("cpu"))
    with torch.no_grad():
        for position, tensor in enumerate(state.tensors.values()):
            tensor.fill_(position + 1)
    return state


def test_a_stage_has_room_for_its_own_tensors_only() -> None:
    model = staged()
    assert {name for name, stage in model.stage_of.items() if stage == 0} == {"0.weight", "0.bias"}
    state = model.make(1, PLAN, sgd, torch.device("cpu"))
    assert set(state.tensors) == {name for name, stage in model.stage_of.items() if stage == 1}
    assert not any(tensor.is_meta for tensor in state.module.state_dict().values())
    assert all(tensor.is_meta for tensor in model.stages[1].state_dict().values())


def test_a_stage_takes_nothing_from_a_damaged_file(tmp_path: Path) -> None:
    filled(1).save(tmp_path / "file", FACTS)
    data = bytearray((tmp_path / "file").read_bytes())
    data[-1] ^= 1  # the value stays finite
    (tmp_path / "file").write_bytes(data)
    other = filled(1)
    before = {name: tensor.clone() for name, tensor in other.tensors.items()}
    with pytest.raises(TrainError, match="does not hold what was written to it") as caught:
        other.load(tmp_path / "file")
    assert caught.value.reason == "bad_checkpoint"
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.tensors.items())


def test_a_stage_and_its_optimizer_come_back_from_a_file(tmp_path: Path) -> None:
    state = filled(1)
    state.module(torch.randn(3, 4)).sum().backward()
    state.optimizer.step()
    state.save(tmp_path / "file", FACTS)
    other = staged().make(1, PLAN, adam, torch.device("cpu"))
    other.load(tmp_path / "file")
    assert read_facts(tmp_path / "file") == FACTS
    for name, tensor in state.tensors.items():
        assert torch.equal(other.tensors[name], tensor)
    ours, theirs = state.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for number, values in ours.items():
        assert all(torch.equal(values[key], theirs[number][key]) for key in values)


def test_what_an_optimizer_keeps_in_its_groups_comes_back_too(tmp_path: Path) -> None:
    one, other = (
        staged().make(0, PLAN, lambda parameters, lr, momentum: Slowing(parameters, lr), torch.device("cpu"))
        for _ in range(2)
    )
    one.optimizer.step()
    one.optimizer.step()
    one.save(tmp_path / "file", FACTS)
    other.load(tmp_path / "file", values=False)  # which a new stage has not
    assert other.optimizer.param_groups[0]["taken"] == 2
    assert other.optimizer.param_groups[0]["weight_decay"] == 0.05


def test_tensors_that_an_optimizer_keeps_in_its_groups_come_back_too(tmp_path: Path) -> None:
    one, other = (
        staged().make(0, PLAN, lambda parameters, lr, momentum: Estimating(parameters, lr), torch.device("cpu"))
        for _ in range(2)
    )
    one.optimizer.param_groups[0]["seen"] = torch.tensor([2.0, 3.0])
    one.save(tmp_path / "file", FACTS)
    other.load(tmp_path / "file", values=False)  # which a new stage has not
    assert other.optimizer.param_groups[0]["seen"].tolist() == [2, 3]


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("groups/0/seen", torch.zeros(17)),
        ("groups/1/seen", torch.zeros(1)),
        ("groups/-1/seen", torch.zeros(1)),
        ("groups/seen", torch.zeros(1)),
        ("groups/0/params", torch.zeros(1)),
        ("groups/0/seen", torch.tensor([torch.nan])),
    ],
)
def test_tensors_of_groups_that_cannot_be_are_a_bad_checkpoint(tmp_path: Path, name: str, tensor: torch.Tensor) -> None:
    tensors = {f"model/{name}": tensor for name, tensor in filled(0).tensors.items()}
    write_tensors(tmp_path / "file", {**tensors, name: tensor}, {"plain": "{}"})
    state = filled(0)
    with pytest.raises(TrainError) as caught:
        state.load(tmp_path / "file")
    assert caught.value.reason == "bad_checkpoint"
    assert "seen" not in state.optimizer.param_groups[0]


def test_values_of_groups_that_cannot_be_are_a_bad_checkpoint(tmp_path: Path) -> None:
    tensors = {f"model/{name}": tensor for name, tensor in filled(0).tensors.items()}
    write_tensors(tmp_path / "file", tensors, {"plain": "{}", "groups": '[{"params": 1}]'})
    with pytest.raises(TrainError, match="The checkpoint's optimizer cannot be used") as caught:
        filled(0).load(tmp_path / "file")
    assert caught.value.reason == "bad_checkpoint"


def test_the_optimizer_can_come_back_without_the_values(tmp_path: Path) -> None:
    state = filled(0)
    state.module(torch.randn(3, 4)).sum().backward()
    state.optimizer.step()
    state.save(tmp_path / "file", FACTS)
    other = filled(0)
    other.load(tmp_path / "file", values=False)
    assert bool((other.tensors["0.weight"] == 1).all())
    assert len(other.optimizer.state_dict()["state"]) == 2


def test_a_file_of_another_stage_or_with_a_large_state_is_refused(tmp_path: Path) -> None:
    filled(0).save(tmp_path / "file", FACTS)
    with pytest.raises(TrainError, match=r"model/1.weight must be"):
        filled(1).load(tmp_path / "file")
    tensors = {"optimizer/exp_avg/0.weight": torch.zeros(17)}
    write_tensors(tmp_path / "large", tensors, {"plain": "{}"})
    with pytest.raises(TrainError, match="of 17 values"):
        filled(0).load(tmp_path / "large", values=False)


@pytest.mark.parametrize(
    "facts",
    [
        "",
        "[]",
        '{"round": 1}',
        '{"round": 1, "base": "", "progress": {"steps": -1}, "samples": 0, "counts": []}',
        '{"round": 1, "base": "", "progress": {"steps": Infinity}, "samples": 0, "counts": []}',
    ],
)
def test_a_file_without_sound_facts_is_refused(tmp_path: Path, facts: str) -> None:
    write_tensors(tmp_path / "file", {}, {"facts": facts})
    with pytest.raises(TrainError) as caught:
        read_facts(tmp_path / "file")
    assert caught.value.reason == "bad_checkpoint"


def own_buffer(model: nn.Sequential) -> list[nn.Module]:
    """Cut a model, with a layer that it does not have."""
    with torch.device("meta"):
        return [nn.Sequential(model[0]), nn.Sequential(model[1], nn.BatchNorm1d(4, affine=False))]


def test_a_stage_with_a_buffer_that_the_model_lacks_is_refused() -> None:
    name = f"{__name__}:own_buffer"
    table = Pipeline.model_validate({"cut": name})
    with torch.device("meta"):
        model = Normed()
    with pytest.raises(SeamError, match=r"1.running_mean of stage 1 is not a tensor of the model"):
        StagedModel(model, table, [], collect(named(cut=name)))
