"""The samples that each worker takes, and the learning rate: properties of pure functions."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedring.train.jobs.data_parallel_table import DataParallel
from fedring.workers.data_parallel_epochs import lr_factor
from fedring.workers.shards import GroupRank, count_steps, epoch_order, shares


@given(st.integers(1, 300), st.integers(1, 6), st.integers(1, 40))
def test_workers_take_every_sample_in_shares_of_equal_size(size: int, workers: int, batch: int) -> None:
    order = epoch_order(size, seed=1, epoch=0)
    by_rank = [list(shares(order, 0, GroupRank(rank, workers), batch)) for rank in range(workers)]
    assert {len(steps) for steps in by_rank} == {count_steps(size, workers, batch)}
    for step in zip(*by_rank, strict=True):
        assert len({(len(share.indices), share.taken) for share in step}) == 1
    before_the_last = torch.cat([share.indices for steps in by_rank for share in steps[:-1]] or [order[:0]])
    assert len(torch.unique(before_the_last)) == len(before_the_last)
    everything = torch.cat([share.indices for steps in by_rank for share in steps])
    assert torch.equal(torch.unique(everything), torch.arange(size))


@given(st.integers(2, 300), st.integers(2, 6), st.integers(2, 40), st.data())
def test_no_sample_is_left_out_when_workers_change(size: int, workers: int, batch: int, data: st.DataObject) -> None:
    order = epoch_order(size, seed=3, epoch=5)
    by_rank = [list(shares(order, 0, GroupRank(rank, workers), batch)) for rank in range(workers)]
    steps = data.draw(st.integers(0, len(by_rank[0])))
    taken = by_rank[0][steps - 1].taken if steps else 0
    first = torch.cat([share.indices for mine in by_rank for share in mine[:steps]] or [order[:0]])
    fewer = GroupRank(0, workers - 1)
    second = torch.cat(
        [
            share.indices
            for rank in range(fewer.size)
            for share in shares(order, taken, GroupRank(rank, fewer.size), batch)
        ]
        or [order[:0]]
    )
    assert torch.equal(torch.unique(torch.cat([first, second])), torch.arange(size))


def test_no_worker_gets_a_single_sample() -> None:
    order = epoch_order(9, seed=0, epoch=0)
    steps = [list(shares(order, 0, GroupRank(rank, 2), 4)) for rank in range(2)]
    assert [len(share.indices) for share in steps[0]] == [5]  # not 4 and then 1
    assert [len(share.indices) for share in shares(order[:1], 0, GroupRank(0, 2), 4)] == [2]


def test_the_order_depends_on_the_seed_and_the_epoch_alone() -> None:
    first = epoch_order(50, seed=7, epoch=2)
    assert torch.equal(first, epoch_order(50, seed=7, epoch=2))
    assert not torch.equal(first, epoch_order(50, seed=7, epoch=3))
    assert not torch.equal(first, epoch_order(50, seed=8, epoch=2))
    assert torch.equal(epoch_order(50, seed=7, epoch=2, wanted=20), first[:20])
    assert len(epoch_order(50, seed=7, epoch=2, wanted=99)) == 50


def table(**keys: object) -> DataParallel:
    return DataParallel.model_validate(keys)


def test_a_constant_learning_rate_does_not_change_after_its_warm_up() -> None:
    warm = table(lr_warmup_epochs=2)
    assert [lr_factor(warm, done, 10) for done in (0.5, 1, 2, 9)] == [0.25, 0.5, 1, 1]
    assert lr_factor(warm, 0, 10) == 0.001
    assert lr_factor(table(), 0, 10) == 1


def test_a_cosine_ends_at_zero() -> None:
    cosine = table(lr_schedule="cosine", lr_warmup_epochs=2)
    assert [lr_factor(cosine, done, 10) for done in (2, 6, 10)] == pytest.approx([1, 0.5, 0])


def test_a_step_schedule_falls_after_every_so_many_epochs() -> None:
    falls = table(lr_schedule="step", lr_step_epochs=3, lr_gamma=0.5)
    assert [lr_factor(falls, done, 10) for done in (0, 2.9, 3, 9)] == [1, 1, 0.5, 0.125]
