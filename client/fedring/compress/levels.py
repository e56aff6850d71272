"""8-bit levels of tensors, on whatever device they are: each chunk of entries has one float32 scale, max|x| / 127.

A chunk with NaN or infinity has a scale that is not finite, and so has what is made of it.
"""

import torch
from torch import Tensor

_TOP = 127


def quantise(chunks: Tensor) -> tuple[Tensor, Tensor]:
    """Levels in ±127 [..., c] int8 and scales [..., 1] float32 of `chunks` [..., c] float32."""
    scales = chunks.abs().amax(dim=-1, keepdim=True) / _TOP
    levels = (chunks / scales.masked_fill(scales == 0, 1)).round_().clamp_(-_TOP, _TOP)
    return levels.nan_to_num_(_TOP).to(torch.int8), scales


def dequantise(levels: Tensor, scales: Tensor) -> Tensor:
    """The chunks [..., c] float32 of `levels` [..., c] int8 and `scales` [..., 1] float32."""
    return levels.to(torch.float32).mul_(scales)
