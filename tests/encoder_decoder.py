"""A model whose encoder's result skips layers of its decoder."""

import torch
from torch import Tensor, nn


class EncoderDecoder(nn.Module):
    """A small transformer with a padding mask that encoder and decoder use, and a causal mask of its own."""

    causal: Tensor

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.source_table, self.target_table = nn.Embedding(9, 8), nn.Embedding(9, 8)
        encoder = (nn.TransformerEncoderLayer(8, 2, 16, dropout=dropout, batch_first=True) for _ in range(2))
        decoder = (nn.TransformerDecoderLayer(8, 2, 16, dropout=dropout, batch_first=True) for _ in range(2))
        self.encoder, self.decoder = nn.ModuleList(encoder), nn.ModuleList(decoder)
        self.head = nn.Linear(8, 9)
        self.register_buffer("causal", torch.ones(5, 5).triu(1).bool())

    def forward(self, source: Tensor, target: Tensor, scale: float = 2.0) -> Tensor:
        """Return logits [batch, length, 9] of the sources and targets [batch, length] int64."""
        padding = source == 0
        memory = self.source_table(source) * scale
        for layer in self.encoder:
            memory = layer(memory, src_key_padding_mask=padding)
        hidden = self.target_table(target)
        for layer in self.decoder:
            hidden = layer(hidden, memory, tgt_mask=self.causal, memory_key_padding_mask=padding)
        logits: Tensor = self.head(hidden)
        return logits
