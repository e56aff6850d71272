"""DistributedDataParallel over the ring: equal replicas on every rank, and equal to a training on one process."""

from functools import partial
from pathlib import Path

import pytest
import torch

from tests.conftest import REPEATED
from tests.system.ring_scripts import ranks
from tests.system.ring_scripts.ddp import Outcome, Plan, train, train_alone, train_often, train_words

MANY = 0.0005  # MiB: each parameter is a bucket
TIMES = 20

PLANS = {
    "one bucket": (2, Plan()),
    "many buckets": (3, Plan(bucket_mb=MANY)),
    "unused parameters": (2, Plan(unused=True, bucket_mb=MANY)),
    "accumulation without sending": (2, Plan(accumulate=3)),
    "two groups by turns": (2, Plan(hook="alternate", bucket_mb=MANY)),
    "four ranks": (4, Plan(bucket_mb=MANY)),
}


def outcomes(size: int, plan: Plan, folder: Path) -> list[Outcome]:
    return [Outcome(*result) for result in ranks.run(partial(train, plan=plan), size, folder)]


@pytest.mark.parametrize("name", PLANS)
def test_replicas_are_equal_and_equal_to_one_process(name: str, tmp_path: Path) -> None:
    size, plan = PLANS[name]
    results = outcomes(size, plan, tmp_path)
    assert len({result.digest for result in results}) == 1
    alone = train_alone(range(size), plan)
    torch.testing.assert_close(
        torch.tensor(results[0].parameters), torch.tensor(alone.parameters), rtol=1e-4, atol=1e-5
    )
    start = train_alone(range(size), plan._replace(steps=0))
    assert not torch.allclose(torch.tensor(alone.parameters), torch.tensor(start.parameters), atol=1e-2)


def test_sparse_gradients_train_as_on_one_process(tmp_path: Path) -> None:
    first, second = ranks.run(train_words, 2, tmp_path)
    assert first == second
    torch.testing.assert_close(torch.tensor(first), torch.tensor(train_words(0, 2, alone=True)), rtol=1e-4, atol=1e-5)


def test_groups_of_some_ranks_train_models_of_their_own(tmp_path: Path) -> None:
    results = outcomes(4, Plan(pair=True), tmp_path)
    assert [result.digest for result in results[::2]] == [result.digest for result in results[1::2]]
    for first in (0, 2):
        alone = train_alone([first, first + 1], Plan())
        wanted = torch.tensor(alone.parameters)
        torch.testing.assert_close(torch.tensor(results[first].parameters), wanted, rtol=1e-4, atol=1e-5)


def test_buffers_are_rank_0s_on_every_rank(tmp_path: Path) -> None:
    results = outcomes(2, Plan(norm=True), tmp_path)
    assert len({result.digest for result in results}) == 1
    assert len({result.buffers for result in results}) == 1


def test_the_fp16_hook_keeps_replicas_equal_and_near_to_one_process(tmp_path: Path) -> None:
    results = outcomes(2, Plan(hook="fp16", bucket_mb=MANY), tmp_path)
    assert len({result.digest for result in results}) == 1
    alone = train_alone(range(2), Plan())
    torch.testing.assert_close(
        torch.tensor(results[0].parameters), torch.tensor(alone.parameters), rtol=0.05, atol=5e-3
    )


@pytest.mark.parametrize("repeat", REPEATED)
@pytest.mark.parametrize("size", [2, 3])
def test_power_sgd_with_many_buckets_never_hangs(size: int, tmp_path: Path, repeat: int) -> None:
    plan = Plan(hook="power", bucket_mb=MANY, width=40, steps=8)
    runs = ranks.run(partial(train_often, plan=plan, times=TIMES), size, tmp_path)
    assert all(run == runs[0] for run in runs)
