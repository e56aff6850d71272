"""torch.profiler over the ring: each operation has a record, from its start to its end."""

from pathlib import Path

from tests.system.ring_scripts import machinery, ranks

NAMES = (
    "all_reduce", "broadcast", "reduce", "all_gather", "reduce_scatter", "gather", "scatter", "all_to_all", "barrier",
    "all_gather_bytes", "send", "recv",
)  # fmt: skip


def test_every_operation_has_a_record_and_shapes(tmp_path: Path) -> None:
    for shapes in ranks.run(machinery.names_of_records, 2, tmp_path):
        assert shapes.keys() == {f"fedring:{name}{end}" for name in NAMES for end in ("", ":tensors")}
        assert shapes["fedring:all_reduce:tensors"] == [[3, 4]]
        assert shapes["fedring:recv:tensors"] == [[2]]


def test_a_record_lasts_until_the_operation_has_ended(tmp_path: Path) -> None:
    has_begun, has_ended = ranks.run(machinery.length_of_a_record, 2, tmp_path)[0]
    assert has_begun
    assert not has_ended


def test_a_record_ends_when_the_operation_fails(tmp_path: Path) -> None:
    assert ranks.run(machinery.record_of_a_failure, 2, tmp_path) == [["Mismatch", True]] * 2


def test_the_profilers_see_the_collectives_of_ddp(tmp_path: Path) -> None:
    for legacy, events in ranks.run(machinery.records_of_a_training, 2, tmp_path):
        assert legacy >= 4
        assert events >= 4
