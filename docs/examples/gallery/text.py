"""Text with LoRA: which department answers a customer? Only adapters and a head travel."""

from pathlib import Path
from random import Random
from zlib import crc32

import torch
from torch import Tensor, nn

from fedring.data import Samples, Split
from fedring.offers import offers

VOCABULARY, WORDS, WIDTH = 2048, 16, 64
TOPICS = (
    ("invoice", "charged", "twice", "refund", "card", "bill", "payment", "total", "tax"),
    ("parcel", "courier", "late", "tracking", "street", "delivered", "neighbour", "arrive", "shipping"),
    ("size", "colour", "return", "exchange", "label", "fits", "wrong", "torn", "receipt"),
    ("login", "password", "app", "crashes", "update", "screen", "error", "account", "reset"),
)
FILLERS = ("hello", "please", "my", "the", "is", "was", "again", "since", "you", "can", "not", "order", "last", "week")


class Adapted(nn.Module):
    """A frozen layer with a low-rank change (Hu et al. 2022, section 4.1): W x + B A x."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.b = nn.Parameter(torch.zeros(layer.out_features, rank))  # so that it begins as the base

    def forward(self, rows: Tensor) -> Tensor:
        """Return the layer's output with the change, [..., out_features]."""
        changed: Tensor = self.layer(rows) + rows @ self.a.T @ self.b.T
        return changed


class Reader(nn.Module):
    """Scores [n, topics] of messages [n, WORDS] of token numbers, in which 0 is no word."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCABULARY, WIDTH, padding_idx=0).requires_grad_(False)
        self.mix = nn.Sequential(Adapted(nn.Linear(WIDTH, 2 * WIDTH), rank), nn.ReLU())
        self.back = Adapted(nn.Linear(2 * WIDTH, WIDTH), rank)
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, len(TOPICS)))

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the scores of messages."""
        words = self.words(tokens.long())
        words = words + self.back(self.mix(words))
        scores: Tensor = self.head(words.sum(dim=1) / (tokens > 0).sum(dim=1, keepdim=True))
        return scores


@offers("model")
def reader(rank: int = 4) -> nn.Module:
    """Return a reader; a real one takes its frozen base from a file that all sites have."""
    return Reader(rank)


@offers("data")
def messages(root: Path | None, download: bool) -> Split:
    """Return messages that are written here; a real function reads a file below `root`."""
    draw = Random(1)
    labels = [draw.randrange(len(TOPICS)) for _ in range(3000)]
    tokens = torch.tensor([tokenise(write(draw, topic)) for topic in labels])
    return Split(
        Samples(tokens[:2400], torch.tensor(labels[:2400])),
        Samples(tokens[2400:], torch.tensor(labels[2400:])),
        classes=4,
    )


def write(draw: Random, topic: int) -> str:
    """Return a message: fillers, some words of its topic, and one of another."""
    words = draw.choices(FILLERS, k=8) + draw.sample(TOPICS[topic], 3) + [draw.choice(draw.choice(TOPICS))]
    draw.shuffle(words)
    return " ".join(words)


def tokenise(text: str) -> list[int]:
    """Return WORDS token numbers below VOCABULARY, filled up with 0."""
    tokens = [1 + crc32(word.encode()) % (VOCABULARY - 1) for word in text.split()][:WORDS]
    return tokens + [0] * (WORDS - len(tokens))
