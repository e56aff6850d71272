"""A trainer for tests of noise that clients add, named by jobs as "own_noise_trainers:lost_if_told"."""

import os
from typing import Any

import torch
from torch import nn

from fedring.offers import offers


@offers("trainer")
def lost_if_told(model: nn.Module, samples: Any, plan: Any) -> int:
    """Change the model a little; end the whole client where FL_TEST_LOST is set."""
    if os.environ.get("FL_TEST_LOST"):
        os._exit(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.001)
    return 1
