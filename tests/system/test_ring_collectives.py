"""Every collective of torch.distributed over the ring, on 1 to 4 ranks."""

from pathlib import Path

import pytest

from tests.system.ring_scripts import ranks
from tests.system.ring_scripts.exchanges import CHECKS, a_group_under_another_backend, all_checks


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_every_collective_gives_what_a_rank_computes_by_itself(size: int, tmp_path: Path) -> None:
    names = [check.__name__ for check in CHECKS]
    assert ranks.run(all_checks, size, tmp_path) == [names] * size


def test_a_group_can_use_the_ring_while_the_default_group_does_not(tmp_path: Path) -> None:
    assert ranks.run(a_group_under_another_backend, 3, tmp_path, backend="gloo") == [6.0] * 3
