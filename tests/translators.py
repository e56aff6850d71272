"""Small models with skips, and sentences to train them on."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedring.pipeline.layers import Stages
from fedring.pipeline.stage import Stage
from fedring.pipeline.stash import WeightStashing
from fedring.schedules.schedule import Schedule
from fedring.schedules.simulation import check
from tests.encoder_decoder import EncoderDecoder

STEPS = 3


COUNT = 6


NAMES = ["encoder.1", "decoder.1"]


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean over a micro-batch; each sentence has as many tokens."""
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def model_of(dropout: float = 0.0) -> EncoderDecoder:
    torch.manual_seed(0)
    return EncoderDecoder(dropout)


def sentences(step: int, count: int = COUNT, size: int = 2) -> tuple[dict[str, Sequence[Tensor]], Sequence[Tensor]]:
    """Return the micro-batches of both inputs by name, and their targets."""
    generator = torch.Generator().manual_seed(step)
    source, target, labels = (torch.randint(1, 9, (count * size, 5), generator=generator) for _ in range(3))
    source[::2, 3:] = 0
    cut = [torch.split(tensor, size) for tensor in (source, target, labels)]
    return {"source": cut[0], "target": cut[1]}, cut[2]


def stages_of(cut: Stages, schedule: Schedule, *, recompute: bool = False) -> list[Stage]:
    needs, last = check(schedule, routes=cut.routes), len(cut) - 1
    return [
        Stage(
            module,
            WeightStashing(torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9), bound=need.versions),
            loss=loss_of if number == last else None,
            recompute=recompute,
        )
        for number, (module, need) in enumerate(zip(cut, needs, strict=True))
    ]


def alone(model: nn.Module, steps: int = STEPS) -> list[float]:
    """Train in one process on whole batches, and return the losses."""
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), []
    for step in range(steps):
        inputs, targets = sentences(step)
        optimizer.zero_grad()
        loss = loss_of(model(*(torch.cat(list(parts)) for parts in inputs.values())), torch.cat(list(targets)))
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        losses.append(loss.item())
    return losses


class Translator(nn.Module):
    """torch.nn.Transformer between embeddings and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target, self.head = nn.Embedding(9, 8), nn.Embedding(9, 8), nn.Linear(8, 9)
        self.transformer = nn.Transformer(8, 2, 2, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        """Return logits [batch, length, 9] of the sources and targets [batch, length] int64."""
        padding = source == 0
        logits: Tensor = self.head(
            self.transformer(
                self.source(source),
                self.target(target),
                src_key_padding_mask=padding,
                memory_key_padding_mask=padding,
            )
        )
        return logits
