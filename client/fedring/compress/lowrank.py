"""Low-rank approximation of gradients (PowerSGD, Vogels et al. 2019, arXiv 1905.13727, algorithm 1).

A matrix M, the mean over all workers of their M_i, is sent as two thin factors, M ~ P Qᵀ. With Q from the step before

    P = mean(M_i Q)    P is made orthonormal    Q = mean(M_iᵀ P)

which is one step of power iteration. The one law, for each worker's error E_i = M_i - P Qᵀ:

    mean(E_i) + P Qᵀ == mean(M_i)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)
_GRAM_SCHMIDT = 2  # columns up to which it is faster than QR


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor of `shape` as a matrix: the first dimension, and all others."""
    rows = shape[0] if shape else 1
    columns = 1
    for size in shape[1:]:
        columns *= size
    return rows, columns


def factors_numel(rows: int, columns: int, rank: int) -> int:
    """Entries of both factors."""
    return (rows + columns) * rank


def worth_factoring(rows: int, columns: int, *, rank: int, min_rate: float) -> bool:
    """Whether the factors are more than `min_rate` times smaller than the matrix."""
    return factors_numel(rows, columns, rank) * min_rate < rows * columns


def orthonormalise(matrices: Tensor, epsilon: float = 0.0) -> Tensor:
    """`matrices` [b, n, r], r <= n, whose columns are now orthonormal, in place; a column of zeros stays one.

    `epsilon` is added to the norms.
    """
    if matrices.dim() != 3 or matrices.shape[2] > matrices.shape[1]:
        raise ValueError(f"cannot make the columns of matrices {tuple(matrices.shape)} orthonormal")
    if matrices.shape[2] > _GRAM_SCHMIDT and matrices.dtype not in _HALVES:
        return matrices.copy_(torch.linalg.qr(matrices).Q)
    for index in range(matrices.shape[2]):
        column = matrices[:, :, index : index + 1]
        norm = torch.linalg.vector_norm(column, dim=1, keepdim=True) + epsilon
        column /= norm.masked_fill_(norm == 0, 1)
        rest = matrices[:, :, index + 1 :]
        rest -= (column * rest).sum(dim=1, keepdim=True) * column
    return matrices


def left_factor(matrices: Tensor, right: Tensor) -> Tensor:
    """P [b, n, r] = M Q, of `matrices` [b, n, m] and `right` [b, m, r]."""
    return torch.bmm(matrices, right)


def right_factor(matrices: Tensor, left: Tensor) -> Tensor:
    """Q [b, m, r] = Mᵀ P, of `matrices` [b, n, m] and `left` [b, n, r]."""
    return torch.bmm(matrices.transpose(1, 2), left)


def product(left: Tensor, right: Tensor) -> Tensor:
    """P Qᵀ [b, n, m], of `left` [b, n, r] and `right` [b, m, r]."""
    return torch.bmm(left, right.transpose(1, 2))
