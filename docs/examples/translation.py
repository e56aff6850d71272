"""A small encoder-decoder transformer and a task for it, which a pipeline job trains in three stages.

A sentence is a row of digits. Its translation has them in reverse order, each one raised by 3, modulo 10. Sentences are
of different lengths, so the encoder and both layers of the decoder need to know where the padding is. How to run it is
in docs/pipeline.md.
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset

from fedring.data import Split
from fedring.offers import offers

LENGTH, PADDING, START, TOKENS = 8, 10, 11, 12  # tokens 0 to 9 are the digits
IGNORED = -100  # the label of a place after the end of a sentence


class Transformer(nn.Module):
    """Takes sentences and the beginnings of their translations, and predicts the next token at each place."""

    later: Tensor

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.source = nn.Embedding(TOKENS, width)
        self.source_places = nn.Parameter(torch.randn(LENGTH, width))
        self.encoder = nn.TransformerEncoderLayer(width, heads, 2 * width, dropout, batch_first=True)
        self.target = nn.Embedding(TOKENS, width)
        self.target_places = nn.Parameter(torch.randn(LENGTH, width))
        self.first = nn.TransformerDecoderLayer(width, heads, 2 * width, dropout, batch_first=True)
        self.second = nn.TransformerDecoderLayer(width, heads, 2 * width, dropout, batch_first=True)
        self.head = nn.Linear(width, TOKENS)
        self.register_buffer("later", torch.ones(LENGTH, LENGTH).triu(1).bool())

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits [batch, 12, 8] of the sources and targets [batch, 8] int64."""
        padding = source == PADDING
        memory = self.encoder(self.source(source) + self.source_places, src_key_padding_mask=padding)
        hidden = self.target(target) + self.target_places
        for layer in (self.first, self.second):
            hidden = layer(hidden, memory, tgt_mask=self.later, memory_key_padding_mask=padding)
        logits: Tensor = self.head(hidden).transpose(1, 2)
        return logits


@offers("model")
def transformer(width: int = 32, heads: int = 4, dropout: float = 0.0) -> nn.Module:
    """Return the model."""
    return Transformer(width, heads, dropout)


class Sentences(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """Pairs of named inputs, which are the arguments of the model's forward, and labels [8] int64."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        lengths = torch.randint(3, LENGTH + 1, (count, 1), generator=generator)
        digits = torch.randint(10, (count, LENGTH), generator=generator)
        places = torch.arange(LENGTH)
        self._sources = torch.where(places < lengths, digits, PADDING)
        order = (lengths - 1 - places).clamp(min=0)
        labels = (digits.gather(1, order) + 3) % 10
        self._targets = torch.cat([torch.full((count, 1), START), labels[:, :-1]], dim=1)
        self._labels = torch.where(places < lengths, labels, IGNORED)

    def __len__(self) -> int:
        return len(self._labels)

    def __getitem__(self, index: int) -> tuple[dict[str, Tensor], Tensor]:
        return {"source": self._sources[index], "target": self._targets[index]}, self._labels[index]


@offers("data")
def sentences(root: Path | None, download: bool) -> Split:
    """Return the task's sentences, which are equal on all hosts."""
    return Split(train=Sentences(2048, seed=1), test=Sentences(256, seed=2), classes=TOKENS)


@offers("loss")
def loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the mean over sentences of the mean cross entropy of a sentence's tokens, a scalar.

    Args:
        logits: [batch, 12, 8].
        labels: [batch, 8] int64.
    """
    each = functional.cross_entropy(logits, labels, ignore_index=IGNORED, reduction="none")
    return (each.sum(1) / (labels != IGNORED).sum(1)).mean()
