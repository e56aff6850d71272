"""A parameter server, and trainers that share a table of its and keep the rest of their models. Start one and two:

    torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 3 parameter_server.py

Rank 0 owns an embedding of items, too large for the others in earnest. Each trainer looks up the items of its own
users, and learns a vector for each of its users, which nobody else sees. All trainers step the table at once.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fedring import remote  # and the backend fedring

ITEMS, USERS, WIDTH, STEPS = 200, 10, 8, 60


def modules(rank: int) -> dict[str, nn.Module]:
    """Return what a rank owns: the server the items, and a trainer its users."""
    torch.manual_seed(rank)
    return {"users": nn.Embedding(USERS, WIDTH)} if rank else {"items": nn.Embedding(ITEMS, WIDTH)}


def ratings(rank: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return users [n], items [n] and ratings [n] that only this trainer has. Items have a hidden taste in common."""
    taste = torch.randn(ITEMS, 3, generator=torch.Generator().manual_seed(0))
    generator = torch.Generator().manual_seed(rank)
    users = torch.randint(USERS, (2000,), generator=generator)
    items = torch.randint(ITEMS, (2000,), generator=generator)
    return users, items, (torch.randn(USERS, 3, generator=generator)[users] * taste[items]).sum(dim=1)


def mean_error(table: remote.Reference, users: nn.Module, rank: int) -> Tensor:
    """Return the mean squared error of a trainer's ratings, a scalar."""
    user, item, rating = ratings(rank)
    return ((users(user) * table(item)).sum(dim=1) - rating).square().mean()


def train(owners: remote.Owners, users: nn.Module) -> tuple[float, float]:
    """Train the server's table and this rank's users. Return the errors before and after."""
    table, mine = owners[0].module("items"), owners[owners.rank].module("users")
    optimizer = remote.DistributedOptimizer(torch.optim.Adagrad, remote.parameters(table, mine), lr=0.3)
    before = mean_error(table, users, owners.rank).item()
    for _ in range(STEPS):
        with remote.context() as step:
            step.backward(mean_error(table, users, owners.rank))
            optimizer.step(step)
    return before, mean_error(table, users, owners.rank).item()


def main() -> None:
    """Train if this is not rank 0; else only serve."""
    dist.init_process_group("fedring")
    mine = modules(dist.get_rank())
    with remote.serve(mine) as owners:
        if owners.rank > 0:
            before, after = train(owners, mine["users"])
            print(f"trainer {owners.rank}: error {before:.2f} at first, {after:.2f} after {STEPS} steps")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
