"""Images: handwritten digits, of which each site sees some."""

from torch import nn

from fedring.offers import offers


@offers("model")
def cnn(width: int = 16) -> nn.Module:
    """Return a small CNN for the built-in digits, which are images of 8 x 8 pixels."""
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.GroupNorm(4, width),  # and not BatchNorm, whose statistics would differ between sites
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(width, 2 * width, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2 * width * 16, 10),
    )
