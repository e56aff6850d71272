"""A model whose two stages two ranks own, and which a third rank trains. Start three processes:

    torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 3 remote_stages.py

Rank 0 has neither weights nor gradients nor optimizer state. It passes its batches through the stages of ranks 1 and 2.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fedring import remote  # and the backend fedring

STEPS = 60


class Features(nn.Module):
    """The first stage: numbers [n, 2] to features [n, 16]."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        features: Tensor = self.layers(x)
        return features


def stages(rank: int) -> dict[str, nn.Module]:
    """Return what a rank owns."""
    torch.manual_seed(rank)
    if rank == 1:
        return {"features": Features()}
    if rank == 2:
        return {"classes": nn.Linear(16, 2)}
    return {}


def batches() -> list[tuple[Tensor, Tensor]]:
    """Return points in a plane, and for each whether it lies in a circle."""
    generator = torch.Generator().manual_seed(0)
    points = torch.rand(STEPS, 64, 2, generator=generator) * 2 - 1
    return [(one, (one.square().sum(dim=1) < 0.6).long()) for one in points]


def train(owners: remote.Owners) -> list[float]:
    """Train both stages from here, and return the losses."""
    features, classes = owners[1].module("features"), owners[2].module("classes")
    optimizer = remote.DistributedOptimizer(torch.optim.Adam, remote.parameters(features, classes), lr=0.02)
    losses = []
    for points, targets in batches():
        with remote.context() as step:
            loss = nn.functional.cross_entropy(classes(features(points)), targets)
            step.backward(loss)
            optimizer.step(step)
        losses.append(loss.item())
    return losses


def main() -> None:
    """Train if this is rank 0; else only serve."""
    dist.init_process_group("fedring")
    with remote.serve(stages(dist.get_rank())) as owners:
        if owners.rank == 0:
            losses = train(owners)
            print(f"loss {losses[0]:.6f} at first, {losses[-1]:.6f} after {len(losses)} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
