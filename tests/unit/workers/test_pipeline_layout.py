"""Which worker of a pipeline trains which stages, and who keeps copies of their checkpoints."""

from hypothesis import given
from hypothesis import strategies as st

from fedring.train.jobs.pipeline_table import Pipeline
from fedring.workers.pipeline_epochs import layout_of


def test_workers_of_a_stage_follow_each_other() -> None:
    table = Pipeline.model_validate({"stages": 3, "replicas": [1, 2, 1]})
    layout = layout_of(table)
    assert [layout.stages_of(rank) for rank in range(4)] == [[0], [1], [1], [2]]
    assert [layout.owner(stage) for stage in range(3)] == [0, 1, 3]
    assert layout.copies() == [(0, 0, 1), (2, 3, 0)]
    assert [layout.kept_by(rank) for rank in range(4)] == [{0, 2}, {0, 1}, {1}, {2}]
    schedule = table.schedule_of(4)
    assert all(schedule.stages_of(rank) == layout.stages_of(rank) for rank in range(table.workers))


def test_without_replicas_of_its_own_a_stage_is_kept_as_before() -> None:
    interleaved = {"stages": 4, "stages_per_worker": 2, "schedule": "interleaved_1f1b"}
    layout = layout_of(Pipeline.model_validate(interleaved))
    assert [layout.kept_by(rank) for rank in range(2)] == [{0, 1, 2, 3}] * 2
    parallel = layout_of(Pipeline.model_validate({"stages": 2, "replicas": 2}))
    assert parallel.copies() == []
    assert [parallel.kept_by(rank) for rank in range(4)] == [{0}, {1}, {0}, {1}]


@given(st.lists(st.integers(1, 4), min_size=1, max_size=6))
def test_two_workers_keep_every_stage_if_there_are_two(replicas: list[int]) -> None:
    layout = layout_of(Pipeline.model_validate({"stages": len(replicas), "replicas": replicas}))
    workers = sum(replicas)
    for stage in range(len(replicas)):
        keepers = [rank for rank in range(workers) if stage in layout.kept_by(rank)]
        assert len(keepers) >= min(2, workers)
        assert layout.owner(stage) in keepers
    sent = [source for _, source, _ in layout.copies()]
    received = [target for _, _, target in layout.copies()]
    assert len(set(sent)) == len(sent)
    assert len(set(received)) == len(received)
