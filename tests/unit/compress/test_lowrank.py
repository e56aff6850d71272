"""Low-rank approximation, 8-bit levels and error feedback, as functions of tensors."""

import pytest
import torch

from fedring.compress.correction import ErrorFeedback, Feedback, result_of, settle, target_of
from fedring.compress.lowrank import as_matrix, left_factor, orthonormalise, product, right_factor, worth_factoring
from fedring.ddp.hooks.int8 import dequantise, quantise


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("rank", [1, 2, 3, 8])
def test_columns_are_orthonormal_afterwards(rank: int) -> None:
    matrices = orthonormalise(random(3, 9, rank))
    torch.testing.assert_close(matrices.transpose(1, 2) @ matrices, torch.eye(rank).expand(3, rank, rank))


@pytest.mark.parametrize("rank", [1, 4])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_columns_in_half_precision_are_orthonormal_even_if_their_norm_overflows(dtype: torch.dtype, rank: int) -> None:
    matrices = orthonormalise((3000 * random(1, 1000, rank)).to(dtype))
    assert matrices.dtype == dtype
    exact = matrices.float()
    torch.testing.assert_close(exact.transpose(1, 2) @ exact, torch.eye(rank).unsqueeze(0), atol=5e-3, rtol=0)


def test_a_column_of_zeros_stays_zero() -> None:
    assert orthonormalise(torch.zeros(1, 4, 2)).equal(torch.zeros(1, 4, 2))


@pytest.mark.parametrize("shape", [(4, 2), (2, 3, 4)])
def test_a_wrong_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="orthonormal"):
        orthonormalise(torch.zeros(shape))


def test_a_matrix_of_the_rank_of_the_factors_is_exact_after_one_step() -> None:
    matrix = random(1, 7, 2) @ random(1, 2, 5, seed=1)
    left = orthonormalise(left_factor(matrix, orthonormalise(random(1, 5, 2, seed=2))))
    torch.testing.assert_close(product(left, right_factor(matrix, left)), matrix)


def test_steps_of_power_iteration_find_the_largest_singular_values() -> None:
    matrix, right = random(1, 20, 12), random(1, 12, 3, seed=1)
    left = orthonormalise(left_factor(matrix, right))
    for _ in range(200):
        right = right_factor(matrix, left)
        left = orthonormalise(left_factor(matrix, orthonormalise(right.clone())))
    right = right_factor(matrix, left)
    best = torch.linalg.svdvals(matrix[0])
    assert (matrix - product(left, right)).norm() == pytest.approx(float(best[3:].norm()), rel=1e-4)


def test_a_tensor_is_a_matrix_of_its_first_dimension_and_all_others() -> None:
    assert [as_matrix(shape) for shape in [(), (5,), (4, 3), (8, 4, 3, 3)]] == [(1, 1), (5, 1), (4, 3), (8, 36)]


def test_factors_must_be_smaller_by_more_than_the_rate() -> None:
    assert not worth_factoring(10, 10, rank=1, min_rate=5)  # 20 entries are exactly 5 times fewer
    assert worth_factoring(10, 11, rank=1, min_rate=5)
    assert not worth_factoring(10, 1, rank=1, min_rate=0.95)


def test_levels_are_within_half_a_scale_of_the_values_and_zeros_are_exact() -> None:
    chunks = random(5, 4, 64) * torch.tensor([0.0, 1e-30, 1.0, 1e30]).view(4, 1)
    levels, scales = quantise(chunks)
    assert levels.dtype == torch.int8
    assert ((dequantise(levels, scales) - chunks).abs() <= 0.5001 * scales).all()
    assert dequantise(levels, scales)[:, 0].equal(chunks[:, 0])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_nan_and_infinity_arrive_as_such_and_affect_no_other_chunk(value: float) -> None:
    chunks = torch.ones(2, 8)
    chunks[0, 3] = value
    arrived = dequantise(*quantise(chunks))
    assert not arrived[0].isfinite().any()
    assert arrived[1].equal(chunks[1])


@pytest.mark.parametrize("feedback", ["ef", "ef21"])
def test_feedback_loses_nothing_over_many_steps_and_workers(feedback: Feedback) -> None:
    kept = [ErrorFeedback.empty(50, feedback, torch.device("cpu")) for _ in range(3)]
    for step in range(20):
        grads = [random(50, seed=10 * step + worker) for worker in range(3)]
        owed = torch.stack([one.own for one in kept]).mean(0)
        targets = [target_of(grad, one, feedback) for grad, one in zip(grads, kept, strict=True)]
        sent = [target * (target.abs() > 1) for target in targets]
        mean = torch.stack(sent).mean(0)
        for one, target, what in zip(kept, targets, sent, strict=True):
            settle(one, target, what, feedback)
        results = [result_of(mean, one, feedback) for one in kept]
        assert all(result.equal(results[0]) for result in results)
        now = torch.stack([one.own for one in kept]).mean(0)
        wanted = now if feedback == "ef21" else torch.stack(grads).mean(0) + owed - now
        torch.testing.assert_close(results[0], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("feedback", ["ef", "ef21"])
def test_nan_and_infinity_are_not_kept(feedback: Feedback) -> None:
    kept = ErrorFeedback.empty(3, feedback, torch.device("cpu"))
    target = target_of(torch.tensor([float("nan"), float("inf"), 3.0]), kept, feedback)
    sent = target * 0.5
    settle(kept, target, sent, feedback)
    assert not result_of(sent, kept, feedback)[0].isfinite()
    assert kept.own.equal(torch.tensor([0, 0, 1.5]))


def test_estimates_are_equal_again_after_the_number_of_workers_changed() -> None:
    kept = ErrorFeedback(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 4.0]))
    kept.rescale(2, 3)
    assert kept.own.equal(kept.shared)


def test_residuals_are_scaled_when_the_number_of_workers_changes() -> None:
    kept = ErrorFeedback(torch.tensor([2.0]), torch.empty(0))
    kept.rescale(2, 3)
    assert kept.own.item() == 3.0
