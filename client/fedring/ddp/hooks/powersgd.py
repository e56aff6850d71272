"""PowerSGD as a communication hook.

Each matrix of a gradient is sent as two thin factors (`fedring.compress.lowrank`).

It differs from torch's powerSGD_hook in this: several buckets work on every backend; the tensors that are not
compressed travel in one message with the left factors; they have no error to remember, since nothing of them is left
out; and a step with NaN or infinity leaves the memory as it was.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isqrt

import torch
from torch import Tensor
from torch.futures import Future
from torch.nn.functional import pad

from fedring.c10d import GradBucket
from fedring.compress.lowrank import (
    as_matrix,
    factors_numel,
    left_factor,
    orthonormalise,
    product,
    right_factor,
    worth_factoring,
)
from fedring.ddp.gradients import Gradients
from fedring.ddp.hooks.powersgd_state import PowerSGDState
from fedring.ddp.turns import Steps, mean


def powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Send each matrix of a bucket as two factors.

    All other tensors are sent whole.

    Args:
        state: This worker's state.
        bucket: The bucket that DistributedDataParallel has filled.

    Returns:
        A future of the bucket's buffer, whose matrices are then low-rank approximations of their means.
    """
    grads = state.names.of(bucket)
    return _start(state, bucket, _by_tensor(state, grads) if state.compresses else _whole(state, grads))


def batched_powerSGD_hook(state: PowerSGDState, bucket: GradBucket) -> Future[Tensor]:
    """Send a whole bucket, as one square matrix, as two factors.

    Args:
        state: This worker's state.
        bucket: The bucket that DistributedDataParallel has filled.

    Returns:
        A future of the bucket's buffer, which is then a low-rank approximation of its mean over all workers.
    """
    grads = state.names.of(bucket)
    return _start(state, bucket, _as_square(state, grads) if state.compresses else _whole(state, grads))


def _start(state: PowerSGDState, bucket: GradBucket, steps: Steps) -> Future[Tensor]:
    state.begin(bucket)
    future = state.turns.start(bucket, steps)
    state.end(bucket)
    return future


@dataclass(slots=True, eq=False)
class _Batch:
    """Matrices of one shape, and their factors."""

    keys: list[str]  # of their right factors
    matrices: Tensor  # [b, n, m], with the errors of the step before
    left: Tensor  # [b, n, r]
    right: Tensor  # [b, m, r]


def _whole(state: PowerSGDState, grads: Gradients) -> Steps:
    (result,) = yield from mean([grads.buffer], state.group, grads.buffer.dtype)
    return grads.buffer.copy_(result)


def _by_tensor(state: PowerSGDState, grads: Gradients) -> Steps:
    """Take the steps of torch's hook (see its docstring).

    Steps 2.1 and 3.3 of that hook are one message here.
    """
    flat, dtype = grads.flat(), grads.buffer.dtype
    whole, groups = _divide(state, grads)
    targets = [
        [state.with_error(grads.names[i], flat[i]).view(as_matrix(grads.shapes[i])) for i in group] for group in groups
    ]
    batches = _batches(state, [[grads.names[i] for i in group] for group in groups], targets)
    means = yield from mean([*(flat[i] for i in whole), *(batch.left for batch in batches)], state.group, dtype)
    for i, result in zip(whole, means[: len(whole)], strict=True):
        flat[i].copy_(result)
    names = tuple(grads.names)
    state.pending[names] = lambda shared: _settle_with(state, batches, shared)
    yield from _factor(state, batches, means[len(whole) :], dtype)
    del state.pending[names]
    # A gradient with NaN or infinity reaches every worker through the mean, so that all skip the same step. In the
    # memory it would spoil all later steps.
    finite = all(bool(batch.right.isfinite().all()) for batch in batches)
    for group, batch in zip(groups, batches, strict=True):
        for i, matrix, result in zip(group, batch.matrices, product(batch.left, batch.right), strict=True):
            flat[i].copy_(result.view(-1))
            if finite:
                state.keep_error(grads.names[i], matrix.reshape(-1), result.reshape(-1))
    if finite:
        _remember(state, batches)
    return grads.buffer


def _as_square(state: PowerSGDState, grads: Gradients) -> Steps:
    """Take the steps of torch's batched hook.

    The zeros that fill up the square have no error.

    Tensors have their places by the order of their names, since DDP changes the order in buckets after the first step.
    """
    if not grads.buffer.numel():  # parameters without entries
        return grads.buffer
    flat = dict(zip(grads.names, grads.flat(), strict=True))
    tensors = {name: flat[name] for name in sorted(flat)}
    names, sizes = list(tensors), [tensor.numel() for tensor in tensors.values()]
    target = torch.cat([state.with_error(name, grad) for name, grad in tensors.items()])
    side = isqrt(target.numel() - 1) + 1
    square = pad(target, (0, side * side - target.numel())).view(side, side)
    (batch,) = _batches(state, [[f"{names[0]} to {names[-1]}"]], [[square]])
    state.count(target.numel(), factors_numel(side, side, batch.left.shape[2]))
    means = yield from mean([batch.left], state.group, grads.buffer.dtype)
    yield from _factor(state, [batch], means, grads.buffer.dtype)
    result = product(batch.left, batch.right).view(-1)[: target.numel()]
    # As in `_by_tensor`: NaN or infinity must not enter the memory.
    finite = bool(batch.right.isfinite().all())
    parts = zip(tensors.items(), torch.split(target, sizes), torch.split(result, sizes), strict=True)
    for (name, grad), wanted, sent in parts:
        grad.copy_(sent)
        if finite:
            state.keep_error(name, wanted, sent)
    if finite:
        _remember(state, [batch])
    return grads.buffer


def _divide(state: PowerSGDState, grads: Gradients) -> tuple[list[int], list[list[int]]]:
    """Divide tensors into whole ones and groups factored together.

    Returns the places of the tensors.
    """
    whole: list[int] = []
    by_shape: dict[tuple[int, int], list[int]] = defaultdict(list)
    for place, shape in enumerate(grads.shapes):
        rows, columns = as_matrix(shape)
        rank = min(rows, columns, state.matrix_approximation_rank)
        if worth_factoring(rows, columns, rank=rank, min_rate=state.min_compression_rate):
            by_shape[rows, columns].append(place)
            state.count(rows * columns, factors_numel(rows, columns, rank))
        else:
            whole.append(place)
            state.count(rows * columns, rows * columns)
    if state.batch_tensors_with_same_shape:
        return whole, list(by_shape.values())
    return whole, [[place] for places in by_shape.values() for place in places]


def _batches(state: PowerSGDState, keys: Sequence[list[str]], matrices: Sequence[list[Tensor]]) -> list[_Batch]:
    """Stack the matrices of each list, and make their left factors.

    The right factors are those of the step before, where there are any.
    """
    batches: list[_Batch] = []
    generator: torch.Generator | None = None
    if not matrices and not state.draws_by_name and (not state.warm_start or state.iter == state.start_powerSGD_iter):
        state.generator()  # torch's hook draws for such a bucket, too, and equal seeds must give equal factors
    for some, alike in zip(keys, matrices, strict=True):
        stacked = torch.stack(alike) if len(alike) > 1 else alike[0].unsqueeze(0)
        columns, rank = stacked.shape[2], min(*stacked.shape[1:], state.matrix_approximation_rank)
        known = [state.q_memory_dict.get(key) for key in some] if state.warm_start else []
        right = [factor for factor in known if factor is not None and factor.shape == (columns, rank)]
        if len(right) == len(some):
            first = torch.stack(right).to(stacked)
        elif state.draws_by_name:
            drawn = [torch.randn(columns, rank, generator=state.generator_of(key), device="cpu") for key in some]
            first = torch.stack(drawn).to(stacked)
        else:
            generator = generator or state.generator()
            first = torch.randn(len(some), columns, rank, generator=generator, device="cpu").to(stacked)
        orthonormalise(first, state.orthogonalization_epsilon)
        batches.append(_Batch(some, stacked, left_factor(stacked, first), first))
    return batches


def _factor(state: PowerSGDState, batches: Sequence[_Batch], lefts: Sequence[Tensor], dtype: torch.dtype) -> Steps:
    """Complete the batches' factors, equal on all workers.

    Args:
        state: The state of the hook.
        batches: The batches of this step.
        lefts: The means of the left factors over all workers.
        dtype: The dtype of messages.
    """
    if not batches:
        return torch.empty(0)
    for batch, left in zip(batches, lefts, strict=True):
        batch.left = orthonormalise(left.to(batch.matrices.dtype), state.orthogonalization_epsilon)
        batch.right = right_factor(batch.matrices, batch.left)
    rights = yield from mean([batch.right for batch in batches], state.group, dtype)
    for batch, right in zip(batches, rights, strict=True):
        batch.right = right.to(batch.matrices.dtype)
    return torch.empty(0)


def _settle_with(state: PowerSGDState, batches: Sequence[_Batch], shared: Mapping[str, Tensor]) -> None:
    """Keep the errors of a step whose right factors another worker tells."""
    for batch in batches:
        for name, matrix, left in zip(batch.keys, batch.matrices, batch.left, strict=True):
            right = state.factor_in(shared, name)
            sent = None if right is None else left @ right.to(left).T
            if sent is not None and bool(sent.isfinite().all()):
                state.keep_error(name, matrix.reshape(-1), sent.reshape(-1))


def _remember(state: PowerSGDState, batches: Sequence[_Batch]) -> None:
    if state.warm_start:
        for batch in batches:
            for key, factor in zip(batch.keys, batch.right.clone(), strict=True):
                state.keep_factor(key, factor)
