"""A model of any number of parameters."""

from torch import Tensor, nn

_WIDTH = 256
_LAYER = _WIDTH * _WIDTH + _WIDTH  # parameters


def layers(parameters: int) -> nn.Module:
    """Return a perceptron of about so many parameters, in layers of equal width.

    So its buckets fill one after the other during the backward pass, as those of other deep models do.
    """
    return _Flat(max(1, round(parameters / _LAYER)))


class _Flat(nn.Module):
    def __init__(self, count: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(_WIDTH, _WIDTH) for _ in range(count)))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self.layers(inputs)
        return outputs
