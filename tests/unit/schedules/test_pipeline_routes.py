"""Routes of tensors between stages: who makes a tensor, who uses it, and which routes are refused."""

from collections.abc import Mapping

import pytest

from fedring.schedules.routes import BATCH, Routes, chain
from fedring.schedules.schedule import ScheduleError


def test_a_chain_passes_one_tensor_from_stage_to_stage() -> None:
    routes = chain(3)
    assert routes.sources == ({"inputs": BATCH}, {"stage0": 0}, {"stage1": 1})
    assert [routes.consumers(stage) for stage in range(3)] == [{"stage0": (1,)}, {"stage1": (2,)}, {}]
    assert [routes.from_batch(stage) for stage in range(3)] == [("inputs",), (), ()]


def test_a_tensor_goes_to_every_stage_that_uses_it_and_skips_the_others() -> None:
    routes = Routes(
        (
            {"source": BATCH},
            {"target": BATCH},
            {"memory": 0, "embedded": 1},
            {"memory": 0, "decoded": 2, "target": BATCH},
        )
    )
    assert routes.consumers(0) == {"memory": (2, 3)}
    assert routes.consumers(1) == {"embedded": (2,)}
    assert routes.from_batch(3) == ("target",)


@pytest.mark.parametrize(("sources", "text"), [
    (({"inputs": BATCH}, {}), "stage 1 has no inputs"),
    (({"inputs": BATCH}, {"late": 1}), "'late' of stage 1 cannot come from stage 1"),
    (({"inputs": BATCH}, {"late": 2}, {"x": 0}), "'late' of stage 1 cannot come from stage 2"),
    (({"inputs": -2},), "cannot come from stage -2"),
    (({"x": BATCH}, {"x": 0}), "'x' of stage 1 comes from stage 0, and for an earlier stage from the batch"),
])  # fmt: skip
def test_wrong_routes_are_refused(sources: tuple[Mapping[str, int], ...], text: str) -> None:
    with pytest.raises(ScheduleError, match=text):
        Routes(sources)
