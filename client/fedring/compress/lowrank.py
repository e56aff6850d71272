"""Low-rank approximation of gradients.

The method is PowerSGD (Vogels et al. 2019, arXiv 1905.13727, algorithm 1).

A matrix M, the mean over all workers of their M_i, is sent as two thin factors, M ~ P Qᵀ. With Q of the previous step

    P = mean(M_i Q)    P is made orthonormal    Q = mean(M_iᵀ P)

which is one step of power iteration. For each worker's error E_i = M_i - P Qᵀ the law is

    mean(E_i) + P Qᵀ == mean(M_i)
"""

from collections.abc import Sequence

import torch
from torch import Tensor

_HALVES = (torch.float16, torch.bfloat16)
_GRAM_SCHMIDT = 2  # columns up to which it is faster than QR


def as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of a tensor as a matrix.

    The rows are its first dimension, the columns all others together.
    """
    rows = shape[0] if shape else 1
    columns = 1
    for size in shape[1:]:
        columns *= size
    return rows, columns


def factors_numel(rows: int, columns: int, rank: int) -> int:
    """Return the number of entries of both factors together."""
    return (rows + columns) * rank


def worth_factoring(rows: int, columns: int, *, rank: int, min_rate: float) -> bool:
    """Return whether factors are `min_rate` times smaller than the matrix.

    They must be more than that.
    """
    return factors_numel(rows, columns, rank) * min_rate < rows * columns


def orthonormalise(matrices: Tensor, epsilon: float = 0.0) -> Tensor:
    """Make the columns of matrices orthonormal, in place.

    Columns of zeros stay zero; of more than two columns, they become any that are orthonormal to the others.

    Args:
        matrices: The matrices [b, n, r], r <= n, of any float dtype. Half precision is computed in float32.
        epsilon: Added to the norms of the columns, of at most two columns. It has no effect on more.

    Returns:
        The same tensor.

    Raises:
        ValueError: If the shape is another.
    """
    if matrices.dim() != 3 or matrices.shape[2] > matrices.shape[1]:
        raise ValueError(f"cannot make the columns of matrices {tuple(matrices.shape)} orthonormal")
    if matrices.dtype in _HALVES:  # QR does not know them, and a norm may be above the largest of them
        return matrices.copy_(orthonormalise(matrices.to(torch.float32), epsilon))
    if matrices.shape[2] > _GRAM_SCHMIDT:
        return matrices.copy_(torch.linalg.qr(matrices).Q)
    # Gram-Schmidt is faster than QR for a few columns.
    for index in range(matrices.shape[2]):
        column = matrices[:, :, index : index + 1]
        norm = torch.linalg.vector_norm(column, dim=1, keepdim=True) + epsilon
        column /= norm.masked_fill_(norm == 0, 1)
        rest = matrices[:, :, index + 1 :]
        rest -= (column * rest).sum(dim=1, keepdim=True) * column
    return matrices


def left_factor(matrices: Tensor, right: Tensor) -> Tensor:
    """Return the left factor P = M Q.

    Args:
        matrices: M, [b, n, m].
        right: Q, [b, m, r].

    Returns:
        P, [b, n, r].
    """
    return torch.bmm(matrices, right)


def right_factor(matrices: Tensor, left: Tensor) -> Tensor:
    """Return the right factor Q = Mᵀ P.

    Args:
        matrices: M, [b, n, m].
        left: P, [b, n, r].

    Returns:
        Q, [b, m, r].
    """
    return torch.bmm(matrices.transpose(1, 2), left)


def product(left: Tensor, right: Tensor) -> Tensor:
    """Return the product P Qᵀ of both factors.

    Args:
        left: P, [b, n, r].
        right: Q, [b, m, r].

    Returns:
        The matrices, [b, n, m].
    """
    return torch.bmm(left, right.transpose(1, 2))
