"""LoRA on a small transformer: clients fine-tune adapters on a base that all of them have, and send nothing else.

The base is trained here, on upright digits; the digits of the clients lie on their side. docs/sharing.md, "LoRA", says
how to run it. It needs the extra peft:

    python docs/examples/lora.py pretrain base.safetensors
    python docs/examples/lora.py merge base.safetensors adapters.safetensors merged
"""

import sys
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import Dataset, TensorDataset

from fedring import vision
from fedring.data import Split, digits
from fedring.offers import offers
from fedring.train import load_model, save_model


class Block(nn.Module):
    """Self-attention and a perceptron, each with a residual connection."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        """Return the next hidden state [batch, 8, width] of `hidden`."""
        parts = self.qkv(self.norm1(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = functional.scaled_dot_product_attention(*parts.unbind())
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        after: Tensor = hidden + self.down(functional.gelu(self.up(self.norm2(hidden))))
        return after


class Transformer(nn.Module):
    """Reads the eight rows of a digit as a sentence of eight words."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.embedding, self.places = nn.Linear(8, width), nn.Parameter(torch.randn(8, width))
        self.blocks = nn.Sequential(*(Block(width, 4) for _ in range(layers)))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits [batch, 10] of digits [batch, 1, 8, 8]."""
        logits: Tensor = self.head(self.blocks(self.embedding(images.squeeze(1)) + self.places).mean(1))
        return logits


@offers("model")
def adapted(base: Path, rank: int = 4, freeze_a: bool = False) -> nn.Module:
    """Return the base with adapters: the model of the job. Only what requires a gradient travels.

    Args:
        base: The file of the base, below the data_root of the server and of each client.
        rank: The rank of the adapters.
        freeze_a: Train and send only the matrices B, as FFA-LoRA does (Sun et al. 2024, section 4).
    """
    vision.load()  # peft imports torchvision, which may be built for CUDA beside a torch for processors
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=["qkv", "up", "down"])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # A is random, and must be the same everywhere if it does not travel
        model: nn.Module = get_peft_model(load_model(base, Transformer()), config)
    for name, parameter in model.named_parameters():
        if freeze_a and "lora_A" in name:
            parameter.requires_grad_(False)
    return model


@offers("data")
def sideways(root: Path | None = None, download: bool = False) -> Split:
    """Return the digits, lying on their side: the data of the job."""
    split = digits(root, download)
    return Split(_turned(split.train), _turned(split.test), split.classes)


def pretrain(path: str) -> None:
    """Train the base on upright digits, and save it."""
    torch.manual_seed(0)
    model, (images, labels) = Transformer(), _tensors(digits().train)
    optimizer = torch.optim.Adam(model.parameters(), 0.003)
    for _ in range(20):
        for batch in torch.randperm(len(images)).split(64):
            optimizer.zero_grad()
            functional.cross_entropy(model(images[batch]), labels[batch]).backward()
            optimizer.step()
    save_model(model, path)


def merge(base: str, adapters: str, folder: str, rank: str = "4") -> None:
    """Write what `flctl models export` wrote in two other forms.

    Args:
        base: The file of the base.
        adapters: The file that was exported.
        folder: Gets `model.safetensors`, base plus adapters, which plain torch loads into a Transformer; and the
            adapters as PeftModel.from_pretrained() loads them.
        rank: The rank of the adapters.
    """
    model = load_model(adapters, adapted(Path(base), int(rank)), partial=True)
    model.save_pretrained(folder)
    merged: nn.Module = model.merge_and_unload()
    save_model(merged, Path(folder) / "model.safetensors")


def _turned(samples: Dataset[tuple[Tensor, int]]) -> TensorDataset:
    images, labels = _tensors(samples)
    return TensorDataset(images.transpose(2, 3).contiguous(), labels)


def _tensors(samples: Dataset[tuple[Tensor, int]]) -> tuple[Tensor, Tensor]:
    """Return the images [n, 1, 8, 8] and the labels [n] of a data set."""
    pairs = [samples[index] for index in range(len(samples))]
    return torch.stack([image for image, _ in pairs]), torch.tensor([int(label) for _, label in pairs])


if __name__ == "__main__":
    {"pretrain": pretrain, "merge": merge}[sys.argv[1]](*sys.argv[2:])
