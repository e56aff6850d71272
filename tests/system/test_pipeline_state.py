"""How much memory a pipeline job takes: no process holds a model that none of them should hold whole."""

from pathlib import Path

import pytest

from tests.bench.pipeline_state import job, measure

MODEL, STAGES = 400, 4
MOST = 250  # MB above the idle size: parameters and gradients of a stage, one layer's gradient, and buffers


@pytest.mark.soak
def test_no_process_of_a_pipeline_holds_the_whole_model(tmp_path: Path) -> None:
    sizes = measure(tmp_path, job(MODEL, STAGES))
    print({name: f"{idle:.0f} -> {peak:.0f} MB" for name, (idle, peak) in sizes.items()})
    assert len(sizes) == STAGES + 1
    assert {name: round(peak - idle) for name, (idle, peak) in sizes.items() if peak - idle > MOST} == {}
